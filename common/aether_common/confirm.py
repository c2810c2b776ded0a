"""Confirmed publishing: a message counts as sent when the server says that it stored it.

One inbox per connection and one future per message: cheaper than a request of nats-py, and every
turn needs two of them.
"""

import asyncio
import json

import nats.errors
from nats.aio.msg import Msg
from nats.js.errors import APIError

from aether_common.bus import Bus


class Confirmed:
    """Publishes to streams over one connection."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = bus.client.new_inbox()
        self._listening = False
        self._lock = asyncio.Lock()
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._number = 0

    async def publish(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> None:
        """Returns when the message is stored.

        Raises `APIError` when the server refuses it, `nats.errors.Error` without a (readable) answer in time.
        """
        if not self._listening:
            await self._listen()
        self._number += 1
        token = str(self._number)
        self._waiting[token] = answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._bus.client.publish(subject, payload, reply=f"{self._inbox}.{token}", headers=headers)
                data = await answer
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        finally:
            del self._waiting[token]
        check_confirmation(data)

    async def _listen(self) -> None:
        async with self._lock:
            if not self._listening:
                await self._bus.client.subscribe(f"{self._inbox}.*", cb=self._receive)
                self._listening = True

    async def _receive(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject.rsplit(".", 1)[-1])
        if answer is None or answer.done():
            return
        if message.headers and message.headers.get("Status") == "503":
            answer.set_exception(nats.errors.NoRespondersError())
        else:
            answer.set_result(message.data)


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
