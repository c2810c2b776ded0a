"""Reply intake: every reply is checked against the record of its job, journaled and acknowledged once.

A reply counts only if worker and dispatch number match; any other is dropped and counted. The turn
is answered when its reply is queued to the ordered writer; the message is acknowledged after the commit.
"""

import asyncio
import contextlib
import math

import nats.errors
from aether_common.arrays import unpack_floats
from aether_common.bus import Bus
from aether_common.crash import crash_point
from aether_common.digests import sha256_bytes
from aether_common.errors import MessageError
from aether_common.names import Names, parse_reply
from aether_common.pull import PullLoop, message_id
from aether_common.wire import Reason, Reply, ReplyKind
from loguru import logger
from nats.aio.msg import Msg

from aether_coordinator.dispatch import Dispatcher
from aether_coordinator.journal import TurnKey
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import DispatchRecord, TurnRecord
from aether_coordinator.status import Counters
from aether_coordinator.streams import REPLIES_CONSUMER

WINDOW = 2048


class ReplyIntake:
    """Pulls the reply stream, in order."""

    def __init__(
        self, bus: Bus, names: Names, ledger: Ledger, dispatcher: Dispatcher, counters: Counters, run_seed: int
    ) -> None:
        self._names = names
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._counters = counters
        self._run_seed = run_seed
        self._queue: asyncio.Queue[Msg] = asyncio.Queue()
        self._taken: asyncio.Queue[tuple[Msg, asyncio.Future[None] | None]] = asyncio.Queue()
        """To be acknowledged once what they led to is durable."""
        self._loop = PullLoop(
            bus,
            f"$JS.API.CONSUMER.MSG.NEXT.{names.replies}.{REPLIES_CONSUMER}",
            WINDOW,
            self._queue.put_nowait,
        )
        self._processed = 0
        self._progress = asyncio.Event()

    async def run(self) -> None:
        """Take replies until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._loop.run())
            tasks.create_task(self._acknowledge())
            while True:
                message = await self._queue.get()
                self._taken.put_nowait((message, await self._take(message)))

    async def drained(self, sequence: int, timeout_s: float) -> bool:
        """Wait until every reply up to `sequence` of the stream was taken."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._processed < sequence:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return False
        return True

    async def _acknowledge(self) -> None:
        """In the order in which they were taken, which is that of the ledger's commits."""
        while True:
            message, committed = await self._taken.get()
            if committed is not None and not committed.done():
                await asyncio.shield(committed)
            crash_point("reply.before_ack")
            # Lost with the connection: it comes again, is found journaled and counts as a duplicate.
            with contextlib.suppress(nats.errors.Error):
                await message.ack()
            crash_point("reply.after_ack")
            self._loop.release()
            self._processed = max(self._processed, message_id(message)[0])
            self._progress.set()

    async def _take(self, message: Msg) -> asyncio.Future[None] | None:
        """Account for one reply; the future is done when it is durable, None when nothing is written."""
        worker, job = parse_reply(message.subject)
        try:
            reply = Reply.decode(message.data)
            if (reply.worker, reply.job) != (worker, job):
                raise MessageError(f"reply of {reply.worker} for {reply.job} on {message.subject}")
        except MessageError as error:
            self._counters.messages_bad += 1
            self._dispatcher.fleet.events.record("bad_message", f"reply dropped: {error}", worker, warn=True, job=job)
            return None
        self._counters.replies += 1
        record = self._record(job) or self._rebuild(reply)
        if record is None and job not in self._dispatcher.turns:
            self._counters.replies_duplicate += 1
            logger.bind(job=job, worker=worker).debug("reply for an unknown or answered job dropped")
            return None
        if record is None or record.worker != worker or not is_of(reply, record):
            self._counters.replies_refused += 1
            held = record is not None and record.worker == worker
            about = "its dispatch is not the recorded one" if held else "the job is not in its hands"
            self._dispatcher.fleet.refuse_reply(worker, job, about)
            return None
        if reply.kind is not ReplyKind.OK:
            # An attached orphan has no turn yet: forget it, the rerun turn is dispatched anew.
            if self._dispatcher.drop_orphan(job):
                return await self._ledger.enqueue(Write("dispatches", job.encode(), None))
            self._dispatcher.returned(reply)
            return None
        if problem := check_reply(reply, record):
            self._counters.replies_refused += 1
            self._dispatcher.fleet.refuse_reply(worker, job, problem)
            if (turn := self._dispatcher.turns.get(job)) is not None:
                self._dispatcher.fleet.failed(worker, job, problem)
                self._dispatcher.reassign(turn, counted=True, reason=problem)
            elif self._dispatcher.drop_orphan(job):
                # The turn that asks for it again must not wait for a job that is over.
                return await self._ledger.enqueue(Write("dispatches", job.encode(), None))
            return None
        assert reply.finish_reason is not None
        answer = TurnRecord(
            job=job,
            worker=worker,
            dispatch=reply.dispatch,
            reply=sha256_bytes(message.data),
            version=reply.version,
            adapter=reply.adapter,
            tokens=reply.tokens,
            logprobs=reply.logprobs,
            finish_reason=reply.finish_reason,
        )
        self._counters.tokens_generated += len(reply.tokens) // 4
        crash_point("reply.before_record")
        committed = await self._ledger.enqueue(
            Write("journal", record.journal, answer.encode()), Write("dispatches", job.encode(), None)
        )
        self._dispatcher.drop_orphan(job)
        self._dispatcher.answered(answer)
        return committed

    def _record(self, job: str) -> DispatchRecord | None:
        """Who holds the job: in memory while its turn waits, else as recorded before a restart."""
        turn = self._dispatcher.turns.get(job)
        if turn is not None and turn.worker is not None:
            return turn.record
        return self._dispatcher.orphans.get(job)

    def _identify(self, key: str) -> tuple[str, int] | None:
        """Job id and seed of a journal key, None if it is none."""
        try:
            turn = TurnKey.parse(key)
        except ValueError:
            return None
        return turn.job(self._names.run, self._run_seed), turn.job_seed(self._names.run, self._run_seed)

    def _rebuild(self, reply: Reply) -> DispatchRecord | None:
        """The record that a crash took before it was durable, from the reply of its job.

        Only for a running attempt that has no answer under this key, and for the dispatch that comes next.
        """
        turn = self._dispatcher.turns.get(reply.job)
        if (turn.dispatch if turn else 0) != reply.dispatch or self._identify(reply.key) != (reply.job, reply.seed):
            return None
        expected = self._dispatcher.expected(reply.key.encode())
        if expected is None or self._ledger.get("journal", reply.key.encode()) is not None:
            return None
        return DispatchRecord(
            job=reply.job,
            worker=reply.worker,
            dispatch=reply.dispatch,
            journal=reply.key.encode(),
            kind=expected.group.kind,
            version=expected.group.version,
            adapter=expected.adapter,
            max_tokens=turn.sampling.max_tokens if turn else len(reply.tokens) // 4,
            group=expected.group.id,
            seed=reply.seed,
        )


def is_of(reply: Reply, record: DispatchRecord) -> bool:
    """Whether a reply is of the recorded dispatch; who cannot read a job cannot echo its number."""
    unreadable = reply.kind is ReplyKind.ERROR and reply.reason is Reason.UNREADABLE
    return reply.dispatch == record.dispatch or unreadable


def check_reply(reply: Reply, record: DispatchRecord) -> str:
    """What is wrong with a successful reply, empty if nothing is."""
    if (reply.adapter, reply.version) != (record.adapter, record.version):
        return f"sampled from policy {reply.version} ({reply.adapter[:12]}), asked for {record.version}"
    if reply.seed != record.seed:
        return "its seed differs from the job's"
    count = len(reply.tokens) // 4
    if len(reply.tokens) != 4 * count or len(reply.logprobs) != 4 * count:
        return "tokens and logprobs differ in length"
    if reply.finish_reason is None or not 1 <= count <= record.max_tokens:
        return f"{count} tokens, finish reason {reply.finish_reason}: expected 1 to {record.max_tokens}"
    if not math.isfinite(sum(unpack_floats(reply.logprobs))):
        return "a logprob is not finite"
    return ""
