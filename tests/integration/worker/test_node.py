"""`aether-worker run` as a process, against a real nats-server and the coordinator's double."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aether_common.wire import Reason, ReplyKind
from nats_server import NatsServer

from .conftest import WORKER, Coordinator, until


class Worker:
    """The process and its settings file."""

    def __init__(self, directory: Path, server: NatsServer, key: Path) -> None:
        self.directory = directory
        model = directory / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"vocab_size": 100}))
        (model / "tokenizer.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"weights")
        self.settings: dict[str, Any] = {
            "name": WORKER,
            "run": server.names.run,
            "url": server.worker_url,
            "key_file": str(key),
            "model": str(model),
            "engine": "null",
            "slots": 2,
            "prefetch": 2,
            "drain_s": 0.5,
            "state_dir": str(directory / "state"),
        }
        self.process: asyncio.subprocess.Process | None = None

    @property
    def file(self) -> Path:
        return self.directory / "worker.toml"

    def write(self) -> None:
        self.file.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in self.settings.items()))

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        self.write()
        self.process = await asyncio.create_subprocess_exec(
            Path(sys.executable).parent / "aether-worker",
            "run",
            str(self.file),
            *arguments,
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self.process

    async def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        assert self.process is not None
        async with asyncio.timeout(20):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@pytest.fixture
async def worker(server: NatsServer, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path / "worker", server, server.directory / f"{WORKER}.seed")
    yield worker
    if worker.process is not None and worker.process.returncode is None:
        worker.process.kill()
        await worker.process.wait()


async def test_register_work_and_drain(coordinator: Coordinator, worker: Worker, adapter: Path) -> None:
    await coordinator.start(window=4)
    policy = await coordinator.put_adapter(adapter, 5)
    coordinator.want(policies=[policy])
    process = await worker.start("--set", "null.tokens_per_s=40")
    await until(lambda: any(beat.adapters == [policy.adapter] for beat in coordinator.heartbeats))
    assert 0 < (coordinator.heartbeats[-1].adapter_load_s or 0.0) < 10
    registration = coordinator.registrations[0]
    assert (registration.worker, registration.engine, registration.slots, registration.window) == (WORKER, "null", 2, 4)
    assert registration.identity.vocab_size == 100
    for _ in range(4):
        await coordinator.publish(coordinator.job(policy))
    assert {reply.kind for reply in await coordinator.next_replies(4)} == {ReplyKind.OK}

    # News of a poll arrive at once: an adapter is loaded before a job asks for it.
    (adapter / "adapter_config.json").write_text("{}")
    newer = await coordinator.put_adapter(adapter, 6)
    coordinator.want(policies=[newer, policy])
    await until(lambda: sorted(coordinator.heartbeats[-1].adapters) == sorted([newer.adapter, policy.adapter]))

    # A coordinator that was started again does not know the worker.
    coordinator.registrations.clear()
    await until(lambda: len(coordinator.registrations) == 1)
    assert coordinator.registrations[0].incarnation == registration.incarnation

    long = [coordinator.job(newer, sampling={"max_tokens": 8}) for _ in range(3)]
    for job in long:
        await coordinator.publish(job)
    await until(lambda: len(coordinator.heartbeats[-1].running) > 0)
    process.send_signal(signal.SIGTERM)
    code, errors = await worker.end()
    assert code == 0, errors
    assert "drained" in errors
    replies = await coordinator.next_replies(3)
    assert {reply.reason for reply in replies} <= {None, Reason.DRAIN}
    last = coordinator.heartbeats[-1]
    assert (last.draining, last.running) == (True, {})
    assert (await coordinator.pending())[0] == 0
    log = [json.loads(line) for line in (worker.directory / "state/logs/worker.jsonl").read_text().splitlines()]
    assert {entry["worker"] for entry in log} == {WORKER}


async def test_a_worker_outlives_the_server(coordinator: Coordinator, worker: Worker, server: NatsServer) -> None:
    await coordinator.start(window=4)
    server.kill()
    await worker.start()
    await asyncio.sleep(1.5)
    assert worker.process is not None
    assert worker.process.returncode is None
    server.start()
    await until(lambda: len(coordinator.registrations) == 1)
    await until(lambda: len(coordinator.heartbeats) > 2)
    await asyncio.to_thread(server.restart)
    await coordinator.bus.connected.wait()
    count = len(coordinator.heartbeats)
    await until(lambda: len(coordinator.heartbeats) > count)
    worker.process.send_signal(signal.SIGTERM)
    assert (await worker.end())[0] == 0


async def test_a_refused_registration_says_why(coordinator: Coordinator, worker: Worker) -> None:
    await coordinator.start(window=4)
    coordinator.refuse = "dtype: the run has 'float32', here it is 'bfloat16'"
    await worker.start()
    code, errors = await worker.end()
    assert code == 3
    assert f"the coordinator refuses worker {WORKER}: {coordinator.refuse}" in errors
    assert "Traceback" not in errors


async def test_a_revoked_key_ends_the_worker(coordinator: Coordinator, worker: Worker, server: NatsServer) -> None:
    await coordinator.start(window=4)
    await worker.start()
    await until(lambda: len(coordinator.heartbeats) > 0)
    server.revoke_worker(WORKER)
    code, errors = await worker.end()
    assert code == 6
    assert "refuses the key" in errors
    assert "Traceback" not in errors
    await worker.start()
    assert (await worker.end())[0] == 6


async def test_a_superseded_worker_hands_back_and_ends(coordinator: Coordinator, worker: Worker, adapter: Path) -> None:
    await coordinator.start(window=4)
    policy = await coordinator.put_adapter(adapter)
    await worker.start("--set", "null.tokens_per_s=0.1")
    await coordinator.publish(coordinator.job(policy))
    await until(lambda: bool(coordinator.heartbeats and coordinator.heartbeats[-1].running))
    coordinator.want(superseded=True)
    code, errors = await worker.end()
    assert code == 10
    assert "another worker registered as w1" in errors
    (reply,) = await coordinator.next_replies(1)
    assert (reply.kind, reply.reason) == (ReplyKind.RETURNED, Reason.SUPERSEDED)


async def test_the_coordinator_can_ask_to_drain(coordinator: Coordinator, worker: Worker) -> None:
    await coordinator.start(window=4)
    await worker.start()
    await until(lambda: len(coordinator.heartbeats) > 0)
    coordinator.want(drain=True)
    assert (await worker.end())[0] == 0


async def test_a_state_directory_serves_one_worker(coordinator: Coordinator, worker: Worker) -> None:
    await coordinator.start(window=4)
    first = await worker.start()
    await until(lambda: len(coordinator.heartbeats) > 0)
    await worker.start()
    code, errors = await worker.end()
    assert code == 4
    assert "is used by another aether-worker" in errors
    first.terminate()
    assert await first.wait() == 0
