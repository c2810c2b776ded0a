"""Confirmed publishing: a message counts as sent when the server says that it stored it.

One inbox per connection, one future per message and one timer for all of them: cheaper than a
request of nats-py, and every turn needs two of them.
"""

import asyncio
import json

import nats.errors
from nats.aio.msg import Msg
from nats.js.errors import APIError

from aether_common.bus import Bus


class Confirmed:
    """Publishes to streams over one connection; every confirmation is waited for `timeout_s`."""

    def __init__(self, bus: Bus, timeout_s: float) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._inbox = bus.client.new_inbox()
        self._listening = False
        self._lock = asyncio.Lock()
        self._waiting: dict[str, tuple[float, asyncio.Future[None]]] = {}
        """When it is given up (time of the event loop) and who waits, by number: the oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        """Returns when the message is stored; raises what `send` says."""
        await (await self.send(subject, payload, headers))

    async def send(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> "asyncio.Future[None]":
        """Hand a message to the connection; the future is done when it is stored.

        Its exception is an `APIError` when the server refuses the message, another `nats.errors.Error` without a
        (readable) answer in time or when the connection takes nothing.
        """
        if not self._listening:
            await self._listen()
        loop = asyncio.get_running_loop()
        self._number += 1
        token = str(self._number)
        stored: asyncio.Future[None] = loop.create_future()
        deadline = loop.time() + self._timeout_s
        self._waiting[token] = deadline, stored
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._give_up)
        try:
            await self._bus.client.publish(subject, payload, reply=f"{self._inbox}.{token}", headers=headers)
        except nats.errors.Error as error:
            del self._waiting[token]
            stored.set_exception(error)
        return stored

    def _give_up(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._waiting:
            token, (deadline, stored) = next(iter(self._waiting.items()))
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._give_up)
                return
            del self._waiting[token]
            if not stored.done():
                stored.set_exception(nats.errors.TimeoutError())

    async def _listen(self) -> None:
        async with self._lock:
            if not self._listening:
                await self._bus.client.subscribe(f"{self._inbox}.*", cb=self._receive)
                self._listening = True

    async def _receive(self, message: Msg) -> None:
        _, stored = self._waiting.pop(message.subject.rsplit(".", 1)[-1], (0.0, None))
        if stored is None or stored.done():
            return
        if message.headers and message.headers.get("Status") == "503":
            stored.set_exception(nats.errors.NoRespondersError())
            return
        try:
            check_confirmation(message.data)
        except nats.errors.Error as error:
            stored.set_exception(error)
        else:
            stored.set_result(None)


def check_confirmation(data: bytes) -> None:
    """Raises `APIError` for a refusal, `nats.errors.Error` for what is no confirmation."""
    try:
        answer = json.loads(data)
        error, stored = answer.get("error"), "seq" in answer
    except (ValueError, AttributeError):
        raise nats.errors.Error(f"not a confirmation: {data[:200]!r}") from None
    if error:
        raise APIError.from_error(error)
    if not stored:
        raise nats.errors.Error(f"not a confirmation: {data[:200]!r}")
