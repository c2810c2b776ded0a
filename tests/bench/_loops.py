"""The bare queue loop, three times: publish, pull, reply, acknowledge, and nothing else.

Twice lean, with our own pulls, confirmations and joined frames (a task per job in flight, or callbacks only), and as
nats-py's documentation writes it. Each has a side that publishes and consumes the replies, and a worker, a process of
its own, that says `ready` on stdout and ends with its stdin.
"""

import asyncio
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import nats.errors
from aether_common.bus import Bus
from aether_common.names import Names
from aether_coordinator.streams import REPLIES_CONSUMER
from bench._bench import cancel
from nats.aio.msg import Msg
from nats.js import JetStreamContext

IN_FLIGHT = 256
PROMPT_TOKENS = 256
"""1 KB as packed token ids."""
REPLY = b"r" * 450
NATS_PY_S = 20.0
BARE, CALLBACKS, NATS_PY = "bare", "callbacks", "nats-py"


def number_of(message: Msg) -> str:
    """The job that a message is about."""
    return message.subject.rsplit(".", 1)[-1]


class Pulls:
    """Raw next-message requests for one consumer, renewed at half credit; `deliver` answers every message."""

    def __init__(self, bus: Bus, subject: str, window: int) -> None:
        self.bus, self.subject, self.window = bus, subject, window
        self.inbox = bus.client.new_inbox()
        self.credit = 0

    async def ask(self) -> None:
        """Called after every message: keep between half a window and a window requested."""
        if self.credit <= self.window // 2:
            batch = self.window - self.credit
            self.credit += batch
            body = {"batch": batch, "expires": 28_000_000_000}
            await self.bus.client.publish(self.subject, json.dumps(body).encode(), reply=f"{self.inbox}.{batch}")

    def ended(self, message: Msg) -> bool:
        """Whether this is the end of a request; its unused credit is free again."""
        if message.headers is None or "Status" not in message.headers:
            self.credit -= 1
            return False
        self.credit -= int(message.headers["Nats-Pending-Messages"])
        return True


async def fetch(subscription: JetStreamContext.PullSubscription) -> list[Msg]:
    try:
        return await subscription.fetch(32, timeout=2)
    except nats.errors.TimeoutError:
        return []


def check(confirmation: Msg) -> None:
    if b'"error"' in confirmation.data or b'"seq"' not in confirmation.data:
        raise RuntimeError(confirmation.data.decode())


# ---- workers -----------------------------------------------------------------------------------


async def work(bus: Bus, names: Names, name: str, pull: str = "") -> None:
    """The worker of the loop `name`; `pull` is the subject of its next-message requests where it is another."""
    worker = {BARE: tasks_worker, CALLBACKS: callbacks_worker}.get(name)
    if worker is None:
        await nats_py_worker(bus, names)
    else:
        await worker(bus, names, Pulls(bus, pull or names.next(name), IN_FLIGHT))


async def tasks_worker(bus: Bus, names: Names, pulls: Pulls) -> None:
    """A task per job awaits the reply's confirmation."""
    async with asyncio.TaskGroup() as tasks:

        async def answer(message: Msg) -> None:
            check(await bus.client.request(names.reply(BARE, number_of(message)), REPLY, timeout=10))
            await message.ack()

        async def job(message: Msg) -> None:
            if not pulls.ended(message):
                tasks.create_task(answer(message))
            await pulls.ask()

        await _until_stdin_ends(pulls, job)


async def callbacks_worker(bus: Bus, names: Names, pulls: Pulls) -> None:
    """No task: a callback acknowledges when the confirmation comes."""
    client, confirmations = bus.client, bus.client.new_inbox()
    unconfirmed: dict[str, str] = {}

    async def job(message: Msg) -> None:
        if not pulls.ended(message):
            number = number_of(message)
            unconfirmed[number] = message.reply
            await client.publish(names.reply(CALLBACKS, number), REPLY, reply=f"{confirmations}.{number}")
        await pulls.ask()

    async def confirmed(message: Msg) -> None:
        check(message)
        await client.publish(unconfirmed.pop(number_of(message)), b"+ACK")

    await client.subscribe(f"{confirmations}.*", cb=confirmed)
    await _until_stdin_ends(pulls, job)


async def _until_stdin_ends(pulls: Pulls, job: Callable[[Msg], Awaitable[None]]) -> None:
    await pulls.bus.client.subscribe(f"{pulls.inbox}.*", cb=job)
    await pulls.ask()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def nats_py_worker(bus: Bus, names: Names) -> None:
    js = bus.client.jetstream()
    jobs = await js.pull_subscribe_bind(
        names.consumer(NATS_PY), names.jobs, inbox_prefix=f"{names.inbox(NATS_PY)}.".encode()
    )
    # The workers' account has JetStream's request under another name.
    jobs._nms = names.next(NATS_PY)  # pyright: ignore[reportPrivateUsage]
    print("ready", flush=True)
    while True:
        for message in await fetch(jobs):
            await js.publish(names.reply(NATS_PY, number_of(message)), REPLY)
            await message.ack()


# ---- the other side ----------------------------------------------------------------------------


