"""When reconciliation fails: the embedded server is restarted for what a restart cures, and for nothing else."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from aether_common.bus import Bus, read_seed
from aether_common.errors import BusError
from aether_common.names import Names
from aether_coordinator import embedded as embedded_module
from aether_coordinator import streams as streams_module
from aether_coordinator.embedded import EmbeddedServer
from aether_coordinator.reconciliation import Reconciliation
from aether_coordinator.streams import Streams

AWAY_S = 2.0
"""How long the server stays away, and how long a request to it is waited for: what is asked meanwhile fails."""


type Attempt = Callable[[int, str], None]


class OfStreams(Reconciliation):
    """Declares the streams alone; `attempt` is told which attempt it is, before and after."""

    def __init__(self, bus: Bus, server: EmbeddedServer, streams: Streams, attempt: Attempt) -> None:
        rest: Any = None
        super().__init__(bus, server, streams, rest, rest, rest, rest, rest, rest)
        self._attempt = attempt
        self._number = 0

    async def _reconcile(self) -> None:
        self._number += 1
        self._attempt(self._number, "begins")
        await self._streams.declare()
        self._attempt(self._number, "declared")


class World:
    def __init__(self, server: EmbeddedServer, bus: Bus, streams: Streams) -> None:
        self.server = server
        self.bus = bus
        self.streams = streams
        self.restarts = 0
        self.kill = server.restart

    def restart(self) -> None:
        self.restarts += 1
        self.kill()

    def lose_the_store(self) -> None:
        shutil.rmtree(self.server.directory / "jetstream")

    async def reconciled(self, attempt: Attempt) -> None:
        reconciliation = OfStreams(self.bus, self.server, self.streams, attempt)
        parts = [asyncio.create_task(part) for part in (self.server.supervise(), reconciliation.run())]
        try:
            async with asyncio.timeout(40):
                await reconciliation.done.wait()
            assert await self.server.ailment(self.streams.streams) == ""
            assert await self.streams.healthy()
        finally:
            for part in parts:
                part.cancel()
                with suppress(asyncio.CancelledError):
                    await part


@pytest.fixture
async def world(embedded: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(embedded_module, "RESTART_S", (AWAY_S,) * 5)
    monkeypatch.setattr(streams_module, "API_S", AWAY_S)
    await embedded.start()
    bus = Bus(embedded.url, read_seed(embedded.key_file), "_INBOX", "coordinator")
    try:
        await bus.connect()
        streams = Streams(bus, Names("tiny"), "0" * 32, max_age_s=60, lease_s=30, storage=256 << 20)
        world = World(embedded, bus, streams)
        monkeypatch.setattr(embedded, "restart", world.restart)
        yield world
    finally:
        await bus.close()
        await embedded.stop()


async def test_a_server_that_lost_its_store_in_the_middle_gets_its_try(world: World) -> None:
    """What fails was asked of the server that died: the next one has no streams yet, and is not to blame for it."""

    def attempt(number: int, moment: str) -> None:
        if (number, moment) == (1, "begins"):
            world.kill()
            world.lose_the_store()

    await world.reconciled(attempt)
    assert world.restarts == 0


async def test_a_store_deleted_under_a_server_in_the_middle(world: World) -> None:
    """What the server has and cannot find is put right by a restart alone, however often reconciliation fails."""

    def attempt(number: int, moment: str) -> None:
        if (number, moment) == (1, "declared"):
            world.lose_the_store()
            raise BusError("an adapter cannot be put into the store")

    await world.reconciled(attempt)
    assert world.restarts == 1


async def test_a_failure_that_is_not_the_servers(world: World) -> None:
    def attempt(number: int, moment: str) -> None:
        if number <= 2 and moment == ("begins", "declared")[number - 1]:
            raise BusError("not now")

    await world.reconciled(attempt)
    assert world.restarts == 0
