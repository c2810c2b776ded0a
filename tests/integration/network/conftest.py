"""A real nats-server, the coordinator's own parts, and `aether-worker` as a process behind a proxy that misbehaves."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import integration.coordinator.conftest as parts
import pytest
from aether_common.digests import file_list_bytes, list_files, sha256_bytes
from aether_common.identity import compute_identity
from aether_common.wire import PolicyRef
from aether_coordinator.policies import object_meta
from chaos.proxy import Proxy
from integration.coordinator.conftest import Coordinator, until
from nats_server import NatsServer
from tiny_run import toml

WORKER = "w1"
COMPLETION = [5, 6, 7, parts.STOP]
QUICK = """
import sys
import aether_common.bus as bus, aether_common.client as client, aether_worker.artifacts as artifacts
bus.PING_INTERVAL_S, client.OPEN_S, artifacts.SILENCE_S = 1, 3.0, 2.0
from aether_worker.cli import main
sys.argv[0] = "aether-worker"
main()
"""
"""The worker with shorter waits: a dead link is noticed after 3 s instead of 60."""


def thorough() -> bool:
    """Whether this run has time for the real 60 s: when somebody asked for these tests by name, and in CI."""
    named = any("integration/network" in argument for argument in sys.argv)
    return named or bool(os.environ.get("CI")) or "network" in os.environ.get("AETHER_REQUIRE", "").split(",")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        server.add_worker(WORKER)
        yield server


@pytest.fixture
def proxy(server: NatsServer) -> Iterator[Proxy]:
    proxy = Proxy(server.websocket_port)
    yield proxy
    proxy.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What the null engine calls a model."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 259}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


class Worker:
    """`aether-worker run` with the null engine."""

    def __init__(self, directory: Path, server: NatsServer, model: Path, url: str) -> None:
        self.directory = directory
        directory.mkdir()
        self.settings: dict[str, Any] = {
            "name": WORKER,
            "run": server.names.run,
            "url": url,
            "key_file": str(server.directory / f"{WORKER}.seed"),
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 256,
            "engine": "null",
            "slots": 4,
            "drain_s": 0.5,
            "state_dir": str(directory / "state"),
            "null": {"tokens": COMPLETION, "tokens_per_s": 8.0},
        }
        self.process: asyncio.subprocess.Process | None = None

    @property
    def adapters(self) -> Path:
        return self.directory / "state" / "adapters"

    def log(self) -> str:
        return (self.directory / "log").read_text()

    async def start(self, *prefix: str, code: str = QUICK, arguments: tuple[str, ...] = ()) -> None:
        """With `prefix` before the command; `code` is what Python runs, and takes `arguments` off its command line."""
        file = self.directory / "worker.toml"
        file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in self.settings.items()))
        with (self.directory / "log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *prefix, sys.executable, "-c", code, "run", str(file), *arguments, stdout=log, stderr=log
            )

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@pytest.fixture
async def worker(server: NatsServer, proxy: Proxy, model: Path, tmp_path: Path) -> AsyncIterator[Worker]:
    """Behind the proxy; not started."""
    worker = Worker(tmp_path / "worker", server, model, f"ws://127.0.0.1:{proxy.port}")
    yield worker
    await worker.stop()


async def put_adapter(coordinator: Coordinator, directory: Path, mib: int = 1) -> PolicyRef:
    """Any bytes: the null engine does not read them."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(os.urandom(mib << 20))
    files = list_files(directory)
    store = coordinator.streams.artifacts
    for entry in files:
        content = (directory / entry.name).read_bytes()
        await store.put(entry.sha256, content, meta=object_meta(entry.sha256, entry.name))
    listing = file_list_bytes(files)
    digest = sha256_bytes(listing)
    await store.put(digest, listing, meta=object_meta(digest, "file list"))
    return PolicyRef(version=3, adapter=digest)


@pytest.fixture
async def coordinator(
    server: NatsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Coordinator]:
    """Takes the worker's model, and an adapter of 1 MiB is policy 3 of every episode."""
    monkeypatch.setattr(parts, "IDENTITY", compute_identity(str(model), None, "float32"))
    coordinator = await Coordinator(server, tmp_path / "run").start()
    await coordinator.reconcile()
    policy = await put_adapter(coordinator, tmp_path / "adapter")
    monkeypatch.setattr(parts, "ADAPTER", policy.adapter)
    yield coordinator
    await coordinator.kill()


async def is_there(coordinator: Coordinator) -> None:
    """Wait for the worker's heartbeats."""
    await until(lambda: any(worker.usable for worker in coordinator.fleet.workers.values()), timeout=30)


__all__ = ["COMPLETION", "WORKER", "Coordinator", "Worker", "is_there", "put_adapter", "thorough", "until"]
