"""A start whose embedded nats-server is killed in the middle of it, on real processes."""

import os
import signal

import pytest
from aether_common.bus import Bus, read_seed
from aether_common.errors import RunDirectoryError
from aether_common.names import Names
from aether_coordinator.embedded import EmbeddedServer
from aether_coordinator.ownership import Ownership
from aether_coordinator.streams import Streams


async def test_a_server_killed_while_it_starts_is_started_again(
    embedded: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = embedded.directory / "nats-server.pid"
    tell = embedded._write_pid
    killed: list[int] = []

    def tell_and_die() -> None:
        """kill -9 the first two servers as soon as their pid is told."""
        tell()
        if len(killed) < 2:
            killed.append(int(pid_file.read_text()))
            os.kill(killed[-1], signal.SIGKILL)

    monkeypatch.setattr(embedded, "_write_pid", tell_and_die)
    try:
        await embedded.start()
        assert len(killed) == 2
        assert int(pid_file.read_text()) not in killed
    finally:
        await embedded.stop()


async def test_a_claim_is_repeated_after_a_failure_and_refuses_others_only(embedded: EmbeddedServer) -> None:
    names = Names("tiny")
    await embedded.start()
    buses = [Bus(embedded.url, read_seed(embedded.key_file), "_INBOX", f"c{number}") for number in range(2)]
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
        await embedded.stop()
