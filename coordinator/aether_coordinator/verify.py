"""`aether-coordinator verify`: the invariants of a run, checked on the directory of a stopped run.

Each check yields one entry per thing that it looked at: an empty text, or what is wrong with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from aether_common.arrays import unpack_tokens
from aether_common.batch import Sample, batch_path, decode_batch
from aether_common.checkpoint import complete_steps, read_manifest, verify_adapter
from aether_common.digests import sha256_bytes
from aether_common.errors import AetherError, RunDirectoryError
from aether_common.files import FileLock

from aether_coordinator.batches import build_batch, temporary_path
from aether_coordinator.groups import read_trace
from aether_coordinator.lag import lag
from aether_coordinator.ledger import Ledger
from aether_coordinator.records import (
    SCHEMA,
    BatchRecord,
    DispatchRecord,
    EpisodeRecord,
    GroupRecord,
    PolicyRecord,
    RunRecord,
    TurnRecord,
)
from aether_coordinator.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Finding:
    """An invariant, how many things were looked at, how many violate it, and the first of them."""

    invariant: str
    checked: int
    violations: int
    first: str


class RunDirectory:
    """Everything recorded about a run, read once. Raises `RunDirectoryError` when there is no readable run."""

    def __init__(self, root: Path) -> None:
        if not (root / "state" / "data.mdb").is_file():
            raise RunDirectoryError(f"{root} holds no run: give the run_root of a server.toml")
        self._lock = FileLock(root / "coordinator.lock", f"a coordinator runs on {root}: stop it first")
        self.root = root
        self.ledger = Ledger(root / "state")
        recorded = self.ledger.get("run", b"run")
        if recorded is None:
            raise RunDirectoryError(f"{root} holds no run: its state is empty")
        self.run = RunRecord.decode(recorded)
        if self.run.schema_version != SCHEMA:
            raise RunDirectoryError(
                f"the state of {root} has schema {self.run.schema_version}, this release reads {SCHEMA}: "
                "start and stop the run with this release first"
            )
        self.settings = ServerSettings.model_validate_json(self.run.settings)
        self.groups = {
            group.id: group for _, value in self.ledger.scan("groups") if (group := GroupRecord.decode(value))
        }
        self.batches = {b.step: b for _, value in self.ledger.scan("batches") if (b := BatchRecord.decode(value))}
        self.policies = {p.version: p for _, value in self.ledger.scan("policies") if (p := PolicyRecord.decode(value))}

    def close(self) -> None:
        self.ledger.close()
        self._lock.release()

    @cached_property
    def episodes(self) -> dict[int, list[EpisodeRecord]]:
        """By group, by index."""
        found: dict[int, list[EpisodeRecord]] = {number: [] for number in self.groups}
        for _, value in self.ledger.scan("episodes"):
            episode = EpisodeRecord.decode(value)
            found.setdefault(episode.group, []).append(episode)
        return found

    @cached_property
    def checkpoints(self) -> list[int]:
        return complete_steps(self.root)

    @property
    def kept_batches(self) -> list[BatchRecord]:
        return [record for step, record in sorted(self.batches.items()) if step >= self.run.retained_from]

    def batch_bytes(self, step: int) -> bytes:
        """The committed batch file, also when a crash left out its renaming."""
        path = batch_path(self.root, step)
        return (path if path.is_file() else temporary_path(self.root, step)).read_bytes()

    def samples(self, step: int) -> list[Sample]:
        return decode_batch(self.batch_bytes(step)).samples

    def trace(self, digest: str) -> bytes:
        return read_trace(self.ledger, self.root / "traces", digest)

    def answers(self, episode: EpisodeRecord) -> list[TurnRecord]:
        """The journaled answers of the accepted attempt of an episode."""
        prefix = TurnRecord.prefix(episode.id, episode.attempt)
        return [TurnRecord.decode(value) for _, value in self.ledger.scan("journal", prefix)]


def episodes_accepted_once(run: RunDirectory) -> Iterator[str]:
    """Each episode is accepted at most once, belongs to its group and has the trace that it names."""
    traces: dict[str, str] = {}
    for number, episodes in run.episodes.items():
        group = run.groups.get(number)
        for episode in episodes:
            if group is None or episode.index >= group.size:
                yield f"episode {episode.id} belongs to no group"
            elif episode.state == "done" and episode.trace in traces:
                yield f"episodes {traces[episode.trace]} and {episode.id} have the same trace"
            elif episode.state == "done" and group.state in ("open", "ready") and not _has_trace(run, episode):
                yield f"episode {episode.id} is accepted, its trace {episode.trace[:12]} is missing"
            else:
                yield ""
            if episode.state == "done":
                traces[episode.trace] = episode.id


def _has_trace(run: RunDirectory, episode: EpisodeRecord) -> bool:
    try:
        return sha256_bytes(run.trace(episode.trace)) == episode.trace
    except OSError:
        return False


def groups_complete(run: RunDirectory) -> Iterator[str]:
    """A group that is ready, batched or done has only final episodes, all of them."""
    for group in run.groups.values():
        episodes = run.episodes[group.id]
        if len(episodes) != group.size:
            yield f"group {group.id} has {len(episodes)} of {group.size} episodes"
        elif group.state in ("ready", "batched", "done") and any(e.state == "running" for e in episodes):
            yield f"group {group.id} is {group.state} with an episode that still runs"
        else:
            yield ""


def groups_in_one_batch(run: RunDirectory) -> Iterator[str]:
    """Each group's samples enter at most one batch, and both sides say so."""
    counts = Counter(number for record in run.batches.values() for number in record.groups)
    for number, count in counts.items():
        yield f"group {number} is in {count} batches" if count > 1 else ""
    for record in run.batches.values():
        for number in record.groups:
            group = run.groups.get(number)
            agrees = group is not None and group.state == "batched" and group.step == record.step
            yield "" if agrees else f"batch {record.step} holds group {number}, whose record says {group}"
    for group in run.groups.values():
        if group.state == "batched" and counts[group.id] == 0:
            yield f"group {group.id} says it is in batch {group.step}, which does not hold it"


