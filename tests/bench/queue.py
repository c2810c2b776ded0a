"""Turns through gateway, JetStream and a worker with the null engine, against the bare queue loop.

    uv run python tests/bench/queue.py [--rounds 5]

Gateway side, four processes: load generator (HTTP, keep-alive) → this process with the coordinator's own parts
(gateway, dispatch, ledger, reply intake) → nats-server → `aether-worker` with engine "null" over ws://, and back.
Bare side, three processes: this process publishes and consumes replies → nats-server → a worker that pulls, replies
and acknowledges over ws://, and back. Both use the same server, streams, accounts, window, file storage, publish
confirmations and explicit acknowledgements; the bare loop neither encodes nor records anything, and nobody is
asked over HTTP. On few cores the load generator's share of the processor counts against the gateway side, and what
limits both is processor time per job over all processes, which is reported by process.

The goal is set against the bare loop as nats-py's documentation writes it (`js.publish`, `fetch(32)`, `msg.ack()`),
which is what a queue costs that nobody has worked on. The two lean loops speak the protocol with our own pulls,
confirmations and joined frames: their ratio says what all that the coordinator does costs beside the transport.
The goal for one in flight is set against the lean loop, the stricter one. A fetch can stall: then run it again.
"""

import sys
from pathlib import Path

# This folder would hide the standard library's `queue` behind this script.
if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import nats.errors
from aether_common.bus import Bus
from aether_common.digests import file_list_bytes, file_list_digest, list_files
from aether_common.identity import compute_identity
from aether_common.names import Names
from aether_common.wire import PolicyRef
from aether_coordinator.dispatch import Dispatcher
from aether_coordinator.events import Events
from aether_coordinator.fleet import Fleet
from aether_coordinator.gateway import Gateway, OpenEpisode
from aether_coordinator.journal import Claims
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.pauses import freeze_heap
from aether_coordinator.records import EpisodeRecord, GroupRecord, episode_id
from aether_coordinator.replies import ReplyIntake
from aether_coordinator.settings import TrainSource
from aether_coordinator.status import Counters
from aether_coordinator.streams import REPLIES_CONSUMER, Streams
from aiohttp import web
from bench._bench import finish, interleaved, median, print_table
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ObjectMeta
from nats_server import NatsServer
from tiny_run import toml

IN_FLIGHT = 256
PROMPT_TOKENS = 256
"""1 KB as packed token ids."""
COMPLETION = [5, 6, 7, 2]
VOCABULARY = 259
TURNS = 2000
"""Per round."""
BARE_JOBS = 4000
NATS_PY_JOBS, NATS_PY_S = 1000, 20.0
"""Jobs per round, and seconds after which the loop counts as stalled."""
UNLOADED = 300
"""One in flight, per round."""
LEASE_S = 30.0
WORKER, BARE, CALLBACKS, NATS_PY = "w1", "bare", "callbacks", "nats-py"
GOAL, LATENCY_GOAL = 0.4, 3.0


# ---- the load generator, a process ---------------------------------------------------------------


async def generate_load() -> None:
    """Commands come as JSON lines on stdin, figures go as JSON lines to stdout."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await send(**json.loads(line))), flush=True)


def http_request(url: SplitResult, secret: str, model: str, numbers: random.Random) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "token_ids": numbers.choices(range(3, VOCABULARY), k=PROMPT_TOKENS),
            "sampling_params": {
                "temperature": 1.0,
                "max_tokens": 16,
                "stop_token_ids": [2],
                "logprobs": 1,
                "skip_special_tokens": False,
            },
        }
    ).encode()
    head = (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {secret}\r\n"
        f"X-Session-ID: {model}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Caller(asyncio.Protocol):
    """One connection, one request at a time: cheap, so that the figure is the gateway's and not the client's."""

    def __init__(self, waiting: Iterator[bytes], latencies: list[float]) -> None:
        self._waiting = waiting
        self._latencies = latencies
        self._answer = b""
        self._started = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        request = next(self._waiting, None)
        if request is None:
            self._transport.close()
            self.done.set_result(None)
            return
        self._answer = b""
        self._started = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        if not separator or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        self._latencies.append(time.perf_counter() - self._started)
        if not head.startswith(b"HTTP/1.1 200") or (body and b'"token_ids"' not in body):
            self.done.set_exception(RuntimeError(self._answer.decode()))
            self._transport.abort()
            return
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))


async def send(*, url: str, secret: str, models: list[str], count: int, in_flight: int, seed: int) -> dict[str, float]:
    """`count` calls, `in_flight` at a time; the n-th call is the n-th model's episode. Requests are made before."""
    numbers = random.Random(seed)
    address = urlsplit(url)
    requests = [
        http_request(address, secret, model, numbers) for _, model in zip(range(count), itertools.cycle(models))
    ]
    latencies: list[float] = []
    waiting = iter(requests)
    loop = asyncio.get_running_loop()
    started, spent = time.perf_counter(), time.process_time()
    connected = [
        await loop.create_connection(lambda: Caller(waiting, latencies), address.hostname or "", address.port or 0)
        for _ in range(in_flight)
    ]
    await asyncio.gather(*(caller.done for _, caller in connected))
    return {
        "per_s": count / (time.perf_counter() - started),
        "p50_ms": 1000 * statistics.median(latencies),
        "load generator": (time.process_time() - spent) / count * 1e6,
    }


