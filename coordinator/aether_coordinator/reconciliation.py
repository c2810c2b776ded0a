"""Keeping the bus what the state says: after a start, after every reconnect, and when it turns out to be ill.

In this order: what the run keeps in JetStream is declared, the lanes too, ownership renewed, live adapters put back;
then the replies are taken, and only what is neither pending nor answered is published again.
"""

import asyncio

import nats.errors
from aether_common.bus import Bus
from aether_common.errors import AetherError, RunDirectoryError
from loguru import logger

from aether_coordinator.dispatch import Dispatcher
from aether_coordinator.embedded import EmbeddedServer
from aether_coordinator.fleet import Fleet
from aether_coordinator.ownership import Ownership
from aether_coordinator.policies import Policies
from aether_coordinator.replies import ReplyIntake
from aether_coordinator.schedule import Schedule
from aether_coordinator.streams import Streams

HEALTH_S = 10.0
"""Between two looks at a bus that nothing is known to have happened to."""
RETRY_S = 2.0


class Reconciliation:
    """Reconciles until cancelled; `done` is set after the first time."""

    def __init__(
        self,
        bus: Bus,
        server: EmbeddedServer | None,
        streams: Streams,
        ownership: Ownership,
        policies: Policies,
        schedule: Schedule,
        fleet: Fleet,
        dispatcher: Dispatcher,
        intake: ReplyIntake,
    ) -> None:
        self._bus = bus
        self._server = server
        self._streams = streams
        self._ownership = ownership
        self._policies = policies
        self._schedule = schedule
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._intake = intake
        self.done = asyncio.Event()

    async def run(self) -> None:
        """Raises `RunDirectoryError`, which another try does not cure."""
        wanted = asyncio.Event()
        wanted.set()
        self._bus.on_reconnect(wanted.set)
        while True:
            try:
                async with asyncio.timeout(HEALTH_S):
                    await wanted.wait()
            except TimeoutError:
                if await self._bus_well():
                    continue
            # What is asked of a server that is away is lost, and its answer waited for in vain.
            await self._bus.connected.wait()
            wanted.clear()
            try:
                await self._reconcile()
                self.done.set()
            except RunDirectoryError:
                raise
            except (AetherError, nats.errors.Error, TimeoutError) as error:
                logger.warning("reconciliation failed, trying again: {}", error or type(error).__name__)
                await asyncio.sleep(RETRY_S)
                # After a reconnect it is another server, which the failure says nothing about.
                if wanted.is_set() or not await self._restarted():
                    wanted.set()

    async def _restarted(self) -> bool:
        """Whether the embedded server has something that only a restart cures, and was restarted."""
        if self._server is None or not self._bus.connected.is_set():
            return False
        if not (ailment := await self._server.ailment(self._streams.confirmed)):
            return False
        logger.warning("restarting nats-server: {}", ailment)
        self._server.restart()
        return True

    async def _bus_well(self) -> bool:
        """Whether the bus is well, or a reconnect will reconcile."""
        if not self._bus.connected.is_set() or await self._restarted() or await self._streams.healthy():
            return True
        logger.warning(
            "streams of the run are gone, do not answer or cannot be written: declaring them again{}",
            "" if self._server else " (a nats-server whose disk was full must be restarted)",
        )
        return False

    async def _reconcile(self) -> None:
        """After a start or reconnect: declare what is missing, take the replies, publish the rest again."""
        await self._streams.declare()
        await self._fleet.declare_lanes()
        await self._ownership.renew()
        await self._policies.restore(self._schedule.needed_versions())
        await self._dispatcher.reconcile(self._intake)
        self._fleet.announce()
