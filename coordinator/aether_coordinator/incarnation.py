"""A worker as the coordinator knows it: what it registered with, reported last, and holds.

A job is in `jobs` of at most one worker, the holder in its dispatch record.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from aether_coordinator.stall import Progress
from aether_coordinator.status import WorkerState


@dataclass(slots=True)
class Worker:
    """What the coordinator knows of one incarnation of a worker."""

    name: str
    incarnation: str
    engine: str
    slots: int
    window: int
    versions: dict[str, str]
    seen: float
    """time.monotonic() of the last heartbeat, or of the registration."""
    progress: Progress
    registered: float
    """time.monotonic() of the registration, or of the coordinator's start."""
    first_reply: float | None = None
    """Seconds from there to its first good answer."""
    quarantine: str = ""
    """Why it gets no jobs, empty if it does."""
    failures: int = 0
    """Since its last good answer."""
    excused: set[str] = field(default_factory=set)
    """Jobs that were in its hands when one failed: their failures have the same cause and count no more."""
    jobs: set[str] = field(default_factory=set)
    """Jobs assigned to it."""
    running: dict[str, int] = field(default_factory=dict)
    adapters: set[str] = field(default_factory=set)
    adapter_load_s: float | None = None
    engine_ready: bool = True
    draining: bool = False
    lost: bool = False
    left: bool = False
    """It said goodbye: it drains and holds nothing."""
    skewed: bool = False
    """Its clock was complained about."""
    tokens: deque[tuple[float, int]] = field(default_factory=deque)
    """(monotonic time, completion tokens so far) of recent heartbeats."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to answer its held poll; replaced by every poll, so that a worker has only one."""

    @property
    def trusted(self) -> bool:
        """Whether what it holds may stay with it."""
        return not self.lost and not self.quarantine

    @property
    def usable(self) -> bool:
        return self.engine_ready and not self.draining and self.trusted

    @property
    def state(self) -> WorkerState:
        if self.quarantine:
            return "quarantined"
        if self.left:
            return "left"
        return "lost" if self.lost else "draining" if self.draining else "connected"

    @property
    def room(self) -> int:
        return self.window - len(self.jobs) if self.usable else 0

    def rate(self) -> float:
        """Completion tokens per second over the last heartbeats."""
        if len(self.tokens) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self.tokens[0], self.tokens[-1]
        return max(0.0, (n1 - n0) / (t1 - t0)) if t1 > t0 else 0.0
