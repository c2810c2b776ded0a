"""The coordinator's side of a benchmark: its own parts around the queue, a server, and processes beside it."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

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
from aether_coordinator.records import EpisodeRecord, GroupRecord, episode_id
from aether_coordinator.replies import ReplyIntake
from aether_coordinator.settings import TrainSource
from aether_coordinator.status import Counters
from aether_coordinator.streams import Streams
from bench._bench import cancel
from nats.js.api import ObjectMeta
from nats_server import NatsServer

COMPLETION = [5, 6, 7, 2]
VOCABULARY = 259
LEASE_S = 30.0


@asynccontextmanager
async def coordinator(directory: Path, model: Path, workers: list[str]) -> AsyncGenerator[tuple[NatsServer, "Product"]]:
    """A server with a key for each worker, and all parts at work on it."""
    server = NatsServer(directory / "nats")
    server.directory.mkdir()
    for worker in workers:
        server.add_worker(worker)
    async with AsyncExitStack() as stack:
        stack.enter_context(server)
        bus = server.coordinator_bus()
        await bus.connect()
        stack.push_async_callback(bus.close)
        product = Product(directory, bus, server.names, model)
        await product.streams.declare()
        await product.put_adapter(directory / "adapter")
        await stack.enter_async_context(product.serving())
        await stack.enter_async_context(product.taking_replies())
        yield server, product


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