class Slots:
    """Jobs in flight, each in a task that awaits its confirmation and its reply."""

    def __init__(self, bus: Bus, names: Names, worker: str) -> None:
        self._js = bus.client.jetstream()
        self._names, self._worker = names, worker
        self._numbers = itertools.count()
        self._replies: dict[str, asyncio.Future[None]] = {}

    def replied(self, message: Msg) -> None:
        self._replies.pop(number_of(message)).set_result(None)

    async def run(self, count: int, in_flight: int) -> dict[str, float]:
        """`count` jobs, `in_flight` at a time."""
        payload = os.urandom(4 * PROMPT_TOKENS)
        latencies: list[float] = []
        left = count

        async def slot() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                number = str(next(self._numbers))
                self._replies[number] = reply = asyncio.get_running_loop().create_future()
                started = time.perf_counter()
                await self._js.publish(self._names.job(self._worker, "train", 0, number), payload)
                await reply
                latencies.append(time.perf_counter() - started)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as slots:
            for _ in range(in_flight):
                slots.create_task(slot())
        return {"per_s": count / (time.perf_counter() - began), "p50_ms": 1000 * statistics.median(latencies)}


class Bare:
    """Publishes and consumes with nats-py as it is meant: a task per job in flight awaits confirmation and reply."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus, self._names = bus, names
        self._slots = Slots(bus, names, BARE)

    async def run(self, count: int, in_flight: int) -> dict[str, float]:
        client = self._bus.client
        pulls = replies_of(self._bus, self._names)

        async def replied(message: Msg) -> None:
            if not pulls.ended(message):
                await message.ack()
                self._slots.replied(message)
            await pulls.ask()

        subscription = await client.subscribe(f"{pulls.inbox}.*", cb=replied)
        await pulls.ask()
        figures = await self._slots.run(count, in_flight)
        await subscription.unsubscribe()
        await client.flush()
        return figures


class Callbacks:
    """The same without any task or future: the next job is published by whichever callback ends one."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus, self._names = bus, names
        self._numbers = itertools.count()

    async def run(self, count: int, in_flight: int) -> dict[str, float]:
        client, names = self._bus.client, self._names
        confirmations = client.new_inbox()
        pulls = replies_of(self._bus, names)
        payload = os.urandom(4 * PROMPT_TOKENS)
        started: dict[str, float] = {}
        unconfirmed: set[str] = set()
        latencies: list[float] = []
        done = asyncio.Event()
        left = count

        async def publish() -> None:
            nonlocal left
            left -= 1
            number = str(next(self._numbers))
            started[number] = time.perf_counter()
            unconfirmed.add(number)
            subject = names.job(CALLBACKS, "train", 0, number)
            await client.publish(subject, payload, reply=f"{confirmations}.{number}")

        async def over() -> None:
            if left > 0:
                await publish()
            elif not started and not unconfirmed:
                done.set()

        async def confirmed(message: Msg) -> None:
            check(message)
            number = number_of(message)
            unconfirmed.discard(number)
            if number not in started:
                await over()

        async def replied(message: Msg) -> None:
            if not pulls.ended(message):
                number = number_of(message)
                latencies.append(time.perf_counter() - started.pop(number))
                await client.publish(message.reply, b"+ACK")
                if number not in unconfirmed:
                    await over()
            await pulls.ask()

        subscriptions = [
            await client.subscribe(f"{confirmations}.*", cb=confirmed),
            await client.subscribe(f"{pulls.inbox}.*", cb=replied),
        ]
        await pulls.ask()
        began = time.perf_counter()
        for _ in range(in_flight):
            await publish()
        await done.wait()
        seconds = time.perf_counter() - began
        for subscription in subscriptions:
            await subscription.unsubscribe()
        await client.flush()
        return {"per_s": count / seconds, "p50_ms": 1000 * statistics.median(latencies)}


class NatsPy:
    """As nats-py's documentation writes it."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus, self._names = bus, names

    async def run(self, count: int, in_flight: int) -> dict[str, float]:
        """NaN where it stalls."""
        js, names = self._bus.client.jetstream(), self._names
        slots = Slots(self._bus, names, NATS_PY)
        subscription = await js.pull_subscribe_bind(REPLIES_CONSUMER, names.replies)

        async def consume() -> None:
            while True:
                for message in await fetch(subscription):
                    await message.ack()
                    slots.replied(message)

        consuming = asyncio.create_task(consume())
        try:
            async with asyncio.timeout(NATS_PY_S):
                return await slots.run(count, in_flight)
        except TimeoutError:
            return {"per_s": math.nan, "p50_ms": math.nan}
        finally:
            await cancel(consuming)
            await subscription.unsubscribe()
            for stream in (names.jobs, names.replies):
                await js.purge_stream(stream)


def replies_of(bus: Bus, names: Names) -> Pulls:
    """Of the coordinator's consumer."""
    return Pulls(bus, f"$JS.API.CONSUMER.MSG.NEXT.{names.replies}.{REPLIES_CONSUMER}", 2048)


def figures_of(unloaded: dict[str, float], loaded: dict[str, float]) -> dict[str, float]:
    return {**loaded, "unloaded_ms": unloaded["p50_ms"]}
