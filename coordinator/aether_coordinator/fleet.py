"""The fleet: who is registered, what each worker reported last, and what each one should do.

Heartbeats are requests; their answer, and that of a held poll, is the desired state. Only missing
heartbeats declare a worker dead. The newest incarnation of a name wins.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from aether_common.bus import Bus
from aether_common.errors import MessageError
from aether_common.identity import ModelIdentity, differences
from aether_common.names import Names
from aether_common.wire import (
    PROTOCOL,
    PROTOCOL_MIN,
    DesiredState,
    Heartbeat,
    Message,
    PolicyRef,
    Poll,
    Registration,
    RegistrationAnswer,
)
from loguru import logger
from nats.aio.msg import Msg

from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import WorkerRecord
from aether_coordinator.status import WorkerStatus
from aether_coordinator.streams import Streams

HEARTBEAT_S = 5.0
DEAD_S = 30.0
POLL_S = 25.0
CLOCK_SKEW_S = 30.0
RATE_WINDOW_S = 30.0
MAX_WINDOW = 4096
"""Jobs that one worker may hold: one that claims more would draw all work to itself."""
MAX_REQUEST = 512 << 10
"""Bytes of a request; a heartbeat that names a full window of jobs is smaller."""


@dataclass(slots=True)
class Worker:
    """What the coordinator knows of one incarnation of a worker."""

    name: str
    incarnation: str
    engine: str
    slots: int
    window: int
    seen: float
    """time.monotonic() of the last message."""
    jobs: set[str] = field(default_factory=set)
    """Jobs assigned to it."""
    running: dict[str, int] = field(default_factory=dict)
    adapters: set[str] = field(default_factory=set)
    engine_ready: bool = True
    draining: bool = False
    lost: bool = False
    tokens: deque[tuple[float, int]] = field(default_factory=deque)
    """(monotonic time, completion tokens so far) of recent heartbeats."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to answer its held poll; replaced by every poll, so that a worker has only one."""

    @property
    def usable(self) -> bool:
        return self.engine_ready and not self.draining and not self.lost

    @property
    def room(self) -> int:
        return self.window - len(self.jobs) if self.usable else 0

    def rate(self) -> float:
        """Completion tokens per second over the last heartbeats."""
        if len(self.tokens) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self.tokens[0], self.tokens[-1]
        return max(0.0, (n1 - n0) / (t1 - t0)) if t1 > t0 else 0.0