# ---- the bare loop -------------------------------------------------------------------------------


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


async def bare_worker(name: str, directory: Path, url: str) -> None:
    """Pull a job, publish its reply, acknowledge the job after the reply's confirmation."""
    names = Names("test")
    bus = Bus(url, (directory / f"{name}.seed").read_text(), names.inbox(name), name)
    await bus.connect()
    client, confirmations = bus.client, bus.client.new_inbox()
    if name == NATS_PY:
        await nats_py_worker(client, names)
    pulls = Pulls(bus, names.next(name), IN_FLIGHT)
    unconfirmed: dict[str, str] = {}
    reply = b"r" * 450

    async def answer(message: Msg) -> None:
        number = message.subject.rsplit(".", 1)[-1]
        check(await client.request(names.reply(name, number), reply, timeout=10))
        await message.ack()

    async def job(message: Msg) -> None:
        if not pulls.ended(message):
            if name == BARE:
                tasks.create_task(answer(message))
            else:
                number = message.subject.rsplit(".", 1)[-1]
                unconfirmed[number] = message.reply
                await client.publish(names.reply(name, number), reply, reply=f"{confirmations}.{number}")
        await pulls.ask()

    async def confirmed(message: Msg) -> None:
        check(message)
        await client.publish(unconfirmed.pop(message.subject.rsplit(".", 1)[-1]), b"+ACK")

    await client.subscribe(f"{confirmations}.*", cb=confirmed)
    await client.subscribe(f"{pulls.inbox}.*", cb=job)
    async with asyncio.TaskGroup() as tasks:
        await pulls.ask()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def nats_py_worker(client: Client, names: Names) -> None:
    js = client.jetstream()
    jobs = await js.pull_subscribe_bind(
        names.consumer(NATS_PY), names.jobs, inbox_prefix=f"{names.inbox(NATS_PY)}.".encode()
    )
    # The workers' account has JetStream's request under another name.
    jobs._nms = names.next(NATS_PY)  # pyright: ignore[reportPrivateUsage]
    print("ready", flush=True)
    while True:
        for message in await fetch(jobs):
            await js.publish(names.reply(NATS_PY, message.subject.rsplit(".", 1)[-1]), b"r" * 450)
            await message.ack()


async def fetch(subscription: JetStreamContext.PullSubscription) -> list[Msg]:
    try:
        return await subscription.fetch(32, timeout=2)
    except nats.errors.TimeoutError:
        return []


def check(confirmation: Msg) -> None:
    if b'"error"' in confirmation.data or b'"seq"' not in confirmation.data:
        raise RuntimeError(confirmation.data.decode())


