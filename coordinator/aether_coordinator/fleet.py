"""The fleet: who is registered, what each worker reported last, and what each one should do.

Heartbeats are requests; their answer, and that of a held poll, is the desired state. Only missing
heartbeats declare a worker dead. The newest incarnation of a name wins. A worker that was revoked or
quarantined gets no job, and its jobs go to others.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from aether_common.bus import Bus
from aether_common.identity import ModelIdentity, differences
from aether_common.names import Names
from aether_common.wire import (
    CLOCK_SKEW_S,
    MAX_WINDOW,
    PROTOCOL,
    PROTOCOL_MIN,
    DesiredState,
    Heartbeat,
    PolicyRef,
    Poll,
    Registration,
    RegistrationAnswer,
)
from loguru import logger

from aether_coordinator.events import Events, printable
from aether_coordinator.incarnation import Worker
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import WorkerRecord
from aether_coordinator.requests import Requests
from aether_coordinator.stall import Progress
from aether_coordinator.standing import MAX_REASON, Admission
from aether_coordinator.status import WorkerStatus
from aether_coordinator.streams import Streams

HEARTBEAT_S = 5.0
DEAD_S = 30.0
POLL_S = 25.0
RATE_WINDOW_S = 30.0
LATE_S = 3.0
"""Later than this, our own look at the clock says that we slept, not the workers."""
QUARANTINE_AFTER = 8
"""Failures in a row after which a worker gets no more jobs."""


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
        self.on_released: Callable[[str], None] = lambda _: None
        """What was held against this worker counts no more."""
        self._on_room = on_room
        self._ledger = ledger
        self.events = events
        self._requests = Requests(events, on_bad_message)
        self._admission = Admission(run_root)
        self._records: dict[str, WorkerRecord] = {}
        """Everyone who ever registered."""
        self._registering: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By name: registrations count in the order in which they came."""
        self._heard_from = 0.0
        """time.monotonic() since which we can hear heartbeats: before, their absence says nothing."""
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
        self._admission.load()
        for _, value in self._ledger.scan("workers"):
            record = WorkerRecord.decode(value)
            self._records[record.name] = record
            if record.name not in self._admission.revoked:
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
            quarantine=self._admission.quarantined(record.name),
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        client = self._bus.client
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                served = self._requests.answered
                await client.subscribe(self._names.fleet("reg"), cb=served(tasks, Registration, self._register))
                await client.subscribe(self._names.fleet("hb"), cb=served(tasks, Heartbeat, self._heartbeat))
                await client.subscribe(self._names.fleet("poll"), cb=served(tasks, Poll, self._poll))
                while True:
                    before = time.monotonic()
                    await asyncio.sleep(1.0)
                    if not self._bus.connected.is_set() or time.monotonic() - before > LATE_S:
                        self._heard_from = time.monotonic()
                    self._declare_dead()
                    self._take_stalled()
                    self.events.tick()
            finally:
                self._tasks = None

    async def declare_lanes(self) -> None:
        """Make the lane of every known worker, those included that register meanwhile."""
        for worker in list(self.workers.values()):
            await self._streams.declare_lane(worker.name, worker.window)

    async def _register(self, request: Registration) -> RegistrationAnswer:
        if not request.check_only:
            async with self._registering[request.worker]:
                return await self._join(request)
        reason = printable(self._objection(request), MAX_REASON)
        protocol = min(PROTOCOL, request.protocol_max)
        return RegistrationAnswer(accepted=not reason, reason=reason, protocol=protocol, clock=time.time())

    async def _join(self, request: Registration) -> RegistrationAnswer:
        name = request.worker
        if reason := self._objection(request):
            return self._refuse(name, reason)
        await self._streams.declare_lane(name, request.window)
        record = WorkerRecord(
            name=name,
            incarnation=request.incarnation,
            engine=printable(request.engine),
            slots=request.slots,
            window=request.window,
            versions={printable(package): printable(version) for package, version in request.versions.items()},
            seen_s=time.time(),
        )
        await self._ledger.commit(Write("workers", name.encode(), record.encode()))
        if reason := self._admission.revocation(name):  # Meanwhile.
            return self._refuse(name, reason)
        self._records[name] = record
        self.refused.pop(name, None)
        known, worker = self.workers.get(name), self._worker(record)
        again = known is not None and known.incarnation == request.incarnation
        if known is not None:
            worker.failures, worker.excused = known.failures, known.excused
            if again:
                worker.jobs, worker.first_reply = known.jobs, known.first_reply
                if not known.lost:  # Else it had no jobs to make progress with.
                    worker.progress = known.progress
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
        reason = printable(reason, MAX_REASON)
        self.refused[name] = (time.time(), reason)
        self.events.record("refused", reason, name, warn=True)
        return RegistrationAnswer(accepted=False, reason=reason)

    def _objection(self, request: Registration) -> str:
        if reason := self._admission.revocation(request.worker):
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
        worker.adapter_load_s = request.adapter_load_s
        worker.draining = request.draining
        had_left, worker.left = worker.left, request.draining and not request.running
        worker.tokens.append((now, request.tokens_total))
        while worker.tokens and worker.tokens[0][0] < now - RATE_WINDOW_S:
            worker.tokens.popleft()
        if not worker.skewed and abs(request.clock - time.time()) > CLOCK_SKEW_S:
            worker.skewed = True
            logger.warning("the clock of worker {} is {:+.0f} s off", worker.name, request.clock - time.time())
        self._on_room()
        if worker.left and not had_left:
            self.events.record("left", "drained", worker.name)
            await self._ledger.enqueue(*self.seen([worker]))
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
            if worker.lost or max(worker.seen, self._heard_from) >= limit:
                continue
            if worker.left:
                # No death: what it did not hand back has not failed there.
                self._give_up(worker)
                worker.lost = True
                continue
            about = f"no heartbeat for {DEAD_S:.0f} s, {len(worker.jobs)} jobs go to others"
            self.events.record("lost", about, worker.name, warn=True)
            worker.lost = True
            self._save_seen(worker)
            self._give_up(worker)

    def _take_stalled(self) -> None:
        """As of its last heartbeat: what this process slept through is no stall of a worker."""
        for worker in self.workers.values():
            if worker.trusted and (jobs := worker.progress.stalled(worker.seen, worker.jobs, self._stall_s)):
                about = f"no progress for {self._stall_s:.0f} s, {len(jobs)} jobs go to others"
                self.events.record("stalled", about, worker.name, warn=True)
                worker.progress.taken(worker.seen, jobs)
                self._on_stalled(worker, sorted(jobs))

    def _give_up(self, worker: Worker) -> None:
        jobs = sorted(worker.jobs)
        worker.jobs.clear()
        self._on_lost(worker, jobs)

    def _save_seen(self, worker: Worker) -> None:
        writes = self.seen([worker])
        if self._tasks is not None:
            self._tasks.create_task(self._ledger.enqueue(*writes))

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
        reason = printable(reason, MAX_REASON)
        if not self._admission.quarantine(name, reason):
            return
        self.events.record("quarantined", reason, name, warn=True)
        if (worker := self.workers.get(name)) is not None:
            worker.quarantine = reason
            self._give_up(worker)
        if self._tasks is not None:
            self._tasks.create_task(self.look())

    async def look(self) -> None:
        """Act on what the files say: who is revoked, added again, quarantined or released."""
        for name in await self._admission.look():
            self._revoke(name)
        for worker in self.workers.values():
            before, worker.quarantine = worker.quarantine, self._admission.quarantined(worker.name)
            if worker.quarantine and not before:
                self._give_up(worker)
            elif before and not worker.quarantine:
                worker.failures = 0
                worker.excused.clear()
                self.on_released(worker.name)
        self._on_room()

    def _revoke(self, name: str) -> None:
        self.refused.pop(name, None)
        if (worker := self.workers.pop(name, None)) is not None:
            logger.bind(worker=name).info("worker {} was revoked, its {} jobs go to others", name, len(worker.jobs))
            self._save_seen(worker)
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
                adapter_load_s=worker.adapter_load_s,
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
        for name, reason in self._admission.revoked.items():
            if (record := self._records.get(name)) is not None:
                seen = round(time.time() - record.seen_s, 1)
                rows[name] = WorkerStatus(name=name, state="revoked", last_seen_s=seen, reason=reason)
        return [rows[name] for name in sorted(rows)]


def _shown(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in sorted(versions.items())) or "no versions given"
