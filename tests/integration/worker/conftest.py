"""A real nats-server, and a double of the coordinator that answers the fleet requests only."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aether_common.arrays import pack_tokens
from aether_common.bus import Bus
from aether_common.digests import file_list_bytes, list_files, sha256_bytes
from aether_common.names import Names
from aether_common.wire import (
    DesiredState,
    Heartbeat,
    Job,
    PolicyRef,
    Poll,
    Registration,
    RegistrationAnswer,
    Reply,
    Sampling,
)
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StreamConfig
from nats_server import NatsServer

WORKER = "w1"
LEASE_S = 2.0


class Coordinator:
    """Streams, buckets and consumers as the coordinator makes them; answers hb, reg and poll."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self.bus = bus
        self.names = names
        self.js = bus.client.jetstream(timeout=2)
        self.state = DesiredState(revision=1)
        self.news = asyncio.Event()
        self.registrations: list[Registration] = []
        self.heartbeats: list[Heartbeat] = []
        self.polls = 0
        self.refuse = ""
        self._numbers = itertools.count()

    async def start(self, window: int, replies_bytes: int = 64 << 20) -> None:
        await self.js.add_stream(
            StreamConfig(
                name=self.names.jobs,
                subjects=[self.names.all_jobs],
                retention=RetentionPolicy.WORK_QUEUE,
                discard=DiscardPolicy.NEW,
            )
        )
        await self.js.add_stream(
            StreamConfig(
                name=self.names.replies,
                subjects=[self.names.all_replies],
                retention=RetentionPolicy.WORK_QUEUE,
                discard=DiscardPolicy.NEW,
                max_bytes=replies_bytes,
            )
        )
        self.store = await self.js.create_object_store(self.names.artifacts)
        await self.js.add_consumer(
            self.names.jobs,
            ConsumerConfig(
                durable_name=self.names.consumer(WORKER),
                filter_subject=self.names.lane(WORKER),
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=LEASE_S,
                max_ack_pending=window,
                max_deliver=-1,
            ),
        )
        await self.js.add_consumer(
            self.names.replies, ConsumerConfig(durable_name="coordinator", ack_policy=AckPolicy.EXPLICIT)
        )
        self.replies = await self.js.pull_subscribe_bind("coordinator", self.names.replies)
        for kind, answer in (("reg", self._register), ("hb", self._heartbeat), ("poll", self._poll)):
            await self.bus.client.subscribe(self.names.fleet(kind), cb=answer)

    async def _register(self, message: Msg) -> None:
        self.registrations.append(Registration.decode(message.data))
        answer = RegistrationAnswer(
            accepted=not self.refuse, reason=self.refuse, heartbeat_s=0.2, lease_s=LEASE_S, state=self.state
        )
        await message.respond(answer.encode())

    async def _heartbeat(self, message: Msg) -> None:
        beat = Heartbeat.decode(message.data)
        self.heartbeats.append(beat)
        known = any(beat.incarnation == registration.incarnation for registration in self.registrations)
        await message.respond((self.state if known else DesiredState(revision=0, unknown=True)).encode())

    async def _poll(self, message: Msg) -> None:
        self.polls += 1
        poll = Poll.decode(message.data)

        async def hold() -> None:
            while self.state.revision <= poll.revision:
                await self.news.wait()
            await message.respond(self.state.encode())

        self._held = asyncio.create_task(hold())

    def want(self, **changes: Any) -> None:
        self.state = self.state.model_copy(update={"revision": self.state.revision + 1, **changes})
        self.news.set()
        self.news = asyncio.Event()

    async def put(self, digest: str, data: bytes, chunk: int | None = None) -> None:
        """Put bytes under a name that claims to be their digest."""
        from nats.js.api import ObjectMeta, ObjectMetaOptions

        options = ObjectMetaOptions(max_chunk_size=chunk) if chunk else None
        await self.store.put(digest, data, meta=ObjectMeta(name=digest, options=options))

    async def put_adapter(self, directory: Path, version: int = 0) -> PolicyRef:
        """Put an adapter's files and their list; returns the policy that names it."""
        files = list_files(directory)
        for file in files:
            await self.put(file.sha256, (directory / file.name).read_bytes())
        listing = file_list_bytes(files)
        await self.put(sha256_bytes(listing), listing)
        return PolicyRef(version=version, adapter=sha256_bytes(listing))

    def job(self, policy: PolicyRef, **changes: Any) -> Job:
        number = next(self._numbers)
        fields: dict[str, Any] = {
            "job": f"job-{number}",
            "dispatch": 0,
            "key": f"{number:064x}",
            "kind": "train",
            "version": policy.version,
            "adapter": policy.adapter,
            "prompt": pack_tokens([3, 4, 5]),
            "sampling": Sampling(max_tokens=8),
            "seed": number,
            "session": "s",
            "remaining_ms": 20_000,
        }
        return Job(**(fields | changes))

    async def publish(self, job: Job) -> int:
        subject = self.names.job(WORKER, job.kind, job.version, job.job)
        return (await self.js.publish(subject, job.encode())).seq

    async def next_replies(self, count: int, timeout: float = 10) -> list[Reply]:
        """The next replies, acknowledged."""
        replies: list[Reply] = []
        async with asyncio.timeout(timeout):
            while len(replies) < count:
                for message in await self.replies.fetch(count - len(replies), timeout=timeout):
                    assert message.subject == self.names.reply(WORKER, Reply.decode(message.data).job)
                    replies.append(Reply.decode(message.data))
                    await message.ack_sync()
        return replies

    async def pending(self) -> tuple[int, int]:
        """Jobs in the stream, replies in the stream."""
        jobs = await self.js.stream_info(self.names.jobs)
        replies = await self.js.stream_info(self.names.replies)
        return jobs.state.messages, replies.state.messages


async def until(condition: Callable[[], bool], timeout: float = 10) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - the condition is any, for tests
            await asyncio.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        server.add_worker(WORKER)
        yield server


@pytest.fixture
async def coordinator(server: NatsServer) -> AsyncIterator[Coordinator]:
    bus = server.coordinator_bus()
    await bus.connect()
    yield Coordinator(bus, server.names)
    await bus.close()


@pytest.fixture
async def worker_bus(server: NatsServer) -> AsyncIterator[Bus]:
    bus = server.worker_bus(WORKER)
    await bus.connect()
    yield bus
    await bus.close()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Files with the names of an adapter; what is in them does not matter to the store."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (directory / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return directory
