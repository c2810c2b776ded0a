"""What the coordinator finds in its streams after a restart or a full disk, on a real nats-server."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aether_common.bus import Bus
from aether_coordinator.streams import REPLIES_CONSUMER, Streams
from chaos.faults import BALLAST, fill_disk
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
