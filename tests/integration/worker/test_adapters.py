"""The adapter cache against a real nats-server, with a worker's permissions."""

import asyncio
import os
from pathlib import Path

import pytest
from aether_common.bus import Bus
from aether_common.digests import FileEntry, file_list_bytes, list_files, sha256_bytes
from aether_worker import artifacts as artifacts_module
from aether_worker.adapter_check import AdapterError
from aether_worker.adapters import AdapterCache
from aether_worker.artifacts import Artifacts
from nats_server import NatsServer

from .conftest import Coordinator


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts_module, "RETRY_S", (0.05, 0.2))
    monkeypatch.setattr(artifacts_module, "SILENCE_S", 1.0)


def make_cache(worker_bus: Bus, server: NatsServer, tmp_path: Path, budget: int = 1 << 30) -> AdapterCache:
    return AdapterCache(tmp_path / "cache", budget, Artifacts(worker_bus, server.names))


async def test_an_adapter_is_fetched_once_and_is_what_was_put(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer, tmp_path: Path, adapter: Path
) -> None:
    await coordinator.start(window=1)
    policy = await coordinator.put_adapter(adapter)
    cache = make_cache(worker_bus, server, tmp_path)
    paths = await asyncio.gather(*(cache.get(7, policy.adapter) for _ in range(3)))
    assert len(set(paths)) == 1
    assert paths[0].name == f"v7-{policy.adapter}"
    assert list_files(paths[0]) == list_files(adapter)
    assert len(list((tmp_path / "cache").iterdir())) == 1


async def test_a_corrupt_object_is_refused_and_the_right_one_is_taken_later(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer, tmp_path: Path, adapter: Path
) -> None:
    await coordinator.start(window=1)
    policy = await coordinator.put_adapter(adapter)
    weights = next(file for file in list_files(adapter) if file.name.endswith(".safetensors"))
    damaged = bytearray((adapter / weights.name).read_bytes())
    damaged[1000] ^= 1
    await coordinator.put(weights.sha256, bytes(damaged))
    cache = make_cache(worker_bus, server, tmp_path)
    with pytest.raises(AdapterError, match=rf"adapter_model.safetensors is corrupt.*{sha256_bytes(bytes(damaged))}"):
        await cache.get(0, policy.adapter)
    assert list((tmp_path / "cache").iterdir()) == []
    await coordinator.put(weights.sha256, (adapter / weights.name).read_bytes())
    assert list_files(await cache.get(0, policy.adapter)) == list_files(adapter)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["adapter_config.json", "adapter_model.bin"], "must contain exactly"),
        (["adapter_config.json", "adapter_model.safetensors", "more.json"], "must contain exactly"),
        (["../adapter_config.json", "adapter_model.safetensors"], "not a plain file name"),
    ],
)
async def test_other_files_than_those_of_an_adapter_are_refused(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer, tmp_path: Path, names: list[str], message: str
) -> None:
    await coordinator.start(window=1)
    listing = file_list_bytes(FileEntry(name, 2, sha256_bytes(b"{}")) for name in names)
    await coordinator.put(sha256_bytes(b"{}"), b"{}")
    await coordinator.put(sha256_bytes(listing), listing)
    with pytest.raises(AdapterError, match=message):
        await make_cache(worker_bus, server, tmp_path).get(0, sha256_bytes(listing))


async def test_what_is_not_there_is_said(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer, tmp_path: Path
) -> None:
    await coordinator.start(window=1)
    with pytest.raises(AdapterError, match="is not in the run's object store aether-test-artifacts"):
        await make_cache(worker_bus, server, tmp_path).get(0, "a" * 64)


async def test_a_download_goes_on_where_the_connection_was_cut(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await coordinator.start(window=1)
    monkeypatch.setattr(artifacts_module, "MAX_BYTES", 1 << 20)
    data = os.urandom(3 << 20)
    await coordinator.put("d", data, chunk=64 << 10)
    received: list[bytes] = []

    async def write(pieces: list[bytes]) -> None:
        before = len(received)
        received.extend(pieces)
        if before < 20 <= len(received):
            server.restart()

    artifacts = Artifacts(worker_bus, server.names)
    assert await asyncio.wait_for(artifacts.read("d", write), 20) == len(data)
    assert b"".join(received) == data
    assert len(received) == 48
    # What was in flight when the server died came twice, at most.
    assert artifacts.received <= len(data) + (1 << 20)


async def test_objects_that_were_stored_at_the_same_time_do_not_mix(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await coordinator.start(window=1)
    monkeypatch.setattr(artifacts_module, "MIN_BYTES", 128 << 10)
    objects = {name: os.urandom(500_000) for name in ("a", "b", "c")}
    await asyncio.gather(*(coordinator.put(name, data, chunk=16 << 10) for name, data in objects.items()))
    artifacts = Artifacts(worker_bus, server.names)
    for name, data in objects.items():
        received: list[bytes] = []

        async def write(pieces: list[bytes], received: list[bytes] = received) -> None:
            received.extend(pieces)

        await artifacts.read(name, write)
        assert b"".join(received) == data


async def test_damage_on_disk_is_found_after_a_restart(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer, tmp_path: Path, adapter: Path
) -> None:
    await coordinator.start(window=1)
    policy = await coordinator.put_adapter(adapter)
    path = await make_cache(worker_bus, server, tmp_path).get(0, policy.adapter)
    with (path / "adapter_model.safetensors").open("r+b") as file:
        file.seek(100)
        file.write(b"!")
    again = await make_cache(worker_bus, server, tmp_path).get(0, policy.adapter)
    assert list_files(again) == list_files(adapter)


async def test_the_least_recently_used_adapter_leaves_but_never_a_pinned_one(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer, tmp_path: Path, adapter: Path
) -> None:
    await coordinator.start(window=1)
    policies = []
    for version in range(4):
        (adapter / "adapter_config.json").write_text(f'{{"version": {version}}}')
        policies.append(await coordinator.put_adapter(adapter, version))
    # Two adapters of 1 MiB fit.
    cache = make_cache(worker_bus, server, tmp_path, budget=5 << 19)
    paths = [await cache.get(version, policies[version].adapter) for version in (0, 1)]
    cache.pin(policies[0].adapter)
    os.utime(paths[0], (1, 1))
    os.utime(paths[1], (2, 2))
    paths.append(await cache.get(2, policies[2].adapter))
    assert [path.exists() for path in paths] == [True, False, True]
    cache.unpin(policies[0].adapter)
    paths.append(await cache.get(3, policies[3].adapter))
    assert [path.exists() for path in paths] == [False, False, True, True]