def steps_gapless(run: RunDirectory) -> Iterator[str]:
    """Batches, checkpoints and policies have no gaps, and none is ahead of what it follows from."""
    for name, steps, first in (
        ("batch", sorted(run.batches), 1),
        ("policy", sorted(run.policies), 0),
    ):
        for expected, step in enumerate(steps, start=first):
            yield "" if step == expected else f"{name} {expected} is missing, {step} is there"
    kept = [step for step in run.checkpoints if step >= max(1, run.run.retained_from)]
    for expected, step in enumerate(kept, start=max(1, run.run.retained_from)):
        yield "" if step == expected else f"checkpoint {expected} is missing, {step} is there"
    newest, batches = max(run.checkpoints, default=-1), len(run.batches)
    yield f"checkpoint {newest} is ahead of batch {batches}" if newest > batches else ""
    policies = max(run.policies, default=-1)
    yield f"policy {policies} is ahead of checkpoint {newest}" if policies > newest else ""


def batches_unchanged(run: RunDirectory) -> Iterator[str]:
    """The file of each kept batch has the committed digest."""
    for record in run.kept_batches:
        try:
            same = sha256_bytes(run.batch_bytes(record.step)) == record.digest
            yield "" if same else f"the file of batch {record.step} differs from its committed digest"
        except OSError as error:
            yield f"the file of batch {record.step} cannot be read: {error.strerror}"


def batches_rebuilt(run: RunDirectory) -> Iterator[str]:
    """Each kept batch can be built again from the recorded groups and traces, byte for byte."""
    temperatures = {source.name: source.sampling.temperature for source in run.settings.train}
    for record in run.kept_batches:
        groups = [run.groups[number].with_(step=None) for number in record.groups if number in run.groups]
        try:
            data, _ = build_batch(run.run.run, record.step, groups, run.episodes, temperatures, run.trace)
            same = sha256_bytes(data) == record.digest
            yield "" if same else f"batch {record.step} built again has another digest"
        except (OSError, AetherError, KeyError) as error:
            yield f"batch {record.step} cannot be built again: {error}"


def checkpoints_chained(run: RunDirectory) -> Iterator[str]:
    """Checkpoint N names batch N and checkpoint N-1."""
    for step in run.checkpoints:
        if 0 < step < run.run.retained_from:
            continue
        try:
            manifest, _ = read_manifest(run.root, step)
            parent = read_manifest(run.root, step - 1)[1] if step - 1 in run.checkpoints else None
        except AetherError as error:
            yield str(error)
            continue
        batch = run.batches[step].digest if step in run.batches else None
        if manifest.run != run.run.run or manifest.step != step:
            yield f"checkpoint {step} says it is step {manifest.step} of run {manifest.run!r}"
        elif manifest.batch != batch:
            yield f"checkpoint {step} names batch {manifest.batch}, committed is {batch}"
        elif parent is not None and manifest.parent != parent:
            yield f"checkpoint {step} names another parent than checkpoint {step - 1}"
        else:
            yield ""


