"""When adapters are fetched: a fleet does not fetch a new policy in one instant, a job never waits for that."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from aether_common.wire import PolicyRef
from aether_worker.engine.null_engine import NullEngine
from aether_worker.loaded import LoadedAdapters
from aether_worker.settings import NullSettings

FIRST, SECOND = (PolicyRef(version=version, adapter=str(version) * 64) for version in (1, 2))


class Cache:
    """Has everything at once."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.came = asyncio.Event()

    def pin(self, digest: str) -> None: ...

    def unpin(self, digest: str) -> None: ...

    async def get(self, version: int, digest: str) -> Path:
        self.fetched.append(digest)
        self.came.set()
        return Path()


def loaded(cache: Any, jitter_s: float) -> tuple[LoadedAdapters, asyncio.Task[None]]:
    adapters = LoadedAdapters(NullEngine(NullSettings(), 16), cache, jitter_s=jitter_s)
    return adapters, asyncio.create_task(adapters.run())


async def test_a_new_policy_waits_its_turn_unless_a_job_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []

    def longest(least: float, most: float) -> float:
        drawn.append((least, most))
        return most

    monkeypatch.setattr(random, "uniform", longest)
    cache = Cache()
    adapters, task = loaded(cache, jitter_s=60.0)
    adapters.want([FIRST])
    async with asyncio.timeout(5):
        await cache.came.wait()  # The first comes at once: without it the worker is of no use.
        assert drawn == []
        adapters.want([SECOND, FIRST])
        while not drawn:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert drawn == [(0, 60.0)]
        assert cache.fetched == [FIRST.adapter]
        async with adapters.use(2, SECOND.adapter, 5):
            assert cache.fetched == [FIRST.adapter, SECOND.adapter]
    task.cancel()


async def test_without_a_job_it_is_fetched_after_the_delay() -> None:
    cache = Cache()
    adapters, task = loaded(cache, jitter_s=0.05)
    adapters.want([FIRST])
    async with asyncio.timeout(5):
        await cache.came.wait()
        cache.came.clear()
        adapters.want([SECOND, FIRST])
        await cache.came.wait()
    assert cache.fetched == [FIRST.adapter, SECOND.adapter]
    task.cancel()
