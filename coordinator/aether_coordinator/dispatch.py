"""Dispatch: turns wait here until a suitable worker has room, then become jobs on its lane.

Evaluations go first (they are finite and pinned), then the oldest turn. A turn waits for the worker that
holds its session's prefix while no slot elsewhere is free; else that of its group is preferred, then one
that has the adapter loaded, then the least loaded. `reassign` is the one way in which a job leaves a
worker without an answer.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

import nats.errors
from aether_common.bus import Bus
from aether_common.confirm import Confirmed
from aether_common.crash import crash_point
from aether_common.errors import AetherError, MessageError
from aether_common.names import Names, parse_job
from aether_common.wire import Job, Reason, Reply
from loguru import logger
from nats.js.errors import APIError, NotFoundError

from aether_coordinator.fleet import Fleet
from aether_coordinator.incarnation import Worker
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.ready import NOWHERE, Ready
from aether_coordinator.records import DispatchRecord, GroupRecord, TurnRecord
from aether_coordinator.status import Counters
from aether_coordinator.streams import Streams
from aether_coordinator.turn import PromptTooLong, Turn, TurnFailed

MAX_FAILURES = 3
PUBLISH_S = 10.0
PUBLISH_RETRY_S = 1.0
WRONG_LAST_SEQUENCE = 10071
COUNTED = (Reason.ENGINE, Reason.UNREADABLE, Reason.ADAPTER)
"""Reasons of a worker that count against a job; drain, cancellation and supersession do not."""


class Expected(NamedTuple):
    """What a running attempt of an episode is sampled from."""

    group: GroupRecord
    adapter: str


class Intake(Protocol):
    """Where the replies come in."""

    async def drained(self, sequence: int, timeout_s: float) -> bool:
        """Wait until every reply up to `sequence` of the stream was taken."""
        ...


class Dispatcher:
    """Owns the turns that have no answer yet."""

    def __init__(self, bus: Bus, names: Names, ledger: Ledger, streams: Streams, counters: Counters) -> None:
        self._bus = bus
        self._confirmed = Confirmed(bus, PUBLISH_S)
        self._names = names
        self._ledger = ledger
        self._streams = streams
        self._counters = counters
        self._ready = Ready(self._waits)
        self._order = itertools.count()
        self._prefix: dict[str, str] = {}
        self._chosen: asyncio.Queue[tuple[Turn, str, int]] = asyncio.Queue()
        """To be published: turn, worker and dispatch number."""
        self.turns: dict[str, Turn] = {}
        """By job id: waiting and running."""
        self.orphans: dict[str, DispatchRecord] = {}
        """Dispatched before a restart and not asked for again yet."""
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Purges of aborted jobs that are under way."""
        self._aborted: set[str] = set()
        """Orphans whose caller went away: their jobs are off the lane."""
        self.closing = False
        self.expected: Callable[[bytes], Expected | None] = lambda _: None
        """What an answer under this journal key must be sampled from; None when its attempt is over."""
        self.fleet: Fleet
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._publish_chosen())
            self.pump()
            try:
                while True:
                    await asyncio.sleep(1.0)
                    self._expire()
                    self._drop_orphans()
                    self.pump()
            finally:
                self._tasks = None

    @property
    def waiting(self) -> int:
        return sum(turn.worker is None for turn in self.turns.values())

    @property
    def running(self) -> int:
        return sum(turn.worker is not None for turn in self.turns.values())

    async def generate(self, turn: Turn) -> TurnRecord:
        """The answer of a turn. Raises `TurnFailed` or `PromptTooLong`."""
        if (known := self.turns.get(turn.job)) is not None:
            return await asyncio.shield(known.answer)
        turn.order = next(self._order)
        self.turns[turn.job] = turn
        orphan, aborted = self.orphans.get(turn.job), turn.job in self._aborted
        self.drop_orphan(turn.job)
        holder = self.fleet.workers.get(orphan.worker) if orphan else None
        if orphan and holder and holder.trusted:
            # Its job is still pending, or its reply on the way: attach.
            turn.worker, turn.dispatch = orphan.worker, orphan.dispatch
            holder.jobs.add(turn.job)
            if aborted:
                # Taken off the lane when its caller went away: a worker that holds it attaches the new copy.
                self._chosen.put_nowait((turn, turn.worker, turn.dispatch))
        else:
            turn.dispatch = orphan.dispatch + 1 if orphan else 0
            self._wait(turn)
            self.pump()
        # Cancelling the call cancels the answer, as `abort` does.
        return await turn.answer

    def _wait(self, turn: Turn) -> None:
        turn.worker = None
        home = self._prefix.get(turn.session, NOWHERE)
        home = NOWHERE if home in turn.failures else home
        self._ready.add(turn.job, turn.order, urgent=turn.kind == "eval", home=home)

    def _waits(self, job: str) -> bool:
        turn = self.turns.get(job)
        return turn is not None and turn.worker is None

    def pump(self) -> None:
        """Hand out ready turns while a worker has room."""
        if self._tasks is None or not self._ready:
            return
        usable = {worker.name for worker in self.fleet.workers.values() if worker.usable}
        while self._ready:
            room = [worker for worker in self.fleet.workers.values() if worker.room > 0]
            free = [worker for worker in room if len(worker.jobs) < worker.slots]
            if not room:
                return
            # Jobs beyond the slots are handed out only when every slot is taken.
            able = free or room
            job = self._ready.next({worker.name for worker in able}, usable, take_away=bool(free))
            if job is None:
                return
            turn = self.turns[job]
            worker = self._choose(turn, able)
            turn.worker = worker.name
            worker.jobs.add(job)
            self._prefix[turn.session] = worker.name
            self._prefix[f"group {turn.group}"] = worker.name
            self._chosen.put_nowait((turn, worker.name, turn.dispatch))

    def _choose(self, turn: Turn, able: list[Worker]) -> Worker:
        # A worker on which it failed gets it again only if there is no other.
        if turn.failures:
            able = [worker for worker in able if worker.name not in turn.failures] or able
        if len(able) == 1:
            return able[0]
        for prefix in (turn.session, f"group {turn.group}"):
            holder = self._prefix.get(prefix)
            for worker in able:
                if worker.name == holder:
                    return worker
        return min(
            able,
            key=lambda worker: (turn.adapter not in worker.adapters, len(worker.jobs) / worker.slots, worker.name),
        )

    async def _publish_chosen(self) -> None:
        """Record who gets each job, then put it on the lane, in order; what cannot go at once gets a task."""
        while True:
            turn, worker, dispatch = await self._chosen.get()
            if turn.job in self._leaving or not self._bus.connected.is_set():
                self._retry(turn, worker, dispatch)
            elif self._is_current(turn, worker, dispatch):
                await self._record(turn)
                if self._is_current(turn, worker, dispatch):
                    sent = await self._send(turn, worker)
                    sent.add_done_callback(partial(self._sent, turn, worker, dispatch))

    def _sent(self, turn: Turn, worker: str, dispatch: int, sent: asyncio.Future[None]) -> None:
        if sent.cancelled() or sent.exception() is None:
            crash_point("job.after_publish")
        else:
            self._retry(turn, worker, dispatch, sent)

    def _retry(self, turn: Turn, worker: str, dispatch: int, sent: asyncio.Future[None] | None = None) -> None:
        if self._tasks is not None:
            self._tasks.create_task(self._publish(turn, worker, dispatch, sent))

    async def _record(self, turn: Turn) -> None:
        crash_point("job.before_record")
        await self._ledger.enqueue(Write("dispatches", turn.job.encode(), turn.record.encode()))
        crash_point("job.before_publish")

    async def _send(self, turn: Turn, worker: str) -> asyncio.Future[None]:
        return await self._confirmed.send(
            self._names.job(worker, turn.kind, turn.version, turn.job),
            self._job(turn).encode(),
            {
                "Nats-Expected-Last-Subject-Sequence": "0",
                "Nats-Expected-Last-Subject-Sequence-Subject": self._names.job_anywhere(turn.job),
            },
        )

    async def _publish(self, turn: Turn, worker: str, dispatch: int, sent: asyncio.Future[None] | None) -> None:
        """Until the job is on the lane: a refused publish is held and tried again. `sent` is a first try."""
        if (leaving := self._leaving.get(turn.job)) is not None:
            await asyncio.wait([leaving])
        if sent is None and self._is_current(turn, worker, dispatch):
            await self._record(turn)
        confirmed_before = True
        while self._is_current(turn, worker, dispatch):
            await self._bus.connected.wait()
            try:
                await (sent or await self._send(turn, worker))
                crash_point("job.after_publish")
                return
            except APIError as error:
                sent = None
                if error.err_code == WRONG_LAST_SEQUENCE:
                    if not confirmed_before:
                        return  # The try before arrived, its confirmation did not.
                    # A copy of an earlier dispatch is still on a lane.
                    await self._purge(turn.job)
                    continue
                logger.bind(job=turn.job).warning("job not taken by the stream, trying again: {}", error)
            except nats.errors.Error as error:
                sent = None
                logger.bind(job=turn.job).debug("job not published, trying again: {!r}", error)
                confirmed_before = False
            await asyncio.sleep(PUBLISH_RETRY_S)

    def _is_current(self, turn: Turn, worker: str, dispatch: int) -> bool:
        return self.turns.get(turn.job) is turn and (turn.worker, turn.dispatch) == (worker, dispatch)

    def _job(self, turn: Turn) -> Job:
        return Job(
            job=turn.job,
            dispatch=turn.dispatch,
            key=turn.key.journal.decode(),
            kind=turn.kind,
            version=turn.version,
            adapter=turn.adapter,
            prompt=turn.prompt,
            sampling=turn.sampling,
            seed=turn.seed,
            session=turn.session,
            remaining_ms=max(0, int((turn.deadline - time.monotonic()) * 1000)),
        )

    def answered(self, record: TurnRecord) -> None:
        """A valid reply is on its way into the ledger: answer the turn, free the worker."""
        turn = self.turns.pop(record.job, None)
        self._free(record.worker, record.job)
        self.fleet.succeeded(record.worker)
        if turn is not None and not turn.answer.done():
            turn.answer.set_result(record)
        self.pump()

    def returned(self, reply: Reply) -> None:
        """A worker handed a job back, or an attempt on it failed."""
        self._counters.jobs_returned += 1
        turn = self.turns.get(reply.job)
        if turn is None:
            self._free(reply.worker, reply.job)
            return
        if reply.reason is Reason.PROMPT_TOO_LONG:
            self._fail(turn, PromptTooLong(reply.message or "the prompt is longer than the context"))
            return
        counted = reply.reason in COUNTED
        logger.bind(job=reply.job, worker=reply.worker).info(
            "job handed back by {}: {} {}", reply.worker, reply.reason, reply.message
        )
        if counted:
            self.fleet.failed(reply.worker, reply.job, f"{reply.reason} {reply.message}".strip())
        self.reassign(turn, counted=counted, reason=str(reply.reason))

    def lost(self, worker: Worker, jobs: list[str]) -> None:
        """A worker is dead, superseded, revoked or quarantined: its jobs go to others; only death counts."""
        for job in jobs:
            if (turn := self.turns.get(job)) is not None and turn.worker == worker.name:
                self.reassign(turn, counted=worker.lost, reason=f"worker {worker.name} lost")

    def stalled(self, worker: Worker, jobs: list[str]) -> None:
        """These jobs make no progress on a worker: they go to others, and it counts as a failure of each."""
        for job in jobs:
            if (turn := self.turns.get(job)) is not None and turn.worker == worker.name:
                self.fleet.failed(worker.name, job, "no progress")
                self.reassign(turn, counted=True, reason=f"no progress on {worker.name}")

    def reassign(self, turn: Turn, *, counted: bool, reason: str) -> None:
        """Take a job from its worker and let it run elsewhere; `counted` failures add up."""
        worker = turn.worker
        if worker is None or self._tasks is None:
            return
        self._free(worker, turn.job)
        self._counters.jobs_reassigned += 1
        if counted:
            turn.failures.append(worker)
            usable = {name for name, known in self.fleet.workers.items() if known.usable}
            if (len(turn.failures) >= MAX_FAILURES and usable <= set(turn.failures[-MAX_FAILURES:])) or (
                len(set(turn.failures)) >= MAX_FAILURES
            ):
                self._fail(turn, TurnFailed(f"{len(turn.failures)} attempts failed, the last: {reason}"))
                return
        turn.dispatch += 1
        turn.worker = None
        self._tasks.create_task(self._requeue(turn, turn.dispatch))

    async def _requeue(self, turn: Turn, dispatch: int) -> None:
        await self._purge(turn.job)
        if self.turns.get(turn.job) is turn and turn.dispatch == dispatch and turn.worker is None:
            self._wait(turn)
            self.pump()

    async def _purge(self, job: str) -> None:
        try:
            await self._bus.connected.wait()
            await self._streams.purge_job(job)
        except nats.errors.Error as error:
            # The worker's late reply is refused by its dispatch number, and the publish finds the old copy.
            logger.bind(job=job).warning("job not purged from its lane: {!r}", error)

    def _leave(self, job: str, *, forget: bool = False) -> None:
        """Take a job off its lane, and its record with `forget`; a new copy is published only after that."""

        async def leave() -> None:
            if forget:
                await self._ledger.enqueue(Write("dispatches", job.encode(), None))
            await self._purge(job)

        if self._tasks is not None:
            self._leaving[job] = leaving = self._tasks.create_task(leave())
            leaving.add_done_callback(lambda done: self._leaving.get(job) is done and self._leaving.pop(job))

    def _free(self, worker: str, job: str) -> None:
        if (known := self.fleet.workers.get(worker)) is not None:
            known.jobs.discard(job)

    def _fail(self, turn: Turn, error: AetherError) -> None:
        self.turns.pop(turn.job, None)
        if turn.worker is not None:
            self._free(turn.worker, turn.job)
        if not turn.answer.done():
            turn.answer.set_exception(error)
            turn.answer.exception()  # Retrieved: a client that went away must not make it look forgotten.
        self._leave(turn.job, forget=True)
        self._counters.turns_failed += 1
        self.pump()

    def _expire(self) -> None:
        now = time.monotonic()
        for turn in [turn for turn in self.turns.values() if turn.deadline < now]:
            where = f"running on {turn.worker}" if turn.worker else "waiting for a worker"
            self._fail(turn, TurnFailed(f"no answer within its deadline ({where})"))

    def forget_prefixes(self, names: Iterable[str]) -> None:
        """Sessions and groups that are over."""
        for name in names:
            self._prefix.pop(name, None)

    def abort(self, job: str) -> None:
        """Nobody waits for this turn any more: take it off its lane; the worker is told at its next beat.

        An answer that still arrives is journaled. At the end of the process jobs stay where they are.
        """
        turn = self.turns.get(job)
        if turn is None or self.closing or self._tasks is None:
            return
        del self.turns[job]
        if turn.worker is not None:
            self.orphans[job] = turn.record
            self._aborted.add(job)
            self._free(turn.worker, job)
            self._leave(job)
        turn.answer.cancel()
        self.pump()

    def drop_orphan(self, job: str) -> bool:
        """Forget a job that no turn waits for, and free its place on its worker; whether there was one."""
        self._aborted.discard(job)
        orphan = self.orphans.pop(job, None)
        if orphan is not None:
            self._free(orphan.worker, job)
        return orphan is not None

    def _drop_orphans(self) -> None:
        """Jobs of attempts that are over: nobody will ask for their answers any more."""
        if not self.fleet.books_complete:
            return
        for job, orphan in list(self.orphans.items()):
            if self.expected(orphan.journal) is None:
                self.drop_orphan(job)
                self._leave(job, forget=True)

    def adopt(self, record: DispatchRecord) -> None:
        """A job that was dispatched before a restart; its turn attaches when its episode runs again."""
        self.orphans[record.job] = record
        if (holder := self.fleet.workers.get(record.worker)) is not None:
            holder.jobs.add(record.job)

    async def _adopt_pending(self, job: str, subject: str) -> None:
        """A pending job whose record a crash took: rebuild the record from the job, or remove the job."""
        try:
            worker, kind, version, _ = parse_job(subject)
            message = Job.decode(await self._streams.pending_job(subject))
            if message.job != job:
                raise MessageError(f"Job: field job is {message.job!r}")
        except NotFoundError:
            return  # Answered and acknowledged in the meantime.
        except (MessageError, ValueError) as error:
            self._counters.messages_bad += 1
            logger.bind(job=job).warning("pending job on {} cannot be read, removed: {}", subject, error)
            await self._streams.purge_subject(subject)
            return
        record = DispatchRecord(
            job=job,
            worker=worker,
            dispatch=message.dispatch,
            journal=message.key.encode(),
            kind="eval" if kind == "eval" else "train",
            version=version,
            adapter=message.adapter,
            max_tokens=message.sampling.max_tokens,
            group=0,
            seed=message.seed,
        )
        await self._ledger.enqueue(Write("dispatches", job.encode(), record.encode()))
        self.adopt(record)

    async def reconcile(self, intake: "Intake") -> None:
        """Publish again what is neither on a lane nor answered (after a reconnect or an empty store).

        In this order: list the pending jobs, take every reply that is in the stream by then, publish the rest.
        """
        pending = await self._streams.pending_jobs()
        await intake.drained(await self._streams.last_reply(), timeout_s=30)
        assert self._tasks is not None
        for job, subject in pending.items():
            if job not in self.turns and job not in self.orphans:
                await self._adopt_pending(job, subject)
        self.fleet.books_complete = True
        self._drop_orphans()
        for job, orphan in list(self.orphans.items()):
            if job not in pending:
                # Its job is gone and no reply came: its turn starts anew when it is asked for again.
                self._free(orphan.worker, job)
                self.orphans[job] = orphan.model_copy(update={"worker": ""})
        for turn in list(self.turns.values()):
            if turn.worker is not None and turn.job not in pending:
                self._chosen.put_nowait((turn, turn.worker, turn.dispatch))
