"""Which adapters the engine has: loaded when a job or the coordinator wants one, unloaded when neither does.

An adapter in use is never unloaded, and its files stay in the cache as long as it is loaded.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from aether_common.errors import EngineError
from aether_common.wire import PolicyRef
from loguru import logger

from aether_worker.adapter_check import AdapterError
from aether_worker.adapters import AdapterCache
from aether_worker.engine.base import Engine, EngineUnavailable

IDLE_S = 60.0
"""An adapter that nobody wants any more is unloaded so long after its last use."""
PREFETCH_RETRY_S = 5.0
JITTER_S = 1.0
"""At most so long after its announcement the fetching of a policy begins, at once when a job needs it."""


@dataclass(slots=True, eq=False)
class _Entry:
    loaded: bool = False
    uses: int = 0
    last_used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class LoadedAdapters:
    """The engine's adapters by digest."""

    def __init__(self, engine: Engine, cache: AdapterCache, idle_s: float = IDLE_S, jitter_s: float = JITTER_S) -> None:
        self._engine = engine
        self._cache = cache
        self._idle_s = idle_s
        self._jitter_s = jitter_s
        self._entries: dict[str, _Entry] = {}
        self._desired: Sequence[PolicyRef] = ()
        self.load_s: float | None = None
        """How long the newest adapter took to fetch and load, seconds."""
        self._news = asyncio.Event()

    @property
    def digests(self) -> list[str]:
        return [digest for digest, entry in self._entries.items() if entry.loaded]

    @asynccontextmanager
    async def use(self, version: int, digest: str, within_s: float) -> AsyncGenerator[None]:
        """Have the adapter loaded inside the block. Raises `AdapterError` when it is not there in time."""
        entry = self._entries.setdefault(digest, _Entry())
        entry.uses += 1
        try:
            if not entry.loaded:
                try:
                    async with asyncio.timeout(within_s):
                        await self._load(entry, version, digest)
                except TimeoutError:
                    raise AdapterError(f"adapter v{version} was not there within {within_s:.0f} s") from None
            yield
        finally:
            entry.uses -= 1
            entry.last_used = time.monotonic()

    def want(self, policies: Sequence[PolicyRef]) -> None:
        """The coordinator's list, newest first: fetched and loaded by `run`."""
        if list(policies) != list(self._desired):
            self._desired = policies
            self._news.set()

    async def run(self) -> None:
        """Load what is wanted, unload what is not, until cancelled."""
        while True:
            self._news.clear()
            complete = await self._prefetch()
            await self._unload_idle()
            try:
                async with asyncio.timeout(self._idle_s / 2 if complete else PREFETCH_RETRY_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _jitter(self) -> None:
        """Let not the whole fleet fetch a new policy in the same instant. The first ones come at once."""
        fresh = any(policy.adapter not in self.digests for policy in self._desired)
        if fresh and self.digests:
            with suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0, self._jitter_s)):
                    await self._news.wait()

    async def _prefetch(self) -> bool:
        complete = True
        await self._jitter()
        for policy in list(self._desired):
            if self._news.is_set():
                return True
            entry = self._entries.setdefault(policy.adapter, _Entry())
            try:
                await self._load(entry, policy.version, policy.adapter)
            except EngineUnavailable:
                complete = False  # It tells itself that it starts.
            except (AdapterError, EngineError) as error:
                logger.warning("policy {} is not ready: {}", policy.version, error)
                complete = False
        return complete

    async def _load(self, entry: _Entry, version: int, digest: str) -> None:
        async with entry.lock:
            if entry.loaded:
                return
            self._cache.pin(digest)
            try:
                started = time.monotonic()
                path = await self._cache.get(version, digest)
                fetched = time.monotonic()
                await self._engine.load_adapter(version, digest, path)
                entry.loaded = True
                entry.last_used = time.monotonic()
                self.load_s = entry.last_used - started
                logger.bind(policy=version).info(
                    "adapter ready: fetched in {:.2f} s, loaded in {:.2f} s",
                    fetched - started,
                    entry.last_used - fetched,
                )
            finally:
                if not entry.loaded:
                    self._cache.unpin(digest)

    async def _unload_idle(self) -> None:
        wanted = {policy.adapter for policy in self._desired}
        for digest, entry in list(self._entries.items()):
            idle = time.monotonic() - entry.last_used >= self._idle_s
            if digest in wanted or entry.uses or entry.lock.locked() or not idle:
                continue
            if entry.loaded:
                # From here on a new job waits on the lock and loads it again.
                async with entry.lock:
                    entry.loaded = False
                    try:
                        await self._engine.unload_adapter(digest)
                    except EngineError as error:
                        logger.warning("adapter {} stays loaded: {}", digest, error)
                    self._cache.unpin(digest)
            if not entry.uses:
                self._entries.pop(digest, None)