class Bare:
    """Publishes and consumes with nats-py as it is meant: a task per job in flight awaits confirmation and reply."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus, self._names = bus, names
        self._numbers = itertools.count()

    async def run(self, count: int, in_flight: int) -> dict[str, float]:
        client, names = self._bus.client, self._names
        js = client.jetstream()
        pulls = Pulls(self._bus, f"$JS.API.CONSUMER.MSG.NEXT.{names.replies}.{REPLIES_CONSUMER}", 2048)
        payload = os.urandom(4 * PROMPT_TOKENS)
        replies: dict[str, asyncio.Future[None]] = {}
        latencies: list[float] = []
        left = count

        async def replied(message: Msg) -> None:
            if not pulls.ended(message):
                await message.ack()
                replies.pop(message.subject.rsplit(".", 1)[-1]).set_result(None)
            await pulls.ask()

        async def slot() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                number = str(next(self._numbers))
                replies[number] = reply = asyncio.get_running_loop().create_future()
                started = time.perf_counter()
                await js.publish(names.job(BARE, "train", 0, number), payload)
                await reply
                latencies.append(time.perf_counter() - started)

        subscription = await client.subscribe(f"{pulls.inbox}.*", cb=replied)
        await pulls.ask()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as slots:
            for _ in range(in_flight):
                slots.create_task(slot())
        seconds = time.perf_counter() - began
        await subscription.unsubscribe()
        await client.flush()
        return {"per_s": count / seconds, "p50_ms": 1000 * statistics.median(latencies)}


class Callbacks:
    """The same without any task or future: the next job is published by whichever callback ends one."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus, self._names = bus, names
        self._numbers = itertools.count()

    async def run(self, count: int, in_flight: int) -> dict[str, float]:
        client, names = self._bus.client, self._names
        confirmations = client.new_inbox()
        pulls = Pulls(self._bus, f"$JS.API.CONSUMER.MSG.NEXT.{names.replies}.{REPLIES_CONSUMER}", 2048)
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
            number = message.subject.rsplit(".", 1)[-1]
            unconfirmed.discard(number)
            if number not in started:
                await over()

        async def replied(message: Msg) -> None:
            if not pulls.ended(message):
                number = message.subject.rsplit(".", 1)[-1]
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
        self._numbers = itertools.count()

    async def run(self, count: int, in_flight: int) -> dict[str, float]:
        """NaN where it stalls."""
        js, names = self._bus.client.jetstream(), self._names
        replies: dict[str, asyncio.Future[None]] = {}
        subscription = await js.pull_subscribe_bind(REPLIES_CONSUMER, names.replies)
        payload = os.urandom(4 * PROMPT_TOKENS)
        latencies: list[float] = []
        left = count

        async def consume() -> None:
            while True:
                for message in await fetch(subscription):
                    await message.ack()
                    replies.pop(message.subject.rsplit(".", 1)[-1]).set_result(None)

        async def slot() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                number = str(next(self._numbers))
                replies[number] = reply = asyncio.get_running_loop().create_future()
                started = time.perf_counter()
                await js.publish(names.job(NATS_PY, "train", 0, number), payload)
                await reply
                latencies.append(time.perf_counter() - started)

        consuming = asyncio.create_task(consume())
        began = time.perf_counter()
        try:
            async with asyncio.timeout(NATS_PY_S), asyncio.TaskGroup() as slots:
                for _ in range(in_flight):
                    slots.create_task(slot())
            return {"per_s": count / (time.perf_counter() - began), "p50_ms": 1000 * statistics.median(latencies)}
        except TimeoutError:
            return {"per_s": math.nan, "p50_ms": math.nan}
        finally:
            await cancel(consuming)
            await subscription.unsubscribe()
            for stream in (names.jobs, names.replies):
                await js.purge_stream(stream)


# ---- the product ---------------------------------------------------------------------------------


