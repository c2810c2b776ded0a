"""The worker in the eyes of the coordinator: registration, heartbeats, polls, and what they ask for.

All are requests of the worker. A coordinator that is away is waited for: workers outlive it. One
that does not know this incarnation any more is told again.
"""

import asyncio
import random
import time
from collections.abc import Callable

from aether_common.bus import Bus
from aether_common.errors import AetherError, BusError, IdentityError, MessageError
from aether_common.names import Names
from aether_common.wire import DesiredState, Heartbeat, Message, Poll, Registration, RegistrationAnswer
from loguru import logger

from aether_worker.artifacts import backoff
from aether_worker.engine.base import Engine
from aether_worker.lane import Lane
from aether_worker.loaded import LoadedAdapters

REQUEST_S = 5.0
POLL_S = 35.0
"""The coordinator holds a poll for 25 s."""
FAREWELL_S = 2.0


class Superseded(AetherError):
    """A newer incarnation of this worker registered."""

    exit_code = 10


class Presence:
    def __init__(
        self, bus: Bus, names: Names, registration: Registration, on_drain: Callable[[AetherError | None], None]
    ) -> None:
        """`on_drain` is called when the worker should end: with None on request, else with the reason."""
        self._bus = bus
        self._names = names
        self._registration = registration
        self._on_drain = on_drain
        self._answer = RegistrationAnswer(accepted=False)
        self._registering = asyncio.Lock()
        self._registrations = 0
        self._revision = 0
        self._beat = asyncio.Event()
        self._poll_again = asyncio.Event()
        self.draining = False
        bus.on_reconnect(self._reconnected)

    async def register(self) -> RegistrationAnswer:
        """Ask until the coordinator answers. Raises `IdentityError` when it refuses."""
        attempt = 0
        while True:
            try:
                answer = RegistrationAnswer.decode(await self._request("reg", self._registration, REQUEST_S))
                break
            except (BusError, MessageError) as error:
                if attempt % 20 == 0:
                    logger.warning("the coordinator does not answer the registration, trying again: {}", error)
                attempt += 1
                await backoff(attempt)
        if not answer.accepted:
            raise IdentityError(f"the coordinator refuses worker {self._registration.worker}: {answer.reason}")
        logger.info("registered as {}", self._registration.worker)
        self._answer = answer
        self._registrations += 1
        if answer.state is not None:
            self._revision = answer.state.revision
        return answer

    async def run(self, lane: Lane, adapters: LoadedAdapters, engine: Engine) -> None:
        """Beat and poll until cancelled, after `register`."""
        self._lane, self._adapters, self._engine = lane, adapters, engine
        if self._answer.state is not None:
            await self._apply(self._answer.state)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats())
            tasks.create_task(self._polls())
            tasks.create_task(self._watch_engine())

    def beat_now(self) -> None:
        self._beat.set()

    async def farewell(self) -> None:
        """A last heartbeat that says that nothing is held any more."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._send_heartbeat()
        except (BusError, TimeoutError) as error:
            logger.debug("no farewell: {}", error)

    async def _heartbeats(self) -> None:
        missed = 0
        while True:
            self._beat.clear()
            try:
                await self._apply(DesiredState.decode(await self._send_heartbeat()))
                missed = 0
            except (BusError, MessageError) as error:
                missed += 1
                if missed == 3:
                    logger.warning("the coordinator does not answer heartbeats, going on: {}", error)
            try:
                async with asyncio.timeout(self._answer.heartbeat_s):
                    await self._beat.wait()
            except TimeoutError:
                continue

    async def _send_heartbeat(self) -> bytes:
        return await self._request(
            "hb",
            Heartbeat(
                worker=self._registration.worker,
                incarnation=self._registration.incarnation,
                running=self._lane.running,
                adapters=self._adapters.digests,
                engine_ready=await self._engine.health(),
                draining=self.draining,
                tokens_total=self._lane.tokens_total,
                adapter_load_s=self._adapters.load_s,
                clock=time.time(),
            ),
            REQUEST_S,
        )

    async def _polls(self) -> None:
        while True:
            self._poll_again.clear()
            try:
                answer = await self._poll()
                if answer is not None:
                    await self._apply(answer)
                    if answer.superseded:
                        return  # Answered at once, again and again, until this worker has ended.
            except (BusError, MessageError) as error:
                logger.debug("poll: {}", error)
                await asyncio.sleep(random.uniform(0.5, 2.0))

    async def _poll(self) -> DesiredState | None:
        """News, or None when the poll must be asked again: after a reconnect nobody answers the old one."""
        poll = Poll(
            worker=self._registration.worker, incarnation=self._registration.incarnation, revision=self._revision
        )
        asked = asyncio.create_task(self._request("poll", poll, POLL_S))
        again = asyncio.create_task(self._poll_again.wait())
        try:
            await asyncio.wait([asked, again], return_when=asyncio.FIRST_COMPLETED)
            return DesiredState.decode(asked.result()) if asked.done() else None
        finally:
            asked.cancel()
            again.cancel()

    async def _watch_engine(self) -> None:
        while True:
            await self._lane.engine_failed.wait()
            self._lane.engine_failed.clear()
            self.beat_now()

    async def _apply(self, state: DesiredState) -> None:
        if state.superseded:
            self._on_drain(Superseded(f"another worker registered as {self._registration.worker}: this one ends"))
            return
        if state.unknown:
            await self._register_again()
            return
        self._revision = state.revision
        self._lane.cancel(state.cancel)
        self._adapters.want(state.policies)
        if state.drain:
            logger.info("the coordinator asks this worker to drain")
            self._on_drain(None)

    async def _register_again(self) -> None:
        seen = self._registrations
        async with self._registering:
            # Heartbeat and poll hear it at the same time.
            if self._registrations != seen:
                return
            answer = await self.register()
        if answer.state is not None and not answer.state.unknown:
            await self._apply(answer.state)
        self._poll_again.set()

    async def _request(self, kind: str, message: Message, timeout_s: float) -> bytes:
        subject = self._names.fleet(kind, self._registration.worker)
        return (await self._bus.request(subject, message.encode(), timeout_s)).data

    def _reconnected(self) -> None:
        self._beat.set()
        self._poll_again.set()
