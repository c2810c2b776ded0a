"""The coordinator's own parts on a real nats-server and LMDB, and a worker that a test leads by the hand."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aether_common.arrays import pack_floats, pack_tokens
from aether_common.bus import Bus
from aether_common.identity import ModelIdentity
from aether_common.names import Names
from aether_common.pull import PullLoop
from aether_common.wire import DesiredState, Heartbeat, Job, Registration, RegistrationAnswer, Reply, ReplyKind
from aether_coordinator.dispatch import Dispatcher, Expected
from aether_coordinator.embedded import EmbeddedServer
from aether_coordinator.events import Events
from aether_coordinator.fleet import Fleet
from aether_coordinator.gateway import Gateway, OpenEpisode
from aether_coordinator.journal import Claims, TurnKey
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import DispatchRecord, EpisodeRecord, GroupRecord, TurnRecord
from aether_coordinator.replies import ReplyIntake
from aether_coordinator.settings import ServerSettings, TrainSource
from aether_coordinator.status import Counters
from aether_coordinator.streams import Streams
from nats.aio.msg import Msg
from nats_server import NatsServer
from tiny_run import TinyRun

ADAPTER = "a" * 64
STOP = 2
RUN_SEED = 0
IDENTITY = ModelIdentity(
    repository="m",
    revision="sha256:" + "0" * 64,
    weights="w",
    config="c",
    tokenizer="t",
    chat_template="x",
    vocab_size=259,
    dtype="float32",
)
TRAIN = TrainSource.model_validate(
    {"name": "s", "taskset": "aether_lowercase", "sampling": {"temperature": 0.7, "max_tokens": 12}}
)


async def until(condition: Callable[[], object], timeout: float = 15) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - the condition is any, for tests
            await asyncio.sleep(0.005)


class Coordinator:
    """Ledger, streams, dispatch, replies, fleet and gateway, composed as in `run`; no schedule, no trainer."""

    def __init__(self, server: NatsServer, root: Path) -> None:
        self.server = server
        self.root = root
        self.names: Names = server.names
        self.counters = Counters()
        self.episodes: dict[str, OpenEpisode] = {}
        self.refused: list[str] = []
        """Requests that the gateway did not let through."""
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: list[asyncio.Task[tuple[int, Any]]] = []

    async def start(
        self,
        *,
        storage: int = 256 << 20,
        lease_s: float = 5,
        fill: tuple[Write, ...] = (),
        opened: Sequence[int] = (),
    ) -> "Coordinator":
        """As after a start of the process; `fill` is written first, `opened` are running episodes."""
        self.ledger = Ledger(self.root / "state")
        self.ledger.commit_now(*fill)
        self.bus: Bus = self.server.coordinator_bus()
        await self.bus.connect()
        self.streams = Streams(self.bus, self.names, "u" * 32, max_age_s=3600, lease_s=lease_s, storage=storage)
        self.dispatcher = Dispatcher(self.bus, self.names, self.ledger, self.streams, self.counters)
        self.intake = ReplyIntake(self.bus, self.names, self.ledger, self.dispatcher, self.counters, RUN_SEED)
        self.fleet = Fleet(
            self.bus,
            self.names,
            self.streams,
            identity=IDENTITY,
            max_model_len=256,
            lease_s=lease_s,
            wanted=list,
            on_lost=self.dispatcher.lost,
            on_stalled=self.dispatcher.stalled,
            stall_s=300.0,
            mismatch=lambda _: None,
            on_room=self.dispatcher.pump,
            on_bad_message=self._bad,
            ledger=self.ledger,
            events=Events(self.root),
            run_root=self.root,
        )
        self.dispatcher.fleet = self.fleet
        self.dispatcher.expected = self._expected
        self.gateway = Gateway(
            self.ledger,
            self.dispatcher,
            self.counters,
            run=self.names.run,
            seed=RUN_SEED,
            max_model_len=256,
            turn_deadline_s=60,
            stop_token_ids=frozenset({STOP}),
            vocab_size=259,
            on_refused=self.refused.append,
        )
        self.fleet.load()
        for _, value in self.ledger.scan("dispatches"):
            self.dispatcher.adopt(DispatchRecord.decode(value))
        for index in opened:
            self.open(index)
        await self.streams.declare()
        await self.streams.deliver_again()
        ready = asyncio.Event()
        self.writer = asyncio.create_task(self.ledger.run())
        self._tasks = [
            self.writer,
            *map(
                asyncio.create_task,
                (
                    self.fleet.run(),
                    self.dispatcher.run(),
                    self.intake.run(),
                    self.gateway.serve(0, ready.set),
                ),
            ),
        ]
        await ready.wait()
        return self

    def check(self) -> None:
        """Raise what ended a part that should serve for ever."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def reconcile(self) -> None:
        await self.streams.declare()
        await self.dispatcher.reconcile(self.intake)

    async def kill(self) -> None:
        """End without a word: nothing is purged, released or answered."""
        self.dispatcher.closing = True
        self.check()
        for task in (*self._calls, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._calls, *self._tasks, return_exceptions=True)
        self._tasks = []
        await self.bus.close()
        self.ledger.close()

    def _bad(self) -> None:
        self.counters.messages_bad += 1

    def _expected(self, journal: bytes) -> Expected | None:
        try:
            key = TurnKey.parse(journal.decode())
        except ValueError:
            return None
        episode = self.episodes.get(key.episode)
        if episode is None or episode.record.attempt != key.attempt:
            return None
        return Expected(episode.group, episode.adapter)

    # ---- episodes and their calls ------------------------------------------------------------------

    def open(self, index: int = 0, *, kind: str = "train", group: int = 1, attempt: int = 0) -> OpenEpisode:
        record = EpisodeRecord(group=group, index=index, attempt=attempt)
        fields = {"id": group, "kind": kind, "source": "s", "task": 0, "version": 3, "size": 8}
        episode = OpenEpisode(
            record=record,
            group=GroupRecord.model_validate(fields),
            adapter=ADAPTER,
            source=TRAIN,
            claims=Claims(record.id, attempt),
        )
        self.episodes[record.id] = episode
        self.gateway.open(episode)
        return episode

    def close(self, episode: OpenEpisode) -> None:
        self.gateway.close(episode)
        del self.episodes[episode.record.id]

    async def call(self, episode: OpenEpisode, prompt: list[int], session: str = "") -> tuple[int, Any]:
        """One model call as the train client makes it: status and body."""
        headers = {"Authorization": f"Bearer {self.gateway.secret}"}
        if session:
            headers["X-Session-ID"] = session
        body = {"model": episode.model, "token_ids": prompt, "sampling_params": {"temperature": 0.7, "logprobs": 1}}
        url = f"http://127.0.0.1:{self.gateway.port}/inference/v1/generate"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, data=json.dumps(body), headers=headers) as response,
        ):
            return response.status, await response.json()

    def ask(self, episode: OpenEpisode, prompt: list[int], session: str = "") -> "asyncio.Task[tuple[int, Any]]":
        """A call that runs beside the test; cancelling it closes its connection."""
        call = asyncio.create_task(self.call(episode, prompt, session))
        self._calls.append(call)
        return call

    async def answer(self, call: "asyncio.Task[tuple[int, Any]]") -> list[int]:
        """The completion of a call that went well."""
        status, body = await asyncio.wait_for(call, 15)
        assert status == 200, body
        return body["choices"][0]["token_ids"]

    def journal(self) -> dict[str, TurnRecord]:
        return {key.decode(): TurnRecord.decode(value) for key, value in self.ledger.scan("journal")}

    async def pending(self) -> dict[str, str]:
        """Worker by job of everything that is on a lane."""
        return {job: subject.split(".")[3] for job, subject in (await self.streams.pending_jobs()).items()}

    async def pending_until(self, condition: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Wait until what is on the lanes satisfies `condition`."""
        async with asyncio.timeout(15):
            while not condition(pending := await self.pending()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return pending


class Worker:
    """Registers, beats, pulls its lane; jobs are answered by the test."""

    def __init__(self, server: NatsServer, name: str, slots: int = 4, prefetch: int = 0) -> None:
        self.server = server
        self.name = name
        self.slots, self.window = slots, slots + prefetch
        self.incarnation = "1"
        self.adapters: list[str] = []
        self.draining = False
        self.silent = False
        """No heartbeats: the coordinator takes it for dead after a while."""
        self.jobs: asyncio.Queue[Job] = asyncio.Queue()
        self.held: dict[str, tuple[Job, Msg]] = {}
        self.tokens: dict[str, int] = {}
        """Generated so far, by job."""
        self.state: DesiredState | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> "Worker":
        self.bus = self.server.worker_bus(self.name)
        await self.bus.connect()
        await self.register()
        self._pull = PullLoop(self.bus, self.server.names.next(self.name), self.window, self._deliver)
        self._tasks = [asyncio.create_task(self._pull.run()), asyncio.create_task(self._beat())]
        return self

    async def register(self, incarnation: str = "1") -> RegistrationAnswer:
        self.incarnation = incarnation
        request = Registration(
            worker=self.name,
            incarnation=incarnation,
            protocol_min=1,
            protocol_max=1,
            engine="none",
            slots=self.slots,
            window=self.window,
            identity=IDENTITY,
            max_model_len=256,
        )
        names = self.server.names
        message = await self.bus.request(names.fleet("reg", self.name), request.encode(), timeout_s=5)
        answer = RegistrationAnswer.decode(message.data)
        assert answer.accepted, answer.reason
        return answer

    async def beat(self) -> DesiredState:
        heartbeat = Heartbeat(
            worker=self.name,
            incarnation=self.incarnation,
            running={job: self.tokens.get(job, 0) for job in self.held},
            tokens_total=sum(self.tokens.values()),
            adapters=self.adapters,
            draining=self.draining,
            clock=time.time(),
        )
        message = await self.bus.request(self.server.names.fleet("hb", self.name), heartbeat.encode(), timeout_s=5)
        self.state = DesiredState.decode(message.data)
        return self.state

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if not self.silent:
                with suppress(Exception):  # A coordinator that is being restarted does not answer.
                    await self.beat()

    def _deliver(self, message: Msg) -> None:
        job = Job.decode(message.data)
        again = job.job in self.held
        self.held[job.job] = (job, message)
        if again:
            self._pull.release()
        else:
            self.jobs.put_nowait(job)

    async def next(self) -> Job:
        return await asyncio.wait_for(self.jobs.get(), 15)

    async def reply(self, job: Job, tokens: list[int] | None = None, **changes: Any) -> None:
        """Publish a reply, confirmed, then acknowledge the job."""
        fields: dict[str, Any] = {
            "job": job.job,
            "dispatch": job.dispatch,
            "worker": self.name,
            "incarnation": self.incarnation,
            "kind": ReplyKind.OK,
            "key": job.key,
            "seed": job.seed,
            "version": job.version,
            "adapter": job.adapter,
        }
        if tokens is not None:
            logprobs = pack_floats([-0.5] * len(tokens))
            fields |= {"tokens": pack_tokens(tokens), "logprobs": logprobs, "finish_reason": "stop"}
        reply = Reply.model_validate(fields | changes)
        await self.bus.client.request(self.server.names.reply(self.name, job.job), reply.encode(), timeout=5)
        if (held := self.held.pop(job.job, None)) is not None:
            await held[1].ack()
            self._pull.release()

    async def give_back(self, job: Job, reason: str, kind: str = "returned") -> None:
        await self.reply(job, kind=kind, reason=reason)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        for name in ("w1", "w2", "w3"):
            server.add_worker(name)
        yield server


StartCoordinator = Callable[..., Awaitable[Coordinator]]
StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
def embedded(tmp_path: Path, tiny_model: Path) -> EmbeddedServer:
    """The coordinator's own server, prepared and not started."""
    TinyRun(tmp_path, tiny_model)
    embedded = EmbeddedServer(ServerSettings.load(tmp_path / "server.toml"))
    embedded.prepare()
    return embedded


@pytest.fixture
async def start_coordinator(server: NatsServer, tmp_path: Path) -> AsyncIterator[StartCoordinator]:
    """Start a coordinator on the run directory; call it again after `kill` for a restart."""
    started: list[Coordinator] = []

    async def start(*, reconcile: bool = True, **options: Any) -> Coordinator:
        coordinator = await Coordinator(server, tmp_path / "run").start(**options)
        started.append(coordinator)
        if reconcile:
            await coordinator.reconcile()
        return coordinator

    yield start
    for coordinator in started:
        if coordinator._tasks:
            await coordinator.kill()


@pytest.fixture
async def start_worker(server: NatsServer) -> AsyncIterator[StartWorker]:
    started: list[Worker] = []

    async def start(name: str = "w1", **options: Any) -> Worker:
        worker = await Worker(server, name, **options).start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        await worker.stop()
