"""A start whose embedded nats-server is killed in the middle of it, on real processes."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from aether_common.bus import Bus, read_seed
from aether_common.errors import RunDirectoryError
from aether_common.names import Names
from aether_coordinator.embedded import EmbeddedServer
from aether_coordinator.ownership import Ownership
from aether_coordinator.settings import ServerSettings
from aether_coordinator.streams import Streams
from tiny_run import TinyRun


@pytest.fixture
def server(tmp_path: Path, tiny_model: Path) -> EmbeddedServer:
    TinyRun(tmp_path, tiny_model)
    server = EmbeddedServer(ServerSettings.load(tmp_path / "server.toml"))
    server.prepare()
    return server


async def kill_each(pid_file: Path, kills: int) -> list[int]:
    """kill -9 the first servers as soon as their pid is told."""
    killed: list[int] = []
    while len(killed) < kills:
        with contextlib.suppress(OSError, ValueError):
            pid = int(pid_file.read_text())
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        await asyncio.sleep(0)
    return killed


async def test_a_server_killed_while_it_starts_is_started_again(server: EmbeddedServer) -> None:
    killing = asyncio.create_task(kill_each(server.directory / "nats-server.pid", 2))
    try:
        await server.start()
        assert killing.done()
        assert int((server.directory / "nats-server.pid").read_text()) not in killing.result()
    finally:
        killing.cancel()
        await server.stop()


async def test_a_claim_is_repeated_after_a_failure_and_refuses_others_only(server: EmbeddedServer) -> None:
    names = Names("tiny")
    await server.start()
    buses = [Bus(server.url, read_seed(server.key_file), "_INBOX", f"c{number}") for number in range(2)]
    try:
        ownerships: list[Ownership] = []
        for bus in buses:
            await bus.connect()
            streams = Streams(bus, names, "0" * 32, max_age_s=60, lease_s=30, storage=256 << 20)
            await streams.declare()
            ownerships.append(Ownership(bus, names, streams, "0" * 32))
        await ownerships[0].claim()
        await ownerships[0].claim()
        with pytest.raises(RunDirectoryError, match=f"another coordinator of run 'tiny' \\(pid {os.getpid()}\\)"):
            await ownerships[1].claim()
    finally:
        for bus in buses:
            await bus.close()
        await server.stop()
