"""The jobs of this worker's lane, from delivery to acknowledgement.

A job is acknowledged only after its reply is stored. One that is held already attaches a redelivery:
it is never generated twice at a time. While it is held its lease is extended. A message that cannot
be read is answered with a typed error and terminated.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import nats.errors
from aether_common.arrays import pack_floats, pack_tokens, unpack_tokens
from aether_common.bus import Bus
from aether_common.crash import crash_point
from aether_common.errors import EngineError, MessageError
from aether_common.names import Names, parse_job
from aether_common.pull import PullLoop, message_id
from aether_common.wire import Job, Reason, Reply, ReplyKind
from loguru import logger
from nats.aio.msg import Msg
from pydantic import ValidationError

from aether_worker.adapter_check import AdapterError
from aether_worker.engine.base import Engine, EngineUnavailable, Generation, PromptTooLong, Request, UnknownAdapter
from aether_worker.loaded import LoadedAdapters
from aether_worker.replies import Replies

MessageId = tuple[int, str]
REMEMBERED = 512
"""Answered jobs whose replies are kept for a coordinator that lost them."""
HAND_BACK_S = 10.0
"""How long the replies of handed back jobs may wait for their confirmation when the worker ends."""


@dataclass(slots=True, eq=False)
class Held:
    """A job in hand."""

    message: Msg
    """The newest delivery."""
    job: Job
    prompt: list[int]
    received: float
    task: asyncio.Task[None] | None = None
    tokens: int = 0
    started: float | None = None
    stopped: Reason | None = None
    working: bool = False
    """Whether cancelling the task ends the work; later it would lose the reply."""

    def stop(self, reason: Reason) -> None:
        """Hand the job back, unless it is finished."""
        self.stopped = self.stopped or reason
        if self.working and self.task is not None:
            self.working = False
            self.task.cancel()


class Lane:
    def __init__(
        self,
        bus: Bus,
        names: Names,
        worker: str,
        incarnation: str,
        *,
        slots: int,
        prefetch: int,
        engine: Engine,
        adapters: LoadedAdapters,
    ) -> None:
        self._bus = bus
        self._worker = worker
        self._incarnation = incarnation
        self._engine = engine
        self._adapters = adapters
        self._replies = Replies(bus, names)
        self._slots = asyncio.Semaphore(slots)
        self._pull = PullLoop(bus, names.next(worker), slots + prefetch, self._deliver)
        self._held: dict[str, Held] = {}
        self._answered: OrderedDict[str, tuple[MessageId, Reply]] = OrderedDict()
        self._closing: Reason | None = None
        self._ended = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks = asyncio.TaskGroup()
        self.engine_failed = asyncio.Event()
        """Set when the engine failed: the coordinator should hear it before it sends more."""
        self.tokens_total = 0

    @property
    def running(self) -> dict[str, int]:
        """Generated tokens by job id of every job in hand."""
        return {job: held.tokens for job, held in self._held.items()}

    async def run(self, lease_s: float) -> None:
        """Serve until cancelled; jobs in hand are then left to their leases."""
        try:
            async with self._tasks:
                self._tasks.create_task(self._extend_leases(lease_s))
                await self._pull.run()
        finally:
            self._ended = True

    def cancel(self, jobs: Iterable[str]) -> None:
        """Abort these jobs; they count no more."""
        for job in jobs:
            if held := self._held.get(job):
                held.stop(Reason.CANCELLED)

    async def drain(self, reason: Reason, finish_s: float) -> None:
        """Take no more jobs, hand back the waiting ones at once and the running ones after `finish_s`."""
        self._closing = reason
        self._pull.pause()
        for held in list(self._held.values()):
            if held.started is None or finish_s <= 0:
                held.stop(reason)
        with suppress(TimeoutError):
            async with asyncio.timeout(finish_s):
                await self._empty.wait()
        for held in list(self._held.values()):
            held.stop(reason)
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_BACK_S):
                await self._empty.wait()
        if self._held:
            logger.warning("{} jobs could not be handed back: their replies were not stored", len(self._held))

    def _deliver(self, message: Msg) -> None:
        if self._ended:
            return
        try:
            job_id = parse_job(message.subject)[3]
        except ValueError:
            logger.error("message on {} is no job: terminated", message.subject)
            self._tasks.create_task(self._terminate(message))
            return
        try:
            job = Job.decode(message.data)
            prompt = unpack_tokens(job.prompt)
            if job.job != job_id:
                raise MessageError(f"Job: field job is {job.job!r}, the subject says {job_id!r}")
            if not prompt:
                raise MessageError("Job: the prompt is empty")
        except (MessageError, ValueError) as error:
            self._tasks.create_task(self._refuse(message, job_id, str(error)))
            return
        if held := self._held.get(job_id):
            held.message = message
            if job.dispatch > held.job.dispatch:
                held.job = job
            self._pull.release()
        elif (answered := self._answered.get(job_id)) and answered[1].dispatch >= job.dispatch:
            self._tasks.create_task(self._answer_again(message, *answered))
        else:
            held = Held(message, job, prompt, time.monotonic())
            self._held[job_id] = held
            self._empty.clear()
            crash_point("worker.after_pull")
            held.task = self._tasks.create_task(self._hold(held))

    async def _hold(self, held: Held) -> None:
        in_hand = True
        try:
            reply = await self._answer(held)
            # Its slot is free: the next job is asked for while the reply is on its way.
            self._pull.release()
            in_hand = False
            crash_point("worker.before_reply")
            await self._replies.publish(reply)
            crash_point("worker.before_ack")
            while held.job.dispatch != reply.dispatch:
                # Reassigned to this worker while it was answered: the new dispatch wants its own reply.
                if reply.kind is ReplyKind.OK:
                    reply = reply.model_copy(update={"dispatch": held.job.dispatch})
                else:
                    held.stopped = None
                    reply = await self._answer(held)
                await self._replies.publish(reply)
            self._answered[reply.job] = (message_id(held.message), reply)
            while len(self._answered) > REMEMBERED:
                self._answered.popitem(last=False)
            await self._acknowledge(held.message)
            crash_point("worker.after_ack")
        finally:
            del self._held[held.job.job]
            if not self._held:
                self._empty.set()
            if in_hand:
                self._pull.release()

    async def _answer(self, held: Held) -> Reply:
        """Generate, or say why not. Only the end of the worker cancels it."""
        held.working = True
        try:
            if reason := held.stopped or self._closing:
                return self._reply(held, ReplyKind.RETURNED, reason=reason)
            generation = await self._generate(held)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if held.stopped is None or task is None or task.uncancel() > 0:
                raise
            return self._reply(held, ReplyKind.RETURNED, reason=held.stopped)
        except (AdapterError, UnknownAdapter) as error:
            return self._failed(held, ReplyKind.RETURNED, Reason.ADAPTER, error)
        except EngineUnavailable as error:
            # Not begun, or cut off by a restart on purpose: no attempt that counts against the job.
            self.engine_failed.set()
            return self._failed(held, ReplyKind.RETURNED, Reason.DRAIN, error)
        except PromptTooLong as error:
            return self._failed(held, ReplyKind.ERROR, Reason.PROMPT_TOO_LONG, error)
        except EngineError as error:
            self.engine_failed.set()
            return self._failed(held, ReplyKind.RETURNED, Reason.ENGINE, error)
        except Exception as error:
            # One job must not end the worker; elsewhere it may go well, and after three it is failed.
            logger.bind(job=held.job.job).exception("job failed unexpectedly")
            return self._failed(held, ReplyKind.RETURNED, Reason.ENGINE, error)
        finally:
            held.working = False
        return self._reply(
            held,
            ReplyKind.OK,
            tokens=pack_tokens(generation.tokens),
            logprobs=pack_floats(generation.logprobs),
            finish_reason=generation.finish_reason,
        )

    async def _generate(self, held: Held) -> Generation:
        job = held.job
        request = Request(job.job, job.adapter, held.prompt, job.sampling, job.seed)

        def progress(count: int) -> None:
            self.tokens_total += count - held.tokens
            held.tokens = count

        async with self._adapters.use(job.version, job.adapter, job.remaining_ms / 1000), self._slots:
            held.started = time.monotonic()
            generation = await self._engine.generate(request, progress)
        progress(len(generation.tokens))
        return generation

    def _failed(self, held: Held, kind: ReplyKind, reason: Reason, error: Exception) -> Reply:
        logger.bind(job=held.job.job).warning(
            "job {}: {}", "handed back" if kind is ReplyKind.RETURNED else kind, error
        )
        return self._reply(held, kind, reason=reason, message=str(error)[:2000])

    def _reply(self, held: Held, kind: ReplyKind, **fields: Any) -> Reply:
        job, now = held.job, time.monotonic()
        started = held.started or now
        return Reply(
            job=job.job,
            dispatch=job.dispatch,
            worker=self._worker,
            incarnation=self._incarnation,
            kind=kind,
            key=job.key,
            seed=job.seed,
            version=job.version,
            adapter=job.adapter,
            wait_ms=(started - held.received) * 1000,
            generate_ms=(now - started) * 1000,
            **fields,
        )

    async def _answer_again(self, message: Msg, answered: MessageId, reply: Reply) -> None:
        # Another message than the one answered: the coordinator published the job again, so it lacks the reply.
        if message_id(message) != answered:
            await self._replies.publish(reply)
        await self._acknowledge(message)
        self._pull.release()

    async def _refuse(self, message: Msg, job: str, problem: str) -> None:
        logger.error("job {} cannot be read: {}", job, problem)
        try:
            reply = Reply(
                job=job,
                dispatch=0,
                worker=self._worker,
                incarnation=self._incarnation,
                kind=ReplyKind.ERROR,
                reason=Reason.UNREADABLE,
                message=problem[:2000],
            )
        except ValidationError:
            logger.error("job id {!r} is no plain token: terminated without a reply", job)
        else:
            await self._replies.publish(reply)
        await self._terminate(message)

    async def _terminate(self, message: Msg) -> None:
        with suppress(nats.errors.Error):
            if self._bus.connected.is_set():
                await message.term()
        self._pull.release()

    async def _acknowledge(self, message: Msg) -> None:
        # A lost acknowledgement brings the message back, which is then acknowledged again.
        with suppress(nats.errors.Error):
            if self._bus.connected.is_set():
                await message.ack()

    async def _extend_leases(self, lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / 3)
            for held in list(self._held.values()):
                with suppress(nats.errors.Error):
                    if self._bus.connected.is_set():
                        await held.message.in_progress()
