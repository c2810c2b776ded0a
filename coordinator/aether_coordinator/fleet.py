"""The fleet: who is registered, what each worker reported last, and what each one should do.

Heartbeats are requests; their answer, and that of a held poll, is the desired state. Only missing
heartbeats declare a worker dead. The newest incarnation of a name wins. A worker that was revoked or
quarantined gets no job, and its jobs go to others. What a worker claims and how often is bounded.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aether_common.bus import Bus
from aether_common.errors import ConfigError, DiskError, MessageError
from aether_common.identity import ModelIdentity, differences
from aether_common.names import Names
from aether_common.wire import (
    MAX_WINDOW,
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

from aether_coordinator.events import Events
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import WorkerRecord
from aether_coordinator.stall import Progress
from aether_coordinator.standing import Standing, ban, read_standing
from aether_coordinator.status import WorkerState, WorkerStatus
from aether_coordinator.streams import Streams

HEARTBEAT_S = 5.0
DEAD_S = 30.0
POLL_S = 25.0
CLOCK_SKEW_S = 30.0
RATE_WINDOW_S = 30.0
MAX_REQUEST = 512 << 10
"""Bytes of a request; a heartbeat that names a full window of jobs is smaller."""
RATES: dict[str, tuple[float, float]] = {"Registration": (30, 1.0), "Heartbeat": (50, 20.0), "Poll": (50, 20.0)}
"""Requests of one worker: so many at once, then so many a second; what is above is dropped."""
MAX_REASON = 1000
QUARANTINE_AFTER = 8
"""Failures in a row after which a worker gets no more jobs."""


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
    """time.monotonic() of the last message."""
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


class Allowance:
    """How many requests are left of so many at once, refilled by so many a second."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at = burst, time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


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
        on_stalled: Callable[[Worker, list[str]], None],
        stall_s: float,
        mismatch: Callable[[str], tuple[float, float] | None],
        on_room: Callable[[], None],
        on_bad_message: Callable[[], None],
        ledger: Ledger,
        events: Events,
        run_root: Path,
    ) -> None:
        self._bus = bus
        self._names = names
        self._streams = streams
        self._identity = identity
        self._max_model_len = max_model_len
        self._lease_s = lease_s
        self._wanted = wanted
        self._on_lost = on_lost
        self._on_stalled = on_stalled
        self._stall_s = stall_s
        self._mismatch = mismatch
        self._on_room = on_room
        self._on_bad_message = on_bad_message
        self._ledger = ledger
        self.events = events
        self._run_root = run_root
        self._allowances: dict[tuple[str, str], Allowance] = {}
        self._records: dict[str, WorkerRecord] = {}
        """Everyone who ever registered."""
        self._standing = Standing()
        self._unsaved: dict[str, str] = {}
        """Quarantines (reason by name) that are not in a file yet."""
        self._looking = asyncio.Lock()
        self._revision = 1
        self.books_complete = False
        """Until the first reconciliation after a start, jobs unknown here may be ours nevertheless."""
        self.workers: dict[str, Worker] = {}
        self.refused: dict[str, tuple[float, str]] = {}
        """(unix time, reason) by name of workers whose last registration was refused."""
        self._tasks: asyncio.TaskGroup | None = None

    def load(self) -> None:
        """Count the workers of before a restart as alive: they beat within seconds, or are declared dead.

        Those that were revoked are gone. Raises `ConfigError` when the files of who was cannot be read.
        """
        self._standing = read_standing(self._run_root)
        for _, value in self._ledger.scan("workers"):
            record = WorkerRecord.decode(value)
            self._records[record.name] = record
            if record.name not in self._standing.revoked:
                self.workers[record.name] = worker = self._worker(record)
                worker.engine_ready = False

    def _worker(self, record: WorkerRecord) -> Worker:
        return Worker(
            name=record.name,
            incarnation=record.incarnation,
            engine=record.engine,
            slots=record.slots,
            window=record.window,
            versions=record.versions,
            seen=(now := time.monotonic()),
            progress=Progress(now),
            registered=now,
            quarantine=self._quarantined.get(record.name, ""),
        )

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
                self._take_stalled()
                self.events.tick()

    def _serve[M: Registration | Heartbeat | Poll](
        self, kind: type[M], answer: Callable[[M], Awaitable[Message]]
    ) -> Callable[[Msg], Awaitable[None]]:
        """A callback that answers each request in a task of its own; bad messages are counted."""
        what = kind.__name__

        async def respond(message: Msg, request: M) -> None:
            try:
                result = await answer(request)
                if message.reply:
                    await message.respond(result.encode())
            except Exception as error:
                logger.warning("{} of {} not answered: {!r}", what, request.worker, error)

        async def receive(message: Msg) -> None:
            name = message.subject.rsplit(".", 1)[-1]
            try:
                if len(message.data) > MAX_REQUEST:
                    raise MessageError(f"{what} of {len(message.data)} bytes, at most {MAX_REQUEST}")
                request = kind.decode(message.data)
                if request.worker != name:
                    raise MessageError(f"{what} of {request.worker!r} on {message.subject}")
            except MessageError as error:
                self.events.record("bad_message", str(error), name, warn=True)
                self._on_bad_message()
                return
            if (what, name) not in self._allowances:
                self._allowances[what, name] = Allowance(*RATES[what])
            if not self._allowances[what, name].take():
                self.events.record(
                    "refused", f"{what} dropped: more than {RATES[what][1]:.0f} a second", name, warn=True
                )
                return
            assert self._tasks is not None
            self._tasks.create_task(respond(message, request))

        return receive

    async def _register(self, request: Registration) -> RegistrationAnswer:
        name = request.worker
        reason = self._objection(request)
        if request.check_only:
            protocol = min(PROTOCOL, request.protocol_max)
            return RegistrationAnswer(accepted=not reason, reason=reason, protocol=protocol, clock=time.time())
        if reason:
            return self._refuse(name, reason)
        await self._streams.declare_lane(name, request.window)
        record = WorkerRecord(
            name=name,
            incarnation=request.incarnation,
            engine=request.engine,
            slots=request.slots,
            window=request.window,
            versions=request.versions,
            seen_s=time.time(),
        )
        await self._ledger.commit(Write("workers", name.encode(), record.encode()))
        if reason := self._revoked(name):  # Meanwhile.
            return self._refuse(name, reason)
        self._records[name] = record
        self.refused.pop(name, None)
        known, worker = self.workers.get(name), self._worker(record)
        again = known is not None and known.incarnation == request.incarnation
        if known is not None:
            worker.failures, worker.excused = known.failures, known.excused
            if again:
                worker.jobs, worker.progress, worker.first_reply = known.jobs, known.progress, known.first_reply
        if known is None or known.lost or known.left:
            about = f"{request.engine} engine, {request.slots} slots, {_shown(request.versions)}"
            self.events.record("came_back" if known else "joined", about, name)
        elif not again:
            about = f"a newer incarnation registered, {len(known.jobs)} jobs go to others"
            self.events.record("superseded", about, name)
        self.workers[name] = worker
        if known is not None and not again:
            self._give_up(known)
            known.news.set()
        self._on_room()
        return RegistrationAnswer(
            accepted=True,
            protocol=min(PROTOCOL, request.protocol_max),
            heartbeat_s=HEARTBEAT_S,
            lease_s=self._lease_s,
            state=self._state(worker, {}),
        )

    def _refuse(self, name: str, reason: str) -> RegistrationAnswer:
        reason = reason[:MAX_REASON]
        self.refused[name] = (time.time(), reason)
        self.events.record("refused", reason, name, warn=True)
        return RegistrationAnswer(accepted=False, reason=reason)

    def _revoked(self, name: str) -> str:
        if name not in self._standing.revoked:
            return ""
        why = self._standing.revoked[name]
        return f"its key was revoked ({why}): `aether-coordinator worker add {name}` makes another"

    def _objection(self, request: Registration) -> str:
        if reason := self._revoked(request.worker):
            return reason
        if request.protocol_max < PROTOCOL_MIN or request.protocol_min > PROTOCOL:
            return (
                f"it speaks protocol {request.protocol_min}..{request.protocol_max}, the coordinator "
                f"{PROTOCOL_MIN}..{PROTOCOL}: install the same release"
            )
        if lines := differences(self._identity, request.identity):
            return "it serves another model: " + "; ".join(lines)
        if request.max_model_len < self._max_model_len:
            return f"max_model_len is {request.max_model_len}, the run needs at least {self._max_model_len}"
        if not request.slots <= request.window <= MAX_WINDOW:
            return (
                f"it asks for {request.slots} slots and a window of {request.window} jobs: the window must be at least "
                f"the slots and at most {MAX_WINDOW}"
            )
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
        worker.progress.beat(now, request.running, request.tokens_total, idle=not worker.jobs)
        worker.adapters = set(request.adapters)
        worker.engine_ready = request.engine_ready
        worker.draining = request.draining
        left = request.draining and not request.running
        if left and not worker.left:
            self.events.record("left", "drained", worker.name)
            await self._ledger.enqueue(*self.seen([worker]))
        worker.left = left
        worker.tokens.append((now, request.tokens_total))
        while worker.tokens and worker.tokens[0][0] < now - RATE_WINDOW_S:
            worker.tokens.popleft()
        if not worker.skewed and abs(request.clock - time.time()) > CLOCK_SKEW_S:
            worker.skewed = True
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
                if not worker.left:
                    about = f"no heartbeat for {DEAD_S:.0f} s, {len(worker.jobs)} jobs go to others"
                    self.events.record("lost", about, worker.name, warn=True)
                    assert self._tasks is not None
                    self._tasks.create_task(self._save_seen(worker))
                worker.lost = True
                self._give_up(worker)

    def _take_stalled(self) -> None:
        """As of its last heartbeat: what this process slept through is no stall of a worker."""
        for worker in self.workers.values():
            if worker.trusted and (jobs := worker.progress.stalled(worker.seen, worker.jobs, self._stall_s)):
                about = f"no progress for {self._stall_s:.0f} s, {len(jobs)} jobs go to others"
                self.events.record("stalled", about, worker.name, warn=True)
                self._on_stalled(worker, sorted(jobs))

    def _give_up(self, worker: Worker) -> None:
        jobs = sorted(worker.jobs)
        worker.jobs.clear()
        self._on_lost(worker, jobs)

    async def _save_seen(self, worker: Worker) -> None:
        await self._ledger.enqueue(*self.seen([worker]))

    def seen(self, workers: Iterable[Worker]) -> list[Write]:
        """The records of workers with the time at which each was last seen."""
        writes: list[Write] = []
        offset = time.time() - time.monotonic()
        for worker in workers:
            record = self._records[worker.name].with_(seen_s=worker.seen + offset)
            self._records[worker.name] = record
            writes.append(Write("workers", worker.name.encode(), record.encode()))
        return writes

    # ---- who may work ------------------------------------------------------------------------------

    def succeeded(self, name: str) -> None:
        """A job of this worker was answered well."""
        if (worker := self.workers.get(name)) is not None:
            worker.failures = 0
            worker.excused.clear()
            if worker.first_reply is None:
                worker.first_reply = time.monotonic() - worker.registered

    def failed(self, name: str, job: str, reason: str) -> None:
        """A job failed on this worker for a reason that counts; after so many in a row it is quarantined.

        To be called before the job is reassigned, which may hand it another. Jobs that it held at that time and that
        fail as well are the same failure: an engine that dies once takes all of them with it.
        """
        worker = self.workers.get(name)
        if worker is None or worker.quarantine:
            return
        worker.jobs.discard(job)
        if job in worker.excused:
            worker.excused.discard(job)
            return
        worker.failures += 1
        worker.excused = set(worker.jobs)
        if worker.failures >= QUARANTINE_AFTER:
            self.quarantine(name, f"{worker.failures} failures in a row, the last: {reason}")

    def refuse_reply(self, name: str, job: str, reason: str) -> None:
        """For the log: a reply of this worker that does not count."""
        self.events.record("reply_refused", reason, name, warn=True, job=job)

    def quarantine(self, name: str, reason: str) -> None:
        """Give a worker no jobs until the operator releases it; those that it has go to others."""
        if name in self._quarantined:
            return
        self._unsaved[name] = reason = reason[:MAX_REASON]
        self.events.record("quarantined", reason, name, warn=True)
        if (worker := self.workers.get(name)) is not None:
            worker.quarantine = reason
            self._give_up(worker)
        if self._tasks is not None:
            self._tasks.create_task(self.look())

    @property
    def _quarantined(self) -> dict[str, str]:
        return {**self._standing.quarantined, **self._unsaved}

    async def look(self) -> None:
        """Act on what the files say: who is revoked, added again, quarantined or released."""
        async with self._looking:
            try:
                for name, reason in list(self._unsaved.items()):
                    await asyncio.to_thread(ban, self._run_root, name, "quarantined", reason)
                    self._standing.quarantined[name] = reason
                    self._unsaved.pop(name)
                found = await asyncio.to_thread(read_standing, self._run_root)
            except (ConfigError, DiskError) as error:
                logger.error("{}", error)
                return
            revoked = found.revoked.keys() - self._standing.revoked.keys()
            self._standing = found
        for name in revoked:
            self._revoke(name)
        for worker in self.workers.values():
            before, worker.quarantine = worker.quarantine, self._quarantined.get(worker.name, "")
            if worker.quarantine and not before:
                self._give_up(worker)
            elif before and not worker.quarantine:
                worker.failures = 0
                worker.excused.clear()
        self._on_room()

    def _revoke(self, name: str) -> None:
        self.refused.pop(name, None)
        if (worker := self.workers.pop(name, None)) is not None:
            logger.bind(worker=name).info("worker {} was revoked, its {} jobs go to others", name, len(worker.jobs))
            # Its held poll stays: nats-server cuts it off, and says why better than we can.
            self._give_up(worker)

    def status(self) -> list[WorkerStatus]:
        now = time.monotonic()
        mismatch = {name: self._mismatch(name) or (None, None) for name in self.workers}
        rows = {
            worker.name: WorkerStatus(
                name=worker.name,
                state=worker.state,
                engine=worker.engine,
                slots=worker.slots,
                running=len(worker.jobs),
                tokens_per_s=round(worker.rate(), 1),
                adapters=len(worker.adapters),
                last_seen_s=round(now - worker.seen, 1),
                reason=worker.quarantine,
                failures=worker.failures,
                first_reply_s=None if worker.first_reply is None else round(worker.first_reply, 3),
                mismatch=mismatch[worker.name][0],
                mismatch_tail=mismatch[worker.name][1],
                versions=worker.versions,
            )
            for worker in self.workers.values()
        }
        for name, (when, reason) in self.refused.items():
            if name not in rows or rows[name].state in ("lost", "left"):
                seen = round(time.time() - when, 1)
                rows[name] = WorkerStatus(name=name, state="incompatible", last_seen_s=seen, reason=reason)
        for name, reason in self._standing.revoked.items():
            if (record := self._records.get(name)) is not None:
                seen = round(time.time() - record.seen_s, 1)
                rows[name] = WorkerStatus(name=name, state="revoked", last_seen_s=seen, reason=reason)
        return [rows[name] for name in sorted(rows)]


def _shown(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in sorted(versions.items())) or "no versions given"
