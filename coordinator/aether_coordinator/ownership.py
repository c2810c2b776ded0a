"""Ownership of a run's bus: exactly one coordinator works on it.

A coordinator answers on the owner subject, so that a second one (also on a copy of the run
directory) finds it and refuses to start. It also holds the bucket's `owner` key by compare-and-set,
and stops when somebody else took it.
"""

import asyncio
import json
import os
import time
import uuid
from contextlib import suppress
from typing import Any

import nats.errors
from aether_common.bus import Bus
from aether_common.errors import BusError, RunDirectoryError
from aether_common.names import Names
from loguru import logger
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

from aether_coordinator.streams import Streams

KEY = "owner"
CHECK_S = 10.0
ASK_S = 1.0


class Ownership:
    """The claim of this process."""

    def __init__(self, bus: Bus, names: Names, streams: Streams, run_uuid: str) -> None:
        self._bus = bus
        self._names = names
        self._streams = streams
        self._claim = {"run_uuid": run_uuid, "pid": os.getpid(), "claim": uuid.uuid4().hex, "since_s": time.time()}
        self._revision: int | None = None
        self._answering = False
        """Whether this process answers on the owner subject; asking then would find itself."""
        self._renewing = asyncio.Lock()

    async def claim(self) -> None:
        """Take the bus; again after a failure. Raises `RunDirectoryError` when another one answers or is faster."""
        if not self._answering:
            await self._refuse_another()

            async def respond(message: Any) -> None:
                await message.respond(json.dumps(self._claim).encode())

            await self._bus.client.subscribe(self._names.owner, cb=respond)
            self._answering = True
        await self.renew()

    async def _refuse_another(self) -> None:
        with suppress(BusError):
            answer = await self._bus.request(self._names.owner, b"", timeout_s=ASK_S)
            other = json.loads(answer.data)
            raise RunDirectoryError(
                f"another coordinator of run {self._names.run!r} (pid {other.get('pid')}) answers on the bus: stop it "
                "first; a copy of a run directory needs another run name"
            )

    async def renew(self) -> None:
        """Write the key again if it is gone (an empty store). Raises `RunDirectoryError` when it was lost."""
        # Two at a time would both find it gone, and the slower take the faster for another coordinator.
        async with self._renewing:
            await self._renew()

    async def _renew(self) -> None:
        bucket = self._streams.policies
        value = json.dumps(self._claim).encode()
        try:
            entry = await bucket.get(KEY)
            mine = json.loads(entry.value or b"{}").get("claim") == self._claim["claim"]
            if self._revision is not None and not mine:
                raise RunDirectoryError(
                    f"another coordinator took run {self._names.run!r} over: this one stops, nothing is lost"
                )
            self._revision = entry.revision if mine else await bucket.update(KEY, value, last=entry.revision)
        except KeyNotFoundError:
            self._revision = await bucket.create(KEY, value)
        except KeyWrongLastSequenceError as error:
            raise RunDirectoryError(
                f"another coordinator of run {self._names.run!r} started at the same time and was faster"
            ) from error

    async def keep(self) -> None:
        """Check the key again and again until cancelled. Raises `RunDirectoryError` when it was lost."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self.renew()
            except (nats.errors.Error, TimeoutError) as error:
                logger.debug("owner key not checked: {!r}", error)
