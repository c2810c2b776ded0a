"""The pull loop: messages of one durable consumer by credit, on raw next-message requests.

Never more than `window` messages are requested or in hand. A request is renewed at half credit, on
a status message, after two missed heartbeats and on reconnect; nothing else makes the server send.
`fetch()` of nats-py is not used: outstanding across a server restart it runs to its full time-out.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress

import nats.errors
from loguru import logger
from nats.aio.msg import Msg

from aether_common.bus import Bus

EXPIRES_S = 25.0
HEARTBEAT_S = 5.0
MAX_BYTES = 32 << 20
RETRY_S = 0.5
_REQUESTS = 2


class PullLoop:
    """Pulls for one consumer until `stop`. `deliver` is called for each message, in order.

    Whoever takes a message calls `release` when it is finished with it.
    """

    def __init__(self, bus: Bus, next_subject: str, window: int, deliver: Callable[[Msg], None]) -> None:
        self._bus = bus
        self._next_subject = next_subject
        self._window = window
        self._deliver = deliver
        self._inbox = bus.client.new_inbox()
        self._requests: dict[str, int] = {}
        self._heard: dict[str, float] = {}
        self._in_hand = 0
        self._number = 0
        self._wake = asyncio.Event()
        self._not_before = 0.0
        self._paused = False
        self.pulls = 0
        bus.on_reconnect(self._forget_requests)

    @property
    def in_hand(self) -> int:
        return self._in_hand

    def release(self) -> None:
        """One delivered message is finished: its credit is free again."""
        self._in_hand -= 1
        self._wake.set()

    def pause(self) -> None:
        """Ask for nothing more; what was requested may still arrive."""
        self._paused = True

    async def run(self) -> None:
        """Pull until cancelled."""
        subscription = await self._bus.client.subscribe(f"{self._inbox}.*", cb=self._receive)
        try:
            while True:
                self._wake.clear()
                await self._bus.connected.wait()
                self._drop_silent_requests()
                await self._ask()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), HEARTBEAT_S)
        finally:
            with suppress(Exception):
                await subscription.unsubscribe()

    async def _ask(self) -> None:
        requested = sum(self._requests.values())
        free = self._window - self._in_hand - requested
        if self._paused or free <= 0 or (requested and free < (self._window + 1) // 2):
            return
        if len(self._requests) >= _REQUESTS:
            return
        if (wait := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        self._number += 1
        token = str(self._number)
        self._requests[token] = free
        self._heard[token] = time.monotonic()
        body = {
            "batch": free,
            "max_bytes": MAX_BYTES,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        self.pulls += 1
        try:
            await self._bus.client.publish(
                self._next_subject, json.dumps(body).encode(), reply=f"{self._inbox}.{token}"
            )
        except nats.errors.Error as error:
            logger.debug("pull failed: {}", error)
            self._end(token, RETRY_S)

    async def _receive(self, message: Msg) -> None:
        token = message.subject.rsplit(".", 1)[-1]
        self._heard[token] = time.monotonic()
        status = (message.headers or {}).get("Status") if not message.reply else None
        if status == "100":
            return
        if status is not None:
            # 404 and 408 end a request as asked; 409 (limits, consumer deleted) and 503 (no leader,
            # server starting) would come back at once.
            self._end(token, 0.0 if status in ("404", "408") else RETRY_S)
            return
        left = self._requests.get(token, 0) - 1
        if left > 0:
            self._requests[token] = left
        else:
            self._end(token, 0.0)
        self._in_hand += 1
        self._deliver(message)

    def _end(self, token: str, wait_s: float) -> None:
        self._requests.pop(token, None)
        self._heard.pop(token, None)
        if wait_s:
            self._not_before = time.monotonic() + wait_s
        self._wake.set()

    def _drop_silent_requests(self) -> None:
        limit = time.monotonic() - 2 * HEARTBEAT_S
        for token, heard in list(self._heard.items()):
            if heard < limit:
                self._end(token, 0.0)

    def _forget_requests(self) -> None:
        for token in list(self._requests):
            self._end(token, 0.0)
