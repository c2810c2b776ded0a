"""Read an artefact from the object store with a worker's permissions: direct gets, nothing else.

An object is looked up by its digest, then its chunks come in windows: batched direct gets (ADR-31), several in
flight, so that a long way to the server costs no speed. What is in flight is bounded by what the link carries in
half a second, so that jobs, replies and heartbeats on the same connection do not wait long behind an adapter.
After a cut the reading goes on behind the last chunk that was passed on.
"""

import asyncio
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import nats.errors
from aether_common.bus import Bus
from aether_common.errors import AetherError, BusError
from aether_common.names import Names
from loguru import logger
from nats.aio.msg import Msg

IN_FLIGHT_S = 0.5
"""As many bytes are asked for ahead as came in so long."""
MIN_BYTES, MAX_BYTES = 1 << 20, 40 << 20
"""Bounds of that, for all objects that are read at the same time; the server's pending limit is well above."""
WINDOWS = 8
"""Windows in flight, when chunks are small enough; never fewer than two."""
TOGETHER = 4
"""Chunks that are passed on together."""
SILENCE_S = 5.0
"""A reading to which nothing comes for so long starts anew behind the last chunk."""
RETRY_S = (0.5, 8.0)


type Write = Callable[[list[bytes]], Awaitable[None]]
"""Takes the next bytes of an object, in pieces."""


