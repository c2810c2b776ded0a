"""Requests of workers: each is checked, bounded, and answered in a task of its own.

Who sent it is known by its subject, which nats-server lets nobody else publish to. What a worker sends, and how
often, is bounded; what is bad is counted, and never ends the reader.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from aether_common.errors import MessageError
from aether_common.wire import Heartbeat, Message, Poll, Registration
from loguru import logger
from nats.aio.msg import Msg

from aether_coordinator.events import Events

MAX_REQUEST = 512 << 10
"""Bytes of a request; a heartbeat that names a full window of jobs is smaller."""
RATES: dict[str, tuple[float, float]] = {"Registration": (30, 1.0), "Heartbeat": (50, 20.0), "Poll": (50, 20.0)}
"""Requests of one worker: so many at once, then so many a second; what is above is dropped."""


class Allowance:
    """How many requests are left of so many at once, refilled by so many a second."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at = burst, time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Requests:
    """What workers ask. `on_bad_message` is called for each that cannot be read."""

    def __init__(self, events: Events, on_bad_message: Callable[[], None]) -> None:
        self._events = events
        self._on_bad_message = on_bad_message
        self._allowances: dict[tuple[str, str], Allowance] = {}

    def answered[M: Registration | Heartbeat | Poll](
        self, tasks: asyncio.TaskGroup, kind: type[M], answer: Callable[[M], Awaitable[Message]]
    ) -> Callable[[Msg], Awaitable[None]]:
        """A callback for the subscription to one kind; the answers are made in `tasks`."""
        what = kind.__name__

        async def respond(message: Msg, request: M) -> None:
            try:
                result = await answer(request)
                if message.reply:
                    await message.respond(result.encode())
            except Exception as error:
                logger.warning("{} of {} not answered: {!r}", what, request.worker, error)

        async def receive(message: Msg) -> None:
            name = message.subject.rsplit(".", 1)[-1]
            try:
                if len(message.data) > MAX_REQUEST:
                    raise MessageError(f"{what} of {len(message.data)} bytes, at most {MAX_REQUEST}")
                request = kind.decode(message.data)
                if request.worker != name:
                    raise MessageError(f"{what} of {request.worker!r} on {message.subject}")
            except MessageError as error:
                self._events.record("bad_message", str(error), name, warn=True)
                self._on_bad_message()
                return
            if (what, name) not in self._allowances:
                self._allowances[what, name] = Allowance(*RATES[what])
            if not self._allowances[what, name].take():
                dropped = f"{what} dropped: more than {RATES[what][1]:.0f} a second"
                self._events.record("refused", dropped, name, warn=True)
                return
            tasks.create_task(respond(message, request))

        return receive
