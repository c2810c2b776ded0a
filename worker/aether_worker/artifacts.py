"""Read an artefact from the object store with a worker's permissions: direct gets, nothing else.

An object is looked up by its digest, then its chunks come in batches (ADR-31: batched direct get).
A batch that breaks off is asked for again from the chunk after the last one received.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import nats.errors
from aether_common.bus import Bus
from aether_common.errors import AetherError, BusError
from aether_common.names import Names
from loguru import logger

BATCH = 256
"""Chunks asked for at once."""
MAX_BYTES = 8 << 20
"""And bytes, so that a burst stays well below the server's pending limit."""
SILENCE_S = 5.0
"""A batch without a message for so long is asked for again."""
RETRY_S = (0.5, 8.0)


class ArtifactError(AetherError):
    """An artefact is not there, or not what its digest says."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the object store knows about an object."""

    nuid: str
    size: int
    chunks: int


async def backoff(attempt: int) -> None:
    """Sleep with jitter before attempt number `attempt` + 1."""
    shortest, longest = RETRY_S
    await asyncio.sleep(random.uniform(0.5, 1.0) * min(longest, shortest * 2**attempt))


class Artifacts:
    """The object store as a worker sees it."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus = bus
        self._names = names
        self.batches = 0

    async def read(self, digest: str, write: Callable[[bytes], Any]) -> int:
        """Pass the bytes of object `digest` to `write`, in order; returns their number.

        Nothing is verified here. Lost connections are waited for and the reading goes on where it
        stopped: bound the call from outside. Raises `ArtifactError` when there is no such object.
        """
        info = await self._look_up(digest)
        sequence, size, chunks, attempt = 1, 0, 0, 0
        while chunks < info.chunks:
            before = chunks
            try:
                async with aclosing(self._batch(digest, info.nuid, sequence)) as batch:
                    async for sequence_of_chunk, data in batch:
                        write(data)
                        sequence, size, chunks = sequence_of_chunk + 1, size + len(data), chunks + 1
                        if size > info.size:
                            raise ArtifactError(f"object {digest} is larger than the {info.size} bytes that it claims")
            except BusError as error:
                logger.debug("object {}: {} of {} chunks, again: {}", digest, chunks, info.chunks, error)
                attempt = 0 if chunks > before else attempt + 1
                await backoff(attempt)
        return size

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

    async def _batch(self, digest: str, nuid: str, sequence: int) -> AsyncGenerator[tuple[int, bytes]]:
        """(stream sequence, bytes) of the next chunks from `sequence`. Raises `BusError` when it breaks off."""
        body = {
            "batch": BATCH,
            "max_bytes": MAX_BYTES,
            "next_by_subj": self._names.artifact_chunks(nuid),
            "seq": sequence,
        }
        self.batches += 1
        await self._bus.connected.wait()
        # An inbox of its own keeps the late messages of a batch out of the next one.
        inbox = self._bus.client.new_inbox()
        try:
            subscription = await self._bus.client.subscribe(inbox)
        except nats.errors.Error as error:
            raise BusError(str(error)) from error
        try:
            await self._bus.client.publish(self._names.artifact_get, json.dumps(body).encode(), reply=inbox)
            while True:
                message = await subscription.next_msg(timeout=SILENCE_S)
                headers = message.headers or {}
                match headers.get("Status"):
                    case None:
                        yield int(headers["Nats-Sequence"]), message.data
                    case "204":
                        return
                    case "404":
                        raise ArtifactError(f"object {digest}: its chunks are gone from the object store")
                    case status:
                        raise BusError(f"status {status} {headers.get('Description', '')}")
        except nats.errors.Error as error:
            raise BusError(str(error) or type(error).__name__) from error
        finally:
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()