class Product:
    """The coordinator's own parts, without trainer, scheduler and verifiers."""

    def __init__(self, directory: Path, bus: Bus, names: Names, model: Path) -> None:
        self.bus, self.names = bus, names
        self.counters = Counters()
        self.ledger = Ledger(directory / "state")
        self.ledger.with_every_commit = lambda: [Write("run", b"counters", self.counters.model_dump_json().encode())]
        self.streams = Streams(bus, names, "0" * 32, max_age_s=3600, lease_s=LEASE_S, storage=512 << 20)
        self.dispatcher = Dispatcher(bus, names, self.ledger, self.streams, self.counters)
        self.adapter = ""
        self.fleet = Fleet(
            bus,
            names,
            self.streams,
            identity=compute_identity(str(model), None, "float32", "default"),
            max_model_len=2048,
            lease_s=LEASE_S,
            wanted=lambda: [PolicyRef(version=0, adapter=self.adapter)],
            on_lost=self.dispatcher.lost,
            on_stalled=self.dispatcher.stalled,
            stall_s=300.0,
            mismatch=lambda _: None,
            on_room=self.dispatcher.pump,
            on_bad_message=lambda: None,
            ledger=self.ledger,
            events=Events(directory),
            run_root=directory,
        )
        self.dispatcher.fleet = self.fleet
        self.fleet.books_complete = True
        self.gateway = Gateway(
            self.ledger,
            self.dispatcher,
            self.counters,
            run=names.run,
            seed=0,
            max_model_len=2048,
            turn_deadline_s=600,
            stop_token_ids=frozenset({2}),
            vocab_size=VOCABULARY,
        )
        self._groups = itertools.count(1)

    async def put_adapter(self, directory: Path) -> None:
        """Any files will do: the null engine does not read them."""
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_bytes(bytes(1024))
        files = list_files(directory)
        self.adapter = file_list_digest(files)
        for entry in files:
            content = (directory / entry.name).read_bytes()
            await self.streams.artifacts.put(entry.sha256, content, meta=ObjectMeta(name=entry.sha256))
        await self.streams.artifacts.put(self.adapter, file_list_bytes(files), meta=ObjectMeta(name=self.adapter))

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        ready = asyncio.Event()
        tasks = [
            asyncio.create_task(work)
            for work in (
                self.ledger.run(),
                self.fleet.run(),
                self.dispatcher.run(),
                self.gateway.serve(0, ready.set),
            )
        ]
        await ready.wait()
        try:
            yield
        finally:
            await cancel(*tasks)
            self.ledger.close()

    @asynccontextmanager
    async def taking_replies(self) -> AsyncGenerator[None]:
        """The bare loop uses the same consumer of the replies: only one of them may pull."""
        intake = ReplyIntake(self.bus, self.names, self.ledger, self.dispatcher, self.counters, run_seed=0)
        task = asyncio.create_task(intake.run())
        try:
            yield
            await self.ledger.flush()
            await asyncio.sleep(0.1)
        finally:
            await cancel(task)

    @asynccontextmanager
    async def episodes(self, count: int) -> AsyncGenerator[list[str]]:
        """Open episodes in groups of eight; yields the model names of their calls."""
        source = TrainSource.model_validate(
            {"name": "bench", "taskset": "none", "sampling": {"temperature": 1.0, "max_tokens": 16}}
        )
        opened: list[OpenEpisode] = []
        for _ in range(0, count, 8):
            group = GroupRecord(id=next(self._groups), kind="train", source="bench", task=0, version=0, size=8)
            for index in range(8):
                claims = Claims(episode_id(group.id, index), 0)
                record = EpisodeRecord(group=group.id, index=index)
                opened.append(OpenEpisode(record, group, self.adapter, source, claims))
        for episode in opened:
            self.gateway.open(episode)
        yield [episode.model for episode in opened]
        for episode in opened:
            self.gateway.close(episode)


async def cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


