"""Evaluations: every task of an evaluation source at one pinned policy version.

A finished evaluation is a file, `evals/<source>/policy_<version>.jsonl`, one line per episode.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from aether_common.crash import crash_point
from aether_common.files import make_directory, write_durably

from aether_coordinator.groups import Groups
from aether_coordinator.ledger import Ledger
from aether_coordinator.records import EpisodeRecord, GroupRecord
from aether_coordinator.samples import decode_episode, trainable_traces
from aether_coordinator.settings import EvalSource
from aether_coordinator.sources import Source
from aether_coordinator.status import EvaluationStatus, evaluation_path


@dataclass(slots=True)
class Evaluation:
    """One source at one version."""

    source: str
    version: int
    total: int
    """Groups (tasks)."""
    finished: dict[int, GroupRecord] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)


def finished_rewards(episodes: list[EpisodeRecord]) -> list[float]:
    """Rewards of the episodes that ended well: what failed is no reward of 0."""
    return [episode.reward for episode in episodes if episode.state == "done"]


def is_due(source: EvalSource, version: int, last: int) -> bool:
    """Whether `source` is evaluated at policy `version`: the first, the last, and every so many."""
    return version in (0, last) or (source.every is not None and version % source.every == 0)


class Evaluations:
    """Opens due evaluations and writes their results."""

    def __init__(
        self, ledger: Ledger, groups: Groups, sources: dict[str, Source], run_root: Path, last_version: int
    ) -> None:
        self._ledger = ledger
        self._groups = groups
        self._sources = sources
        self._run_root = run_root
        self._last = last_version
        self.running: dict[tuple[str, int], Evaluation] = {}
        self.done: dict[tuple[str, int], EvaluationStatus] = {}
        self._forgotten: set[tuple[str, int]] = set()

    def load(self, recorded: list[GroupRecord]) -> None:
        """Know the finished evaluations by their files, the running ones by their groups."""
        for name in self._sources:
            for file in sorted(evaluation_path(self._run_root, name, 0).parent.glob("policy_*.jsonl")):
                version = int(file.stem.removeprefix("policy_"))
                lines = [json.loads(line) for line in file.read_text().splitlines()]
                rewards = [line["reward"] for line in lines if not line["error"]]
                self.done[name, version] = _status(name, version, len(lines), len(lines), rewards)
        for group in recorded:
            key = (group.source, group.version)
            if group.kind == "eval" and key not in self.done and group.source in self._sources:
                evaluation = self.running.setdefault(
                    key, Evaluation(*key, total=len(self._sources[group.source].tasks))
                )
                if group.state == "done":
                    evaluation.finished[group.task] = group
                    evaluation.rewards += finished_rewards(self._groups.recorded_episodes(group))

    async def begin(self, version: int) -> None:
        """Note the evaluations that are due at an activated version; write one that a crash kept from its file."""
        for name, source in self._sources.items():
            assert isinstance(source.settings, EvalSource)
            key = (name, version)
            if is_due(source.settings, version, self._last) and key not in self.running and key not in self.done:
                self.running[key] = Evaluation(name, version, total=len(source.tasks))
            if key in self.running:
                await self._write_if_complete(self.running[key])

    def next_task(self) -> tuple[str, int, int] | None:
        """(source, version, task) of the next evaluation group to open, oldest evaluation first."""
        for evaluation in self.running.values():
            opened = {
                group.task
                for group in self._groups.groups.values()
                if (group.kind, group.source, group.version) == ("eval", evaluation.source, evaluation.version)
            }
            for task in range(evaluation.total):
                if task not in opened and task not in evaluation.finished:
                    return evaluation.source, evaluation.version, task
        return None

    def size(self, source: str) -> int:
        settings = self._sources[source].settings
        assert isinstance(settings, EvalSource)
        return settings.episodes_per_task

    async def finish(self, group: GroupRecord) -> None:
        """A group of an evaluation is done; write the file when it was the last."""
        evaluation = self.running[group.source, group.version]
        evaluation.finished[group.task] = group
        evaluation.rewards += finished_rewards(self._groups.of(group))
        self._groups.forget([group.id])
        await self._write_if_complete(evaluation)

    async def _write_if_complete(self, evaluation: Evaluation) -> None:
        if len(evaluation.finished) < evaluation.total:
            return
        lines = [
            json.dumps(self._line(group, episode))
            for group in sorted(evaluation.finished.values(), key=lambda group: group.task)
            for episode in self._groups.recorded_episodes(group)
        ]
        path = evaluation_path(self._run_root, evaluation.source, evaluation.version)
        crash_point("evaluation.before_write")

        def write() -> None:
            make_directory(path.parent)
            write_durably(path, "".join(line + "\n" for line in lines).encode())

        await self._ledger.write_file(write)
        crash_point("evaluation.after_write")
        key = (evaluation.source, evaluation.version)
        del self.running[key]
        self.done[key] = _status(*key, len(lines), len(lines), evaluation.rewards)

    def _line(self, group: GroupRecord, episode: EpisodeRecord) -> dict[str, object]:
        task = self._sources[group.source].tasks[group.task].data
        prompt = completion = ""
        if episode.trace:
            traces = trainable_traces(decode_episode(self._groups.trace(episode.trace)))
            if traces:
                users = [message for message in traces[-1].messages if message.role == "user"]
                prompt, completion = str(users[-1].content) if users else "", traces[-1].last_reply
        return {
            "group": group.id,
            "task": group.task,
            "task_name": task.name or "",
            "index": episode.index,
            "reward": episode.reward,
            "prompt": prompt,
            "completion": completion,
            "tokens": episode.tokens,
            "error": episode.error if episode.state == "failed" else "",
        }

    def expired(self, first_kept: int) -> list[int]:
        """Groups of finished evaluations of versions below `first_kept`, each time new ones only."""
        found: list[int] = []
        for source, version in set(self.done) - self._forgotten:
            if version < first_kept:
                self._forgotten.add((source, version))
                lines = evaluation_path(self._run_root, source, version).read_text().splitlines()
                found += {json.loads(line)["group"] for line in lines}
        return sorted(found)

    def versions(self) -> set[int]:
        """Versions under evaluation: their adapters stay."""
        return {version for _, version in self.running}

    def complete(self, version: int) -> bool:
        """Whether everything that is due up to and at `version` is evaluated."""
        return not self.running and all(
            (name, version) in self.done
            for name, source in self._sources.items()
            if isinstance(source.settings, EvalSource) and is_due(source.settings, version, self._last)
        )

    def status(self) -> list[EvaluationStatus]:
        running = [
            _status(
                evaluation.source,
                evaluation.version,
                len(evaluation.finished) * self.size(evaluation.source),
                evaluation.total * self.size(evaluation.source),
                evaluation.rewards,
            )
            for evaluation in self.running.values()
        ]
        return [*self.done.values(), *running]


def _status(source: str, version: int, done: int, total: int, rewards: list[float]) -> EvaluationStatus:
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return EvaluationStatus(source=source, version=version, done=done, total=total, reward=mean)
