"""What the coordinator finds in its streams after a restart or a full disk, on a real nats-server."""

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aether_common.bus import Bus
from aether_common.errors import BusError, ConfigError
from aether_coordinator.streams import REPLIES_CONSUMER, Streams
from chaos.faults import BALLAST, fill_disk
from loguru import logger
from nats.errors import Error
from nats_server import NatsServer


async def streams_of(bus: Bus, server: NatsServer) -> Streams:
    streams = Streams(bus, server.names, "0" * 32, max_age_s=60, lease_s=30, storage=256 << 20)
    await streams.declare()
    return streams


async def test_only_replies_that_are_still_there_are_waited_for(tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        bus = server.coordinator_bus()
        await bus.connect()
        try:
            streams = await streams_of(bus, server)
            assert await streams.last_reply() == 0
            for number in range(3):
                await streams.js.publish(server.names.reply("w1", f"j{number}"), b"reply")
            assert await streams.last_reply() == 3
            taken = await streams.js.pull_subscribe_bind(REPLIES_CONSUMER, server.names.replies)
            first, second, third = await taken.fetch(3, timeout=5)
            await first.ack_sync()
            await third.ack_sync()
            assert await streams.last_reply() == 2
            assert second.metadata.sequence.stream == 2

            # The process that took the second one is gone: its successor gets it at once, and only that one.
            await streams.deliver_again()
            taken = await streams.js.pull_subscribe_bind(REPLIES_CONSUMER, server.names.replies)
            (again,) = await taken.fetch(3, timeout=5)
            assert again.metadata.sequence.stream == 2
            await again.ack_sync()
            assert await streams.last_reply() == 0
        finally:
            await bus.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory of 16 MiB, where this machine lets us make one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


async def test_streams_are_healthy_only_if_they_are_there_and_can_be_written(small_disk: Path) -> None:
    with NatsServer(small_disk) as server:
        bus = server.coordinator_bus()
        await bus.connect()
        try:
            streams = await streams_of(bus, server)
            await streams.policies.put("0", b"manifest")
            await streams.artifacts.put("digest", b"content")
            await streams.js.publish(server.names.job("w1", "train", 0, "j1"), b"job")
            assert await streams.healthy()
            # Looking changes nothing.
            assert await streams.pending_jobs() == {"j1": server.names.job("w1", "train", 0, "j1")}
            assert (await streams.policies.get("0")).value == b"manifest"
            assert (await streams.artifacts.get("digest")).data == b"content"

            fill_disk(small_disk / BALLAST)
            with pytest.raises((Error, TimeoutError)):
                await streams.js.publish(server.names.reply("w1", "j1"), b"x" * 8192, timeout=1)
            (small_disk / BALLAST).unlink()
            # There is space again, and the stream refuses nevertheless: until a restart.
            assert not await streams.healthy()
            again = asyncio.Event()
            bus.on_reconnect(again.set)
            server.restart()
            await asyncio.wait_for(again.wait(), 20)
            assert await streams.healthy()

            await streams.js.delete_stream(server.names.jobs)
            assert not await streams.healthy()
        finally:
            await bus.close()


@asynccontextmanager
async def declared(tmp_path: Path, **server: Any) -> AsyncGenerator[tuple[NatsServer, Bus, Streams]]:
    with NatsServer(tmp_path, **server) as running:
        bus = running.coordinator_bus()
        await bus.connect()
        try:
            yield running, bus, await streams_of(bus, running)
        finally:
            await bus.close()


def again(server: NatsServer, bus: Bus, **changes: Any) -> Streams:
    """As the next process declares them."""
    values: dict[str, Any] = {"max_age_s": 60, "lease_s": 30, "storage": 256 << 20}
    return Streams(bus, server.names, "0" * 32, **(values | changes))


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(sink)


async def api(bus: Bus, subject: str, body: Any = None) -> Any:
    payload = b"" if body is None else json.dumps(body).encode()
    answer = json.loads((await bus.client.request(f"$JS.API.{subject}", payload, timeout=5)).data)
    assert "error" not in answer, answer
    return answer


async def configurations(bus: Bus, streams: Streams) -> dict[str, Any]:
    return {name: (await api(bus, f"STREAM.INFO.{name}"))["config"] for name in streams.streams}


async def test_declaring_again_changes_nothing(tmp_path: Path, warnings: list[str]) -> None:
    async with declared(tmp_path) as (server, bus, streams):
        await streams.declare_lane("w1", 4)
        before = await configurations(bus, streams)
        lane = await api(bus, f"CONSUMER.INFO.{server.names.jobs}.w-w1")
        updates: list[str] = []

        async def count(message: Any) -> None:
            updates.append(message.subject)

        await bus.client.subscribe("$JS.API.*.UPDATE.>", cb=count)
        await bus.client.subscribe("$JS.API.*.CREATE.>", cb=count)
        following = again(server, bus)
        await following.declare()
        await following.declare_lane("w1", 4)
        await bus.client.flush()
        assert (updates, warnings) == ([], [])
        assert await configurations(bus, streams) == before
        after = await api(bus, f"CONSUMER.INFO.{server.names.jobs}.w-w1")
        assert after | {"ts": ""} == lane | {"ts": ""}
        # A client finds a bucket and an object store in what was declared.
        # The count would have seen a change.
        await again(server, bus, max_age_s=61).declare()
        assert updates == [f"$JS.API.STREAM.UPDATE.{name}" for name in streams.streams[:2]]
        assert (await (await bus.client.jetstream().key_value(server.names.policies)).status()).history == 1
        await (await bus.client.jetstream().object_store(server.names.artifacts)).put("x", b"y")


@pytest.mark.parametrize(
    ("stream", "field", "value"),
    [
        (0, "discard", "old"),
        (0, "subjects", ["aether.test.jobs.w1.>"]),
        (0, "max_msgs", 7),
        (0, "max_msg_size", 100),
        (1, "discard", "old"),
        (1, "subjects", ["aether.test.replies.*.*", "aether.test.more"]),
        (1, "max_bytes", 1024),
        (1, "max_age", 10**12),
        (1, "allow_direct", True),
        (1, "description", "mine"),
        (2, "max_msgs_per_subject", 5),
        (2, "max_age", 10**12),
        (2, "discard", "old"),
        (2, "max_bytes", 1024),
        (3, "discard", "old"),
        (3, "max_bytes", 1 << 40),
        (3, "max_age", 10**12),
        (3, "allow_rollup_hdrs", False),
        (3, "republish", {"src": ">", "dest": "copy.>"}),
    ],
)
async def test_what_somebody_changed_is_corrected_and_said(
    tmp_path: Path, warnings: list[str], stream: int, field: str, value: Any
) -> None:
    async with declared(tmp_path, max_storage_mib=1 << 21) as (server, bus, streams):
        name = streams.streams[stream]
        before = (await configurations(bus, streams))[name]
        await api(bus, f"STREAM.UPDATE.{name}", before | {field: value})
        changed = (await configurations(bus, streams))[name]
        assert changed != before
        await again(server, bus).declare()
        assert (await configurations(bus, streams))[name] == before
        (line,) = warnings
        assert line.startswith(f"stream {name}: {field} was {changed[field]!r}, corrected to ")
        if before.get(field) not in (-1, False):
            assert line.endswith(repr(before.get(field)))


async def test_the_lane_of_a_worker_is_corrected(tmp_path: Path, warnings: list[str]) -> None:
    async with declared(tmp_path) as (server, bus, streams):
        jobs = server.names.jobs
        await streams.declare_lane("w1", 4)
        before = (await api(bus, f"CONSUMER.INFO.{jobs}.w-w1"))["config"]
        stolen = before | {"filter_subject": "aether.test.jobs.w2.>"}
        await api(bus, f"CONSUMER.DURABLE.CREATE.{jobs}.w-w1", {"stream_name": jobs, "config": stolen})
        await again(server, bus).declare_lane("w1", 4)
        assert (await api(bus, f"CONSUMER.INFO.{jobs}.w-w1"))["config"] == before
        assert warnings == [
            f"consumer w-w1 of {jobs}: filter_subject was 'aether.test.jobs.w2.>', corrected to 'aether.test.jobs.w1.>'"
        ]
        # What cannot be changed in place is made anew.
        warnings.clear()
        await api(bus, f"CONSUMER.DELETE.{jobs}.w-w1")
        other = before | {"max_waiting": 3}
        await api(bus, f"CONSUMER.DURABLE.CREATE.{jobs}.w-w1", {"stream_name": jobs, "config": other})
        await again(server, bus).declare_lane("w1", 4)
        assert (await api(bus, f"CONSUMER.INFO.{jobs}.w-w1"))["config"] == before
        assert warnings == [f"consumer w-w1 of {jobs}: max_waiting was 3, corrected to 16"]
        # A worker that comes back with other slots is nothing to warn of.
        warnings.clear()
        await again(server, bus).declare_lane("w1", 9)
        wider = before["max_ack_pending"] // 4 * 9
        assert (await api(bus, f"CONSUMER.INFO.{jobs}.w-w1"))["config"] == before | {"max_ack_pending": wider}
        assert warnings == []


async def test_the_choices_of_an_operator_stay(tmp_path: Path, warnings: list[str]) -> None:
    async with declared(tmp_path) as (server, bus, streams):
        for name in streams.streams:
            config = (await configurations(bus, streams))[name]
            await api(bus, f"STREAM.UPDATE.{name}", config | {"compression": "s2"})
        before = await configurations(bus, streams)
        assert {config["compression"] for config in before.values()} == {"s2"}
        await again(server, bus, max_age_s=120).declare()
        after = await configurations(bus, streams)
        for name in streams.streams[:2]:
            before[name] |= {"max_age": 120 * 10**9, "duplicate_window": 120 * 10**9}
        assert after == before
        assert len(warnings) == 2


async def test_limits_shrink_only_if_what_is_stored_fits(tmp_path: Path, warnings: list[str]) -> None:
    async with declared(tmp_path) as (server, bus, streams):
        before = await configurations(bus, streams)
        job = server.names.job("w1", "train", 0, "j1")
        for _ in range(3):
            await streams.js.publish(job, bytes(1 << 20))
        # An eighth of 16 MiB is less than the three that are stored.
        with pytest.raises(ConfigError) as refused:
            await again(server, bus, storage=16 << 20).declare()
        for word in ("nats.max_storage_mib", "3.0 MiB", "32.0 MiB", "2.0 MiB", server.names.jobs, "raise it"):
            assert word in str(refused.value)
        assert (await configurations(bus, streams))[server.names.jobs] == before[server.names.jobs]
        assert warnings == []

        await again(server, bus, storage=64 << 20).declare()
        assert (await configurations(bus, streams))[server.names.jobs]["max_bytes"] == 8 << 20
        assert f"stream {server.names.jobs}: max_bytes was {32 << 20}, corrected to {8 << 20}" in warnings
        assert (await streams.js.stream_info(server.names.jobs)).state.messages == 3

        await asyncio.sleep(1.1)
        with pytest.raises(ConfigError, match=r"episodes\.turn_deadline_s.* 1 s old .*was 60 s.*for 1 s"):
            await again(server, bus, storage=64 << 20, max_age_s=1).declare()
        assert (await streams.js.stream_info(server.names.jobs)).state.messages == 3
        await again(server, bus, storage=64 << 20, max_age_s=30).declare()

        await streams.artifacts.put("digest", bytes(3 << 20))
        with pytest.raises(ConfigError, match=r"nats\.max_storage_mib.*OBJ_aether-test-artifacts"):
            await streams.purge_subject(job)
            await again(server, bus, storage=4 << 20).declare()
        assert (await streams.artifacts.get("digest")).data == bytes(3 << 20)


async def test_a_server_with_less_storage_than_its_streams_is_explained(tmp_path: Path) -> None:
    async with declared(tmp_path) as (server, bus, streams):
        configuration = server.directory / "nats-server.conf"
        configuration.write_text(configuration.read_text().replace("max_file: 512MB", "max_file: 64MB"))
        await streams.js.publish(server.names.job("w1", "train", 0, "j1"), b"job")
        connected = asyncio.Event()
        bus.on_reconnect(connected.set)
        server.restart()
        await asyncio.wait_for(connected.wait(), 20)
        with pytest.raises(ConfigError, match=r"nats\.max_storage_mib = 64"):
            await again(server, bus, storage=64 << 20).declare()
        assert (await streams.js.stream_info(server.names.jobs)).state.messages == 1


@pytest.mark.parametrize("stream", range(4))
async def test_no_stream_of_another_run_is_touched(tmp_path: Path, stream: int) -> None:
    async with declared(tmp_path) as (server, bus, streams):
        before = await configurations(bus, streams)
        name = streams.streams[stream]
        for other in set(streams.streams) - {name}:
            await api(bus, f"STREAM.DELETE.{other}")
        stranger = Streams(bus, server.names, "1" * 32, max_age_s=9, lease_s=30, storage=64 << 20)
        with pytest.raises(BusError, match=f"{name} belongs to another run"):
            await stranger.declare()
        assert (await api(bus, f"STREAM.INFO.{name}"))["config"] == before[name]