class LoadGenerator:
    """This process's end of the pipe to `generate_load`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self._seeds = itertools.count()

    async def send(self, url: str, secret: str, models: list[str], count: int, in_flight: int) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        command = {"url": url, "secret": secret, "models": models, "count": count, "in_flight": in_flight}
        self._process.stdin.write(json.dumps({**command, "seed": next(self._seeds)}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load generator ended")
        return json.loads(line)


@asynccontextmanager
async def child(*arguments: str, log: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, limit=1 << 20
        )
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text()[-2000:])
        raise
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def empty_handler() -> AsyncGenerator[str]:
    """The URL of an aiohttp server whose handler does nothing."""

    async def nothing(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/", nothing)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


def worker_settings(directory: Path, server: NatsServer, model: Path) -> Path:
    settings = {
        "name": WORKER,
        "run": server.names.run,
        "url": server.worker_url,
        "key_file": str(directory / "nats" / f"{WORKER}.seed"),
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "engine": "null",
        "slots": IN_FLIGHT,
        "prefetch": 0,
        "state_dir": str(directory / WORKER),
        "null": {"tokens": COMPLETION},
    }
    file = directory / "worker.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
    return file


async def benchmark(directory: Path, rounds: int) -> None:
    model = directory / "model"
    script = [sys.executable, __file__]
    async with child(*script, "--make-model", str(model), log=directory / "model.log") as making:
        await making.wait()
    server = NatsServer(directory / "nats")
    server.directory.mkdir()
    for worker in (WORKER, BARE, CALLBACKS, NATS_PY):
        server.add_worker(worker)
    with server:
        bus, bare_bus = server.coordinator_bus(), server.coordinator_bus()
        await bus.connect()
        await bare_bus.connect()
        product = Product(directory, bus, server.names, model)
        await product.streams.declare()
        for worker in (BARE, CALLBACKS, NATS_PY):
            await product.streams.declare_lane(worker, IN_FLIGHT)
        await product.put_adapter(directory / "adapter")
        worker = [str(Path(sys.executable).parent / "aether-worker"), "run"]
        bare = [*script, "--bare-worker", str(server.directory), server.worker_url]
        async with (
            product.serving(),
            child(*worker, str(worker_settings(directory, server, model)), log=directory / "worker.log") as w1,
            child(*bare, BARE, log=directory / "bare.log") as tasks,
            child(*bare, CALLBACKS, log=directory / "callbacks.log") as callbacks,
            child(*bare, NATS_PY, log=directory / "nats-py.log") as nats_py,
            child(*script, "--load", log=directory / "load.log") as load,
            empty_handler() as empty,
        ):
            for process in (tasks, callbacks, nats_py):
                assert process.stdout is not None
                await process.stdout.readline()
            async with asyncio.timeout(60):
                while not any(product.adapter in worker.adapters for worker in product.fleet.workers.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            freeze_heap()
            workers = [process.pid for process in (w1, tasks, callbacks, nats_py)]
            processes = {"coordinator": [os.getpid()], "worker": workers, "nats-server": [server.pid]}
            await measure(product, bare_bus, LoadGenerator(load), empty, rounds, Processor(processes))
        await bare_bus.close()
        await bus.close()


class Processor:
    """Processor time by process in the loaded part of a round."""

    def __init__(self, processes: dict[str, list[int]]) -> None:
        self._processes = processes

    def read(self) -> dict[str, float]:
        """Seconds so far."""
        return {name: sum(map(processor_s, pids)) for name, pids in self._processes.items()}

    async def of(self, jobs: int, loaded: Awaitable[dict[str, float]]) -> dict[str, float]:
        """The figures of a run of `jobs`, and microseconds per job by process."""
        before = self.read()
        figures = await loaded
        return {**figures, **{name: (now - before[name]) / jobs * 1e6 for name, now in self.read().items()}}


def processor_s(pid: int) -> float:
    """User and system time of a process, from Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    product: Product, bus: Bus, load: LoadGenerator, empty: str, rounds: int, processor: Processor
) -> None:
    url, secret = f"http://127.0.0.1:{product.gateway.port}/inference/v1/generate", product.gateway.secret
    bare, callbacks, nats_py = (loop(bus, product.names) for loop in (Bare, Callbacks, NatsPy))

    async def through_the_gateway() -> dict[str, float]:
        async with product.taking_replies(), product.episodes(IN_FLIGHT) as models:
            unloaded = await load.send(url, secret, models, UNLOADED, 1)
            loaded = await processor.of(TURNS, load.send(url, secret, models, TURNS, IN_FLIGHT))
            return figures_of(unloaded, loaded)

    async def with_tasks() -> dict[str, float]:
        unloaded = await bare.run(UNLOADED, 1)
        return figures_of(unloaded, await processor.of(BARE_JOBS, bare.run(BARE_JOBS, IN_FLIGHT)))

    async def with_callbacks() -> dict[str, float]:
        unloaded = await callbacks.run(UNLOADED, 1)
        return figures_of(unloaded, await processor.of(BARE_JOBS, callbacks.run(BARE_JOBS, IN_FLIGHT)))

    async def as_documented() -> dict[str, float]:
        unloaded = await nats_py.run(UNLOADED, 1)
        return figures_of(unloaded, await processor.of(NATS_PY_JOBS, nats_py.run(NATS_PY_JOBS, IN_FLIGHT)))

    async def over_http() -> dict[str, float]:
        unloaded = await load.send(empty, "", ["none"], UNLOADED, 1)
        loaded = await processor.of(BARE_JOBS, load.send(empty, "", ["none"], BARE_JOBS, IN_FLIGHT))
        return figures_of(unloaded, loaded)

    for side in (through_the_gateway, with_tasks):
        await side()
    rounds_of = await interleaved(
        rounds,
        gateway=through_the_gateway,
        bare=with_tasks,
        callbacks=with_callbacks,
        http=over_http,
        nats_py=as_documented,
    )
    medians = {
        side: {figure: median_of_finite(values, figure) for figure in values[0]} for side, values in rounds_of.items()
    }
    report(medians, rounds_of, rounds, product.counters.replies_duplicate)


