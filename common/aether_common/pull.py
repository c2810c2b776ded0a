"""The pull loop: messages of one durable consumer by credit, on raw next-message requests.

Never more than `window` messages are requested or in hand. What was given back is asked for again in eighths of the
window, without waiting for the answer to earlier requests (over a long way that would leave slots idle), and all of it
when nothing is outstanding: on a status message, after two missed heartbeats and on reconnect.
`fetch()` of nats-py is not used: outstanding across a server restart it runs to its full time-out.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import nats.errors
from loguru import logger
from nats.aio.msg import Msg
from nats.js.api import Header

from aether_common.bus import Bus

EXPIRES_S = 25.0
HEARTBEAT_S = 5.0
MAX_BYTES = 32 << 20
RETRY_S = 0.5
_REQUESTS = 8
"""Outstanding at most; the consumer takes 16."""
_AS_ASKED = ("404", "408")
"""A request ends with one of these when nothing came, or not all, until it expired."""
_COMPLETED = "batch completed"
"""A request for whose last message the server has just sent: status 409 like an error, but none."""


def message_id(message: Msg) -> tuple[int, str]:
    """Sequence in its stream and time of storage: equal for all deliveries of a message, told by where it is acked.

    The time, because a stream that was made again counts from one.
    """
    tokens = message.reply.split(".")
    return int(tokens[5]), tokens[7]


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
        self._requests: dict[str, float] = {}
        """time.monotonic() of the last sign of life, by request."""
        self._requested = 0
        """Messages that may still come. A message does not say which request it answers: the server takes turns."""
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
        if self._due():
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
                if self._due():
                    await self._ask()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), HEARTBEAT_S)
        finally:
            with suppress(Exception):
                await subscription.unsubscribe()

    def _due(self) -> int:
        """How many messages to ask for now."""
        free = self._window - self._in_hand - self._requested
        if self._paused or free <= 0 or (self._requested and free < self._window // _REQUESTS):
            return 0
        return free if len(self._requests) < _REQUESTS else 0

    async def _ask(self) -> None:
        if (wait := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        if not (free := self._due()):
            return
        self._number += 1
        token = str(self._number)
        self._requests[token] = time.monotonic()
        self._requested += free
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
            self._end(token, free, RETRY_S)

    async def _receive(self, message: Msg) -> None:
        if message.headers and not message.reply and (status := message.headers.get("Status")) is not None:
            self._told(message.subject.rsplit(".", 1)[-1], status, message.headers)
            return
        self._requested = max(0, self._requested - 1)
        if not self._requested:
            self._requests.clear()
        self._in_hand += 1
        self._deliver(message)
        if self._due():
            self._wake.set()

    def _told(self, token: str, status: str, headers: Mapping[str, str]) -> None:
        if token not in self._requests:
            return
        if status == "100":
            self._requests[token] = time.monotonic()
            return
        # 409 (limits, consumer deleted) and 503 (no leader, server starting) would come back at once.
        as_asked = status in _AS_ASKED or headers.get(Header.DESCRIPTION, "").lower() == _COMPLETED
        unused = headers.get("Nats-Pending-Messages", "")
        self._end(token, int(unused) if unused.isdigit() else None, 0.0 if as_asked else RETRY_S)

    def _end(self, token: str, unused: int | None, wait_s: float) -> None:
        """A request is over; `unused` of its messages do not come, None when that is not known."""
        del self._requests[token]
        if not self._requests or unused is None:
            # Nothing comes any more, or as good as: what comes nevertheless is bounded by the consumer.
            self._requested = 0
        else:
            self._requested = max(0, self._requested - unused)
        if wait_s:
            self._not_before = time.monotonic() + wait_s
        self._wake.set()

    def _drop_silent_requests(self) -> None:
        limit = time.monotonic() - 2 * HEARTBEAT_S
        for token in [token for token, heard in self._requests.items() if heard < limit]:
            self._end(token, None, 0.0)

    def _forget_requests(self) -> None:
        self._requests.clear()
        self._requested = 0
        self._wake.set()
