"""A model call that waits for its answer, and how it ends without one."""

import asyncio
from dataclasses import dataclass, field

from aether_common.errors import AetherError
from aether_common.wire import Kind, Sampling

from aether_coordinator.journal import TurnKey
from aether_coordinator.records import DispatchRecord, TurnRecord


class TurnFailed(AetherError):
    """A turn failed for reasons that only infrastructure can cause."""


class PromptTooLong(AetherError):
    """The prompt leaves no room for a completion: the policy or the task used the context up."""


@dataclass(slots=True)
class Turn:
    """A model call that waits for its answer."""

    key: TurnKey
    job: str
    seed: int
    kind: Kind
    version: int
    adapter: str
    group: int
    prompt: bytes
    sampling: Sampling
    session: str
    deadline: float
    """time.monotonic() after which it fails."""
    order: int = 0
    dispatch: int = 0
    worker: str | None = None
    failures: list[str] = field(default_factory=list)
    """Workers on which an attempt failed."""
    answer: asyncio.Future[TurnRecord] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _record: DispatchRecord | None = None

    @property
    def record(self) -> DispatchRecord:
        assert self.worker is not None
        record = self._record
        if record is None or (record.worker, record.dispatch) != (self.worker, self.dispatch):
            self._record = record = DispatchRecord(
                job=self.job,
                worker=self.worker,
                dispatch=self.dispatch,
                journal=self.key.journal,
                kind=self.kind,
                version=self.version,
                adapter=self.adapter,
                max_tokens=self.sampling.max_tokens,
                group=self.group,
                seed=self.seed,
            )
        return record
