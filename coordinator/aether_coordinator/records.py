"""Typed records of the run's state, as LMDB keeps them (msgpack maps), and their keys.

Every transition is a method that returns a new record; an impossible one raises `StateError` that
names the record. LMDB orders keys bytewise, so numbers are written with leading zeros.
"""

from typing import Any, Literal, Self

import msgpack
from aether_common.errors import AetherError, RunDirectoryError
from aether_common.wire import Kind, pack
from pydantic import BaseModel, ConfigDict

SCHEMA = 3
"""Raised with every change that old records do not fit; see `migrations`."""


class StateError(AetherError):
    """A transition that the state of a record does not allow."""

    exit_code = 10


class Record(BaseModel):
    """Base of all records."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    def encode(self) -> bytes:
        return pack(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises `RunDirectoryError` for anything that is no record of this kind."""
        try:
            return cls.model_validate(msgpack.unpackb(data))
        except ValueError as error:
            cause = str(error).partition("\n")[0]
            raise RunDirectoryError(
                f"the state holds a {cls.__name__} that cannot be read ({cause}): restore the run directory"
            ) from error

    def with_(self, **changes: Any) -> Self:
        return self.model_copy(update=changes)


class RunRecord(Record):
    """The run itself."""

    schema_version: int = SCHEMA
    run: str
    uuid: str
    created_s: float
    settings: str
    """The settings as JSON; what may change on resume is listed in `resume`."""
    started_s: float = 0.0
    """Unix time at which the first train group was opened; 0 before."""
    next_group: int = 1
    paused: bool = False
    """No new groups until `resume`."""
    retained_from: int = 0
    """Steps below have no batch, traces, journal and checkpoint any more."""


class SourceRecord(Record):
    """How far a train source was drawn."""

    name: str
    drawn: int = 0
    """Tasks drawn so far; position in the seeded order and fairness clock at once."""


GroupState = Literal["open", "ready", "batched", "dropped", "done"]


class GroupRecord(Record):
    """`size` episodes of one task, all on one policy version."""

    id: int
    kind: Kind
    source: str
    task: int
    """Index of the task in its taskset."""
    version: int
    size: int
    state: GroupState = "open"
    step: int | None = None
    """The step whose batch it entered."""
    reason: str = ""
    """Why it was dropped."""

    @property
    def key(self) -> bytes:
        return b"%012d" % self.id

    def _leave(self, state: GroupState, expected: GroupState, **changes: Any) -> "GroupRecord":
        if self.state != expected:
            raise StateError(f"group {self.id}: cannot become {state}: it is {self.state}")
        return self.with_(state=state, **changes)

    def scored(self) -> "GroupRecord":
        """All episodes are final: ready for a batch, or done when it is an evaluation."""
        return self._leave("ready" if self.kind == "train" else "done", "open")

    def batched(self, step: int) -> "GroupRecord":
        return self._leave("batched", "ready", step=step)

    def dropped(self, reason: str) -> "GroupRecord":
        if self.state not in ("open", "ready"):
            raise StateError(f"group {self.id}: cannot be dropped: it is {self.state}")
        return self.with_(state="dropped", reason=reason)


EpisodeState = Literal["running", "done", "failed"]


class EpisodeRecord(Record):
    """One run of a task by the policy."""

    group: int
    index: int
    attempt: int = 0
    """Counts the runs that infrastructure made fail."""
    state: EpisodeState = "running"
    reward: float = 0.0
    tokens: int = 0
    """Sampled tokens of the trainable agents."""
    truncated: bool = False
    trace: str = ""
    """SHA-256 of the trace (verifiers' episode as msgpack)."""
    error: str = ""

    @property
    def id(self) -> str:
        return episode_id(self.group, self.index)

    @property
    def key(self) -> bytes:
        return self.id.encode()

    def _running(self, verb: str) -> None:
        if self.state != "running":
            raise StateError(f"episode {self.id}: cannot {verb}: it is {self.state}")

    def accepted(self, reward: float, tokens: int, truncated: bool, trace: str) -> "EpisodeRecord":
        self._running("be accepted")
        return self.with_(state="done", reward=reward, tokens=tokens, truncated=truncated, trace=trace)

    def again(self, error: str) -> "EpisodeRecord":
        """Infrastructure failed: the next attempt starts with an empty journal."""
        self._running("run again")
        return self.with_(attempt=self.attempt + 1, error=error)

    def failed(self, error: str) -> "EpisodeRecord":
        self._running("fail")
        return self.with_(state="failed", error=error)


def episode_id(group: int, index: int) -> str:
    return f"g{group:08d}-e{index:03d}"


class TurnRecord(Record):
    """A successful answer in the turn journal."""

    job: str
    worker: str
    dispatch: int
    reply: str
    """SHA-256 of the reply message; empty in records of schema 1."""
    version: int
    adapter: str
    tokens: bytes
    logprobs: bytes
    finish_reason: Literal["stop", "length"]

    @staticmethod
    def prefix(episode: str, attempt: int) -> bytes:
        return f"{episode}/{attempt}/".encode()


class DispatchRecord(Record):
    """Who holds a job: a reply counts only from this worker with this dispatch number."""

    job: str
    worker: str
    dispatch: int
    journal: bytes
    """Key that the answer gets in the turn journal."""
    kind: Kind
    version: int
    adapter: str
    max_tokens: int
    group: int
    seed: int


class BatchRecord(Record):
    """A committed batch."""

    step: int
    digest: str
    groups: list[int]
    reward: float
    tokens: int
    lag: float


class PolicyRecord(Record):
    """An activated policy version; version N is checkpoint N."""

    version: int
    adapter: str
    files: list[tuple[str, int, str]]
    rank: int
    alpha: float
    target_modules: list[str]
    dtype: str
    activated_s: float


class WorkerRecord(Record):
    """The newest accepted registration of a worker: a restarted coordinator knows who holds its jobs."""

    name: str
    incarnation: str
    engine: str
    slots: int
    window: int
    versions: dict[str, str]
    """Package versions; empty in records of schema 2 and before."""
    seen_s: float
    """Unix time at which it registered, left or was lost, whatever came last; 0 in records of schema 2 and before."""


def number_key(number: int) -> bytes:
    return b"%012d" % number