class Fleet:
    """Answers registrations, heartbeats and polls. `on_lost` gets the jobs that a worker leaves behind."""

    def __init__(
        self,
        bus: Bus,
        names: Names,
        streams: Streams,
        *,
        identity: ModelIdentity,
        max_model_len: int,
        lease_s: float,
        wanted: Callable[[], list[PolicyRef]],
        on_lost: Callable[[Worker, list[str]], None],
        on_room: Callable[[], None],
        on_bad_message: Callable[[], None],
        ledger: Ledger,
    ) -> None:
        self._bus = bus
        self._names = names
        self._streams = streams
        self._identity = identity
        self._max_model_len = max_model_len
        self._lease_s = lease_s
        self._wanted = wanted
        self._on_lost = on_lost
        self._on_room = on_room
        self._on_bad_message = on_bad_message
        self._ledger = ledger
        self._revision = 1
        self.books_complete = False
        """Until the first reconciliation after a start, jobs unknown here may be ours nevertheless."""
        self.workers: dict[str, Worker] = {}
        self.refused: dict[str, tuple[float, str]] = {}
        """(unix time, reason) by name of workers whose last registration was refused."""
        self._tasks: asyncio.TaskGroup | None = None

    def load(self) -> None:
        """Count the workers of before a restart as alive: they beat within seconds, or are declared dead."""
        for _, value in self._ledger.scan("workers"):
            record = WorkerRecord.decode(value)
            self.workers[record.name] = Worker(**record.model_dump(), seen=time.monotonic(), engine_ready=False)

    async def run(self) -> None:
        """Serve until cancelled."""
        client = self._bus.client
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await client.subscribe(self._names.fleet("reg"), cb=self._serve(Registration, self._register))
            await client.subscribe(self._names.fleet("hb"), cb=self._serve(Heartbeat, self._heartbeat))
            await client.subscribe(self._names.fleet("poll"), cb=self._serve(Poll, self._poll))
            while True:
                await asyncio.sleep(1.0)
                self._declare_dead()

    def _serve[M: Registration | Heartbeat | Poll](
        self, kind: type[M], answer: Callable[[M], Awaitable[Message]]
    ) -> Callable[[Msg], Awaitable[None]]:
        """A callback that answers each request in a task of its own; bad messages are counted."""

        async def respond(message: Msg, request: M) -> None:
            try:
                result = await answer(request)
                if message.reply:
                    await message.respond(result.encode())
            except Exception as error:
                logger.warning("{} of {} not answered: {!r}", kind.__name__, request.worker, error)

        async def receive(message: Msg) -> None:
            try:
                if len(message.data) > MAX_REQUEST:
                    raise MessageError(f"{kind.__name__} of {len(message.data)} bytes, at most {MAX_REQUEST}")
                request = kind.decode(message.data)
                if request.worker != message.subject.rsplit(".", 1)[-1]:
                    raise MessageError(f"{kind.__name__} of {request.worker!r} on {message.subject}")
            except MessageError as error:
                logger.warning("bad message on {}: {}", message.subject, error)
                self._on_bad_message()
                return
            assert self._tasks is not None
            self._tasks.create_task(respond(message, request))

        return receive

    async def _register(self, request: Registration) -> RegistrationAnswer:
        if reason := self._objection(request):
            logger.warning("worker {} refused: {}", request.worker, reason)
            self.refused[request.worker] = (time.time(), reason)
            return RegistrationAnswer(accepted=False, reason=reason)
        self.refused.pop(request.worker, None)
        await self._streams.declare_lane(request.worker, request.window)
        record = WorkerRecord(
            name=request.worker,
            incarnation=request.incarnation,
            engine=request.engine,
            slots=request.slots,
            window=request.window,
        )
        await self._ledger.commit(Write("workers", record.name.encode(), record.encode()))
        known = self.workers.get(request.worker)
        if known and known.incarnation != request.incarnation and known.jobs:
            logger.info("worker {} came back, its earlier jobs are reassigned", request.worker)
            self._give_up(known)
        again = known is not None and known.incarnation == request.incarnation
        worker = Worker(**record.model_dump(), seen=time.monotonic())
        if known and again:
            worker.jobs = known.jobs
        self.workers[request.worker] = worker
        if known:
            known.news.set()
        logger.bind(worker=request.worker).info(
            "worker {} joined: {} engine, {} slots", request.worker, request.engine, request.slots
        )
        self._on_room()
        return RegistrationAnswer(
            accepted=True,
            protocol=min(PROTOCOL, request.protocol_max),
            heartbeat_s=HEARTBEAT_S,
            lease_s=self._lease_s,
            state=self._state(worker, {}),
        )

    def _objection(self, request: Registration) -> str:
        if request.protocol_max < PROTOCOL_MIN or request.protocol_min > PROTOCOL:
            return (
                f"it speaks protocol {request.protocol_min}..{request.protocol_max}, the coordinator "
                f"{PROTOCOL_MIN}..{PROTOCOL}: install the same release"
            )
        if lines := differences(self._identity, request.identity):
            return "it serves another model: " + "; ".join(lines)
        if request.max_model_len < self._max_model_len:
            return f"max_model_len is {request.max_model_len}, the run needs at least {self._max_model_len}"
        if max(request.window, request.slots) > MAX_WINDOW:
            return f"it asks for {request.slots} slots and a window of {request.window} jobs: at most {MAX_WINDOW}"
        return ""

    async def _heartbeat(self, request: Heartbeat) -> DesiredState:
        worker = self.workers.get(request.worker)
        if worker is None or worker.incarnation != request.incarnation:
            return self._stranger(worker)
        now = time.monotonic()
        if worker.lost:
            return DesiredState(revision=self._revision, unknown=True)
        worker.seen = now
        worker.running = dict(request.running)
        worker.adapters = set(request.adapters)
        worker.engine_ready = request.engine_ready
        worker.draining = request.draining
        worker.tokens.append((now, request.tokens_total))
        while worker.tokens and worker.tokens[0][0] < now - RATE_WINDOW_S:
            worker.tokens.popleft()
        if abs(request.clock - time.time()) > CLOCK_SKEW_S:
            logger.warning("the clock of worker {} is {:+.0f} s off", worker.name, request.clock - time.time())
        self._on_room()
        return self._state(worker, request.running)

    async def _poll(self, request: Poll) -> DesiredState:
        worker = self.workers.get(request.worker)
        if worker is None or worker.incarnation != request.incarnation:
            return self._stranger(worker)
        worker.news.set()
        worker.news = news = asyncio.Event()
        if request.revision == self._revision:
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), POLL_S)
        worker = self.workers.get(request.worker)
        if worker is None or worker.incarnation != request.incarnation:
            return self._stranger(worker)
        return self._state(worker, worker.running)

    def _state(self, worker: Worker, running: dict[str, int]) -> DesiredState:
        # A job that it holds and that is not assigned to it counts no more.
        stray = {job for job in running if job not in worker.jobs} if self.books_complete else set[str]()
        return DesiredState(revision=self._revision, policies=self._wanted(), cancel=sorted(stray), drain=False)

    def _stranger(self, known: Worker | None) -> DesiredState:
        """For an incarnation that is not, or no longer, that of the name."""
        superseded = known is not None and not known.lost
        return DesiredState(revision=self._revision, superseded=superseded, unknown=not superseded)

    def announce(self) -> None:
        """There is news for the workers: answer the held polls."""
        self._revision += 1
        for worker in self.workers.values():
            worker.news.set()

    def _declare_dead(self) -> None:
        limit = time.monotonic() - DEAD_S
        for worker in self.workers.values():
            if not worker.lost and worker.seen < limit:
                logger.bind(worker=worker.name).warning("no heartbeat for {:.0f} s: worker lost", DEAD_S)
                worker.lost = True
                self._give_up(worker)

    def _give_up(self, worker: Worker) -> None:
        jobs = sorted(worker.jobs)
        worker.jobs.clear()
        self._on_lost(worker, jobs)

    def status(self) -> list[WorkerStatus]:
        now = time.monotonic()
        rows = [
            WorkerStatus(
                name=worker.name,
                state="lost" if worker.lost else "draining" if worker.draining else "connected",
                engine=worker.engine,
                slots=worker.slots,
                running=len(worker.jobs),
                tokens_per_s=round(worker.rate(), 1),
                adapters=len(worker.adapters),
                last_seen_s=round(now - worker.seen, 1),
            )
            for worker in self.workers.values()
        ]
        rows += [
            WorkerStatus(name=name, state="incompatible", last_seen_s=round(time.time() - when, 1), reason=reason)
            for name, (when, reason) in self.refused.items()
        ]
        return sorted(rows, key=lambda row: row.name)