def figures_of(unloaded: dict[str, float], loaded: dict[str, float]) -> dict[str, float]:
    return {**loaded, "unloaded_ms": unloaded["p50_ms"]}


def median_of_finite(rounds: list[dict[str, float]], figure: str) -> float:
    finite = [values for values in rounds if math.isfinite(values[figure])]
    return median(finite, figure) if finite else math.nan


def report(
    medians: dict[str, dict[str, float]], rounds_of: dict[str, list[dict[str, float]]], rounds: int, duplicate: int
) -> None:
    labels = {
        "gateway": "gateway → queue → worker",
        "bare": "lean loop, a task per job",
        "callbacks": "lean loop, callbacks only",
        "http": "empty HTTP handler",
        "nats_py": "bare loop, as documented",
    }
    print(f"{IN_FLIGHT} in flight, {4 * PROMPT_TOKENS} B prompts, medians of {rounds} rounds")
    print_table(
        ("", "per s", "p50 ms", "p50 ms, one in flight", "per s by round"),
        [
            (
                labels[side],
                f"{values['per_s']:.0f}",
                f"{values['p50_ms']:.1f}",
                f"{values['unloaded_ms']:.2f}",
                " ".join(f"{one['per_s']:.0f}" for one in rounds_of[side]),
            )
            for side, values in medians.items()
        ],
    )
    processes = ("coordinator", "worker", "nats-server", "load generator")
    processor_us = {
        side: {name: round(values.get(name, 0.0)) for name in processes} for side, values in medians.items()
    }
    print("processor time per job, µs")
    print_table(
        ("", *processes, "total"),
        [(labels[side], *used.values(), sum(used.values())) for side, used in processor_us.items()],
    )
    gateway, bare, callbacks, http, nats_py = (medians[side] for side in labels)
    ratio = gateway["per_s"] / nats_py["per_s"]
    ratio_lean = gateway["per_s"] / bare["per_s"]
    limit_ms = LATENCY_GOAL * bare["unloaded_ms"] + http["unloaded_ms"]
    print(
        f"throughput: {ratio:.2f} of the documented loop (goal {GOAL}), {ratio_lean:.2f} of the lean one, "
        f"{gateway['per_s'] / callbacks['per_s']:.2f} of the lean one with callbacks only"
    )
    print(f"one in flight: {gateway['unloaded_ms']:.2f} ms (goal {limit_ms:.2f} ms: {LATENCY_GOAL:.0f} × bare + HTTP)")
    finish(
        "queue",
        turns_per_s=round(gateway["per_s"], 1),
        lean_jobs_per_s=round(bare["per_s"], 1),
        callbacks_jobs_per_s=round(callbacks["per_s"], 1),
        http_requests_per_s=round(http["per_s"], 1),
        bare_jobs_per_s=round(nats_py["per_s"], 1) if math.isfinite(ratio) else None,
        ratio_lean=round(ratio_lean, 4),
        processor_us=processor_us,
        unloaded_ms=round(gateway["unloaded_ms"], 3),
        unloaded_lean_ms=round(bare["unloaded_ms"], 3),
        unloaded_callbacks_ms=round(callbacks["unloaded_ms"], 3),
        unloaded_http_ms=round(http["unloaded_ms"], 3),
        unloaded_goal_ms=round(limit_ms, 3),
        rounds=rounds,
        replies_duplicate=duplicate,
        ratio=ratio if math.isfinite(ratio) else 0.0,
        goal=GOAL,
        ok=ratio >= GOAL and gateway["unloaded_ms"] <= limit_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare-worker", nargs=3, metavar=("DIRECTORY", "URL", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--make-model", type=Path, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.load:
        asyncio.run(generate_load())
    elif options.bare_worker:
        directory, url, name = options.bare_worker
        asyncio.run(bare_worker(name, Path(directory), url))
    elif options.make_model:
        # In a process of its own: what torch and transformers leave on the heap does not belong to the coordinator.
        from tiny_model import make_tiny_model

        make_tiny_model(options.make_model)
    else:
        with tempfile.TemporaryDirectory(prefix="aether-bench-") as directory:
            asyncio.run(benchmark(Path(directory), options.rounds))


if __name__ == "__main__":
    main()