class ArtifactError(AetherError):
    """An artefact is not there, or not what its digest says."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the object store knows about an object."""

    nuid: str
    size: int
    chunks: int

    @property
    def chunk_bytes(self) -> int:
        return max(1, -(-self.size // max(1, self.chunks)))


async def backoff(attempt: int) -> None:
    """Sleep with jitter before attempt number `attempt` + 1."""
    shortest, longest = RETRY_S
    await asyncio.sleep(random.uniform(0.5, 1.0) * min(longest, shortest * 2**attempt))


class Artifacts:
    """The object store as a worker sees it."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus = bus
        self._names = names
        self._readings: set[_Reading] = set()
        self._rate = 0.0
        """Bytes per second of the last reading, with which the next begins."""
        self.batches = 0
        self.received = 0
        """Bytes of chunks that came, also those that came twice."""
        bus.on_reconnect(self._reconnected)

    async def read(self, digest: str, write: Write) -> int:
        """Pass the bytes of object `digest` to `write`, in order; returns their number.

        Nothing is verified here. Lost connections are waited for and the reading goes on where it
        stopped: bound the call from outside. Raises `ArtifactError` when there is no such object.
        """
        info = await self._look_up(digest)
        reading = _Reading(digest, info, write, self._rate)
        attempt = 0
        self._readings.add(reading)
        try:
            while reading.chunks < info.chunks:
                before = reading.chunks
                try:
                    await self._stream(reading)
                except BusError as error:
                    logger.debug("object {}: {} of {} chunks, again: {}", digest, reading.chunks, info.chunks, error)
                    attempt = 0 if reading.chunks > before else attempt + 1
                    await backoff(attempt)
        finally:
            self._readings.discard(reading)
        if reading.size >= MIN_BYTES:
            self._rate = reading.rate
        return reading.size

    async def _look_up(self, digest: str) -> ObjectInfo:
        attempt = 0
        while True:
            try:
                answer = await self._bus.request(self._names.artifact_meta(digest), b"", SILENCE_S)
                break
            except BusError:
                attempt += 1
                await backoff(attempt)
        if (answer.headers or {}).get("Status"):
            raise ArtifactError(f"object {digest} is not in the run's object store {self._names.artifacts}")
        try:
            info = json.loads(answer.data)
            if info.get("deleted"):
                raise ArtifactError(f"object {digest} was deleted from the run's object store")
            return ObjectInfo(nuid=str(info["nuid"]), size=int(info["size"]), chunks=int(info["chunks"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"object {digest}: its description cannot be read: {error!r}") from error

    async def _stream(self, reading: "_Reading") -> None:
        """Read the rest of an object. Raises `BusError` when it breaks off."""
        await self._bus.connected.wait()
        reading.begin()
        # An inbox of its own keeps the late messages of an earlier try out of this one.
        inbox = self._bus.client.new_inbox()
        try:
            subscription = await self._bus.client.subscribe(f"{inbox}.*", cb=reading.receive)
        except nats.errors.Error as error:
            raise BusError(str(error)) from error
        try:
            while reading.chunks < reading.info.chunks:
                while (window := reading.next_window(MAX_BYTES // max(1, len(self._readings)))) is not None:
                    await self._ask(reading, window, f"{inbox}.{window.number}")
                for message in await reading.next_messages():
                    self.received += len(message.data)
                    reading.take(message)
                await reading.pass_on()
        finally:
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _ask(self, reading: "_Reading", window: "_Window", inbox: str) -> None:
        body = {
            "batch": window.count,
            "max_bytes": 2 * MAX_BYTES,
            "next_by_subj": self._names.artifact_chunks(reading.info.nuid),
            "seq": window.start,
        }
        self.batches += 1
        try:
            await self._bus.client.publish(self._names.artifact_get, json.dumps(body).encode(), reply=inbox)
        except nats.errors.Error as error:
            raise BusError(str(error) or type(error).__name__) from error

    def _reconnected(self) -> None:
        for reading in self._readings:
            reading.arrived.put_nowait(None)


@dataclass(slots=True)
class _Window:
    """Chunks that were asked for together."""

    number: int
    start: int
    """Sequence in the stream at which the server looks for the first."""
    count: int
    asked: float
    received_before: int
    """Bytes of the reading when it was asked for: what came since then, in that time, is the rate."""
    came: int = 0
    ended: bool = False
    waiting: deque[tuple[int, bytes]] = field(default_factory=deque[tuple[int, bytes]])
    """Chunks that came before those of the windows ahead."""


class _Reading:
    """How far the reading of one object is, and what is in flight for it.

    The chunks of an object usually stand one behind the other in the stream, so the place of the first tells where
    each window starts. Where others are in between, windows overlap: no chunk is missed, some come twice.
    """

    def __init__(self, digest: str, info: ObjectInfo, write: Write, rate: float) -> None:
        self.digest, self.info = digest, info
        self._write = write
        self.size, self.chunks = 0, 0
        self.arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        """Bounded by what is in flight. None: the connection was lost."""
        self._after = 0
        """Sequence of the last chunk that was passed on."""
        self._received = 0
        self.rate = rate
        self._windows: deque[_Window] = deque()
        self._numbers = itertools.count()

    def begin(self) -> None:
        """Forget what is in flight."""
        self._windows.clear()
        self.arrived = asyncio.Queue()

    async def receive(self, message: Msg) -> None:
        self.arrived.put_nowait(message)

    async def next_messages(self) -> list[Msg]:
        """At least one; as many as are there, up to `TOGETHER`."""
        messages: list[Msg] = []
        try:
            async with asyncio.timeout(SILENCE_S):
                while not messages or (not self.arrived.empty() and len(messages) < TOGETHER):
                    if (message := await self.arrived.get()) is None:
                        raise BusError("the connection was lost")
                    messages.append(message)
        except TimeoutError:
            raise BusError(f"nothing came for {SILENCE_S:.0f} s") from None
        return messages

    def next_window(self, most_bytes: int) -> _Window | None:
        """What to ask for now, if anything."""
        on_the_way = sum(window.count - window.came + len(window.waiting) for window in self._windows)
        left = self.info.chunks - self.chunks - on_the_way
        # Before the first chunk came, nobody knows where the object stands in the stream: one window only, then.
        blind = self._after == 0
        if left <= 0 or (self._windows and blind):
            return None
        chunk = self.info.chunk_bytes
        target = min(most_bytes, max(MIN_BYTES, self.rate * IN_FLIGHT_S))
        size = max(1, int(target / (1 if blind else WINDOWS) / chunk))
        if len(self._windows) >= 2 and (on_the_way + size) * chunk > target:
            return None
        start = self._after + 1
        if self._windows:
            start = max(start, self._windows[-1].start + self._windows[-1].count)
        window = _Window(next(self._numbers), start, min(size, left), time.monotonic(), self._received)
        self._windows.append(window)
        return window

    def take(self, message: Msg) -> None:
        """One message of a window."""
        number = int(message.subject.rsplit(".", 1)[-1])
        window = next((window for window in self._windows if window.number == number), None)
        if window is None:
            return  # The end of a window that was complete.
        headers = message.headers or {}
        match headers.get("Status"):
            case None:
                sequence = int(headers["Nats-Sequence"])
                if self._after == 0 and window.came == 0:
                    window.start = sequence
                window.came += 1
                self._received += len(message.data)
                window.waiting.append((sequence, message.data))
            case "204":
                window.ended = True
            case "404":
                raise ArtifactError(f"object {self.digest}: its chunks are gone from the object store")
            case status:
                raise BusError(f"status {status} {headers.get('Description', '')}")
        if window.came == window.count:
            seconds = time.monotonic() - window.asked
            self.rate = (self._received - window.received_before) / max(seconds, 1e-3)

    async def pass_on(self) -> None:
        """Write what is next in order."""
        pieces: list[bytes] = []
        try:
            self._sort(pieces)
        finally:
            if pieces:
                await self._write(pieces)

    def _sort(self, pieces: list[bytes]) -> None:
        """Append what is next in order."""
        while self._windows:
            head = self._windows[0]
            while head.waiting:
                sequence, data = head.waiting.popleft()
                if sequence <= self._after:
                    continue
                self._after = sequence
                self.size += len(data)
                self.chunks += 1
                if self.size > self.info.size:
                    raise ArtifactError(
                        f"object {self.digest} is larger than the {self.info.size} bytes that it claims"
                    )
                pieces.append(data)
            if head.came < head.count and not head.ended:
                return
            self._windows.popleft()
            if head.came < head.count and self.chunks < self.info.chunks:
                raise BusError("a window ended early")
