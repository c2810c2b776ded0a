"""Groups and their episodes: opened, run, accepted once, scored; the state of both in memory.

A record changes in memory and in the ledger together, by the transitions of `records`. Only groups
that are open or wait for their batch are kept in memory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from aether_common.crash import crash_point
from aether_common.digests import sha256_bytes
from aether_common.files import write_durably
from aether_common.wire import Kind
from loguru import logger

from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import EpisodeRecord, GroupRecord, RunRecord, SourceRecord, TurnRecord, number_key
from aether_coordinator.retention import forget_traces, remove_traces
from aether_coordinator.rollout import Outcome
from aether_coordinator.score import is_uniform
from aether_coordinator.status import Counters

INLINE_TRACE = 64 << 10
"""Larger traces are files of the run directory, named by their SHA-256."""
MIN_COMPARED = 2
"""Fewer finished episodes cannot be compared with each other."""


def read_trace(ledger: Ledger, directory: Path, digest: str) -> bytes:
    """A trace from the ledger, or a larger one from its file. Raises `FileNotFoundError` when it was removed."""
    inline = ledger.get("traces", digest.encode())
    return inline if inline is not None else (directory / f"{digest}.msgpack").read_bytes()


class Groups:
    """All groups that are not over yet."""

    def __init__(
        self, ledger: Ledger, run_root: Path, counters: Counters, *, max_attempts: int, drop_uniform: bool
    ) -> None:
        self._ledger = ledger
        self._traces = run_root / "traces"
        self._traces.mkdir(parents=True, exist_ok=True)
        self._counters = counters
        self._max_attempts = max_attempts
        self._drop_uniform = drop_uniform
        self.groups: dict[int, GroupRecord] = {}
        self.episodes: dict[str, EpisodeRecord] = {}
        self.drawn: dict[str, int] = {}
        self.run: RunRecord
        self.finished: asyncio.Queue[GroupRecord] = asyncio.Queue()
        """Groups whose episodes are all final, as they become so."""

    def load(self, run: RunRecord) -> None:
        """Read what is not over from the ledger."""
        self.run = run
        for _, value in self._ledger.scan("sources"):
            source = SourceRecord.decode(value)
            self.drawn[source.name] = source.drawn
        for _, value in self._ledger.scan("groups"):
            group = GroupRecord.decode(value)
            if group.state in ("open", "ready"):
                self.groups[group.id] = group
                for episode in self.recorded_episodes(group):
                    self.episodes[episode.id] = episode
                if group.state == "ready":
                    self.finished.put_nowait(group)

    def recorded_episodes(self, group: GroupRecord) -> list[EpisodeRecord]:
        """The episodes of any group, from the ledger, by index."""
        prefix = f"g{group.id:08d}-".encode()
        return [EpisodeRecord.decode(value) for _, value in self._ledger.scan("episodes", prefix)]

    def of(self, group: GroupRecord) -> list[EpisodeRecord]:
        """The episodes of a group in memory, by index."""
        return [self.episodes[EpisodeRecord(group=group.id, index=index).id] for index in range(group.size)]

    def unbatched(self) -> list[GroupRecord]:
        """The train groups that are open or ready, by id."""
        return [group for group in self.groups.values() if group.kind == "train"]

    async def open(self, kind: Kind, source: str, task: int, version: int, size: int, drawn: int) -> GroupRecord:
        """Open a group; for train groups `drawn` is the source's new position."""
        group = GroupRecord(id=self.run.next_group, kind=kind, source=source, task=task, version=version, size=size)
        self.run = self.run.with_(next_group=group.id + 1)
        episodes = [EpisodeRecord(group=group.id, index=index) for index in range(size)]
        self.groups[group.id] = group
        self.episodes |= {episode.id: episode for episode in episodes}
        writes = [Write("run", b"run", self.run.encode()), Write("groups", group.key, group.encode())]
        writes += [Write("episodes", episode.key, episode.encode()) for episode in episodes]
        if kind == "train":
            self.drawn[source] = drawn
            record = SourceRecord(name=source, drawn=drawn)
            writes.append(Write("sources", source.encode(), record.encode()))
        crash_point("group.before_commit")
        await self._ledger.commit(*writes)
        crash_point("group.after_commit")
        return group

    async def run_episode(
        self, group: GroupRecord, index: int, attempt: Callable[[EpisodeRecord], Awaitable[Outcome]]
    ) -> Outcome | None:
        """Run one episode until it is final. None when its group is over before."""
        identity = EpisodeRecord(group=group.id, index=index).id
        while (episode := self.episodes.get(identity)) is not None and episode.state == "running":
            outcome = await attempt(episode)
            if self.episodes.get(identity) is not episode:
                return None
            if outcome.kind == "done":
                await self._accept(episode, outcome)
            elif outcome.kind == "infrastructure" and episode.attempt + 1 < self._max_attempts:
                logger.bind(episode=identity).warning("attempt failed, trying again: {}", outcome.error)
                await self._again(episode, outcome.error)
                continue
            else:
                self._counters.episodes_failed += 1
                await self._set(episode.failed(outcome.error))
            await self._check_complete(group.id)
            return outcome
        return None

    async def _accept(self, episode: EpisodeRecord, outcome: Outcome) -> None:
        """Commit the trace and the acceptance in one transaction."""
        digest = sha256_bytes(outcome.trace)
        if len(outcome.trace) > INLINE_TRACE:
            file = self._traces / f"{digest}.msgpack"
            await self._ledger.write_file(lambda: write_durably(file, outcome.trace))
            trace = []
        else:
            trace = [Write("traces", digest.encode(), outcome.trace)]
        accepted = episode.accepted(outcome.reward, outcome.tokens, outcome.truncated, digest)
        self._counters.episodes_accepted += 1
        await self._set(accepted, *trace)

    async def _again(self, episode: EpisodeRecord, error: str) -> None:
        """The next attempt starts with an empty journal."""
        prefix = TurnRecord.prefix(episode.id, episode.attempt)
        stale = [Write("journal", key, None) for key, _ in self._ledger.scan("journal", prefix)]
        await self._set(episode.again(error), *stale)

    async def _set(self, episode: EpisodeRecord, *others: Write) -> None:
        # Durable first: whoever sees a final episode reads its trace.
        crash_point("episode.before_commit")
        await self._ledger.commit(Write("episodes", episode.key, episode.encode()), *others)
        crash_point("episode.after_commit")
        if episode.id in self.episodes:
            self.episodes[episode.id] = episode

    async def _check_complete(self, number: int) -> None:
        group = self.groups.get(number)
        if group is None or group.state != "open":
            return
        episodes = self.of(group)
        if any(episode.state == "running" for episode in episodes):
            return
        await self.complete(group)

    async def complete(self, group: GroupRecord) -> None:
        """All episodes are final: score the group, or drop it when there is nothing to compare."""
        done = [episode for episode in self.of(group) if episode.state == "done"]
        if group.kind == "train" and len(done) < MIN_COMPARED:
            errors = {episode.error for episode in self.of(group) if episode.error}
            await self.drop(group, f"{len(done)} of {group.size} episodes finished: {'; '.join(sorted(errors))[:300]}")
            return
        if group.kind == "train" and is_uniform([episode.reward for episode in done]):
            self._counters.groups_uniform += 1
            if self._drop_uniform:
                await self.drop(group, f"all rewards are {done[0].reward}")
                return
        scored = group.scored()
        self.groups[group.id] = scored
        crash_point("score.before_commit")
        await self._ledger.commit(Write("groups", scored.key, scored.encode()))
        crash_point("score.after_commit")
        self.finished.put_nowait(scored)

    async def drop(self, group: GroupRecord, reason: str) -> None:
        """Leave a train group out of training for good; its tokens are counted."""
        dropped = group.dropped(reason)
        self._counters.groups_dropped += 1
        self._counters.tokens_dropped += sum(episode.tokens for episode in self.of(group))
        logger.bind(group=group.id).warning("group dropped: {}", reason)
        recordings = forget_traces(self._ledger, [(group, self.of(group))])
        self.forget([group.id])
        await self._ledger.commit(Write("groups", dropped.key, dropped.encode()), *recordings)
        remove_traces(self._traces, recordings)
        self.finished.put_nowait(dropped)

    def forget(self, numbers: Iterable[int]) -> None:
        """Groups that are over leave the memory."""
        for number in numbers:
            group = self.groups.pop(number, None)
            for index in range(group.size if group else 0):
                self.episodes.pop(EpisodeRecord(group=number, index=index).id, None)

    def trace(self, digest: str) -> bytes:
        """A recorded trace. Raises `FileNotFoundError` when it was removed."""
        return read_trace(self._ledger, self._traces, digest)

    async def set_run(self, **changes: Any) -> None:
        """Change the record of the run itself."""
        self.run = self.run.with_(**changes)
        await self._ledger.commit(Write("run", b"run", self.run.encode()))

    async def forget_recordings(self, numbers: Iterable[int], retained_from: int) -> None:
        """Delete traces and journal of groups that are over; `retained_from` is the first kept step."""
        recorded = [GroupRecord.decode(value) for n in numbers if (value := self._ledger.get("groups", number_key(n)))]
        writes = forget_traces(self._ledger, [(group, self.recorded_episodes(group)) for group in recorded])
        self.run = self.run.with_(retained_from=retained_from)
        await self._ledger.commit(*writes, Write("run", b"run", self.run.encode()))
        remove_traces(self._traces, writes)