def policies_published(run: RunDirectory) -> Iterator[str]:
    """Policy N has the adapter of checkpoint N, whose files have the digests of its manifest."""
    for version, policy in run.policies.items():
        if version not in run.checkpoints:
            if version >= run.run.retained_from:
                yield f"policy {version} has no checkpoint"
            continue
        try:
            adapter = verify_adapter(run.root, version).adapter
            yield "" if adapter == policy.adapter else f"policy {version} is not the adapter of its checkpoint"
        except AetherError as error:
            yield str(error)


def lag_bounded(run: RunDirectory) -> Iterator[str]:
    """No group is older in its batch than max_policy_lag allows, nor newer than the policy it trains."""
    limit = run.settings.batch.max_policy_lag
    for record in run.batches.values():
        for number in record.groups:
            if number not in run.groups:
                yield f"group {number} of batch {record.step} is not recorded"
                continue
            actual = lag(record.step, run.groups[number].version)
            yield (
                "" if 0 <= actual <= limit else f"group {number} has lag {actual} in batch {record.step} (max {limit})"
            )


def samples_traced(run: RunDirectory) -> Iterator[str]:
    """Every sampled span of a kept batch is one journaled answer: reply, worker and adapter are known."""
    for record in run.kept_batches:
        answers: dict[str, list[TurnRecord]] = {}
        episodes = {episode.id: episode for number in record.groups for episode in run.episodes.get(number, [])}
        try:
            samples = run.samples(record.step)
        except (OSError, AetherError):
            continue  # batches_unchanged says so
        for sample in samples:
            where = f"batch {record.step}, episode {sample.episode}"
            if sample.episode not in episodes or sample.version not in run.policies:
                yield f"{where}: no such episode in its groups, or no policy {sample.version}"
                continue
            left = answers.setdefault(sample.episode, run.answers(episodes[sample.episode]))
            adapter = run.policies[sample.version].adapter
            for span in sampled_spans(sample):
                found = next((answer for answer in left if unpack_tokens(answer.tokens) == span), None)
                if found is None:
                    yield f"{where}: {len(span)} tokens come from no reply"
                elif found.adapter != adapter or not found.worker:
                    yield f"{where}: job {found.job} used another adapter"
                else:
                    left.remove(found)
                    yield ""


def sampled_spans(sample: Sample) -> Iterator[list[int]]:
    """The maximal runs of sampled tokens."""
    span: list[int] = []
    for token, on in zip(sample.token_ids(), sample.sampled, strict=True):
        if on:
            span.append(token)
        elif span:
            yield span
            span = []
    if span:
        yield span


def jobs_answered_once(run: RunDirectory) -> Iterator[str]:
    """No job is both answered and still out, and no job answered two turns."""
    jobs: Counter[str] = Counter()
    keys: set[bytes] = set()
    for key, value in run.ledger.scan("journal"):
        jobs[TurnRecord.decode(value).job] += 1
        keys.add(key)
    for job, count in jobs.items():
        yield f"job {job} answers {count} turns" if count > 1 else ""
    for _, value in run.ledger.scan("dispatches"):
        record = DispatchRecord.decode(value)
        yield f"job {record.job} is answered and still out" if record.journal in keys else ""


INVARIANTS: tuple[Callable[[RunDirectory], Iterator[str]], ...] = (
    episodes_accepted_once,
    groups_complete,
    groups_in_one_batch,
    jobs_answered_once,
    steps_gapless,
    batches_unchanged,
    batches_rebuilt,
    checkpoints_chained,
    policies_published,
    lag_bounded,
    samples_traced,
)


def _results(invariant: Callable[[RunDirectory], Iterator[str]], run: RunDirectory) -> Iterator[str]:
    """A record that is so broken that the check itself fails is a violation, not a crash of the checker."""
    try:
        yield from invariant(run)
    except (AetherError, OSError, LookupError, ValueError) as error:
        yield f"cannot be checked to the end: {type(error).__name__}: {error}"


def verify(root: Path) -> list[Finding]:
    """Check every invariant of a stopped run. Raises `RunDirectoryError` when it cannot be read."""
    run = RunDirectory(root)
    try:
        findings: list[Finding] = []
        for invariant in INVARIANTS:
            results = list(_results(invariant, run))
            wrong = [result for result in results if result]
            name = invariant.__name__.replace("_", " ")
            findings.append(Finding(name, len(results), len(wrong), wrong[0] if wrong else ""))
        return findings
    finally:
        run.close()
