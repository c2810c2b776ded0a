"""`aether-worker check`: each line ok or what to do."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aether_coordinator import certificates
from aether_coordinator.accounts import make_key
from aiohttp import web
from nats_server import NatsServer, free_port

from .conftest import WORKER, Coordinator
from .test_node import Worker


async def run_check(worker: Worker, *overrides: str) -> tuple[int, dict[str, str]]:
    """Exit code and the lines by the name of what was checked."""
    worker.write()
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).parent / "aether-worker",
        "check",
        str(worker.file),
        *(part for override in overrides for part in ("--set", override)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert errors == b""
    assert process.returncode is not None
    lines = [line for line in output.decode().splitlines() if line and not line.startswith(" ")]
    return process.returncode, {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


LOCAL = ["settings", "versions", "key", "model", "engine", "state_dir"]


async def test_all_is_well(server: NatsServer, coordinator: Coordinator, tmp_path: Path) -> None:
    await coordinator.start(window=1)
    worker = Worker(tmp_path / "worker", server, server.directory / f"{WORKER}.seed")
    code, lines = await run_check(worker, "adapter_cache_mib=1")
    assert list(lines) == [*LOCAL, "dns", "tcp", "tls", "websocket", "credentials", "clock", "coordinator"]
    assert all(line.startswith("ok") for line in lines.values()), lines
    assert code == 0
    assert "accepts the key of w1" in lines["credentials"]
    assert "it would take this worker, protocol 1" in lines["coordinator"]
    assert "python 3." in lines["versions"]
    # It asked only.
    assert [registration.check_only for registration in coordinator.registrations] == [True]


async def test_what_is_wrong_is_said(server: NatsServer, tmp_path: Path) -> None:
    worker = Worker(tmp_path / "worker", server, server.directory / f"{WORKER}.seed")
    (tmp_path / "other.seed").write_text("SU" + "A" * 56)
    (tmp_path / "other.seed").chmod(0o644)
    (tmp_path / "file").touch()
    code, lines = await run_check(
        worker,
        f"key_file={tmp_path / 'other.seed'}",
        f"model={tmp_path}",
        f"state_dir={tmp_path / 'file'}",
        "engine=vllm",
        "vllm.python=/nowhere/python",
    )
    assert code == 1
    assert "readable by others: chmod 600" in lines["key"]
    assert "no config.json" in lines["model"]
    assert "vllm.python = '/nowhere/python' cannot be started" in lines["engine"]
    assert "cannot be written" in lines["state_dir"]
    code, lines = await run_check(worker, "adapter_cache_mib=1000000000")
    assert code == 1
    assert "lower adapter_cache_mib" in lines["state_dir"]
    code, lines = await run_check(worker, "adapter_cache_mib=1", "slots=0")
    assert "slots = 0" in lines["settings"]
    assert code == 1


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats", hosts=["localhost"]) as server:
        server.add_worker(WORKER)
        yield server


@asynccontextmanager
async def forbidding_proxy() -> AsyncIterator[str]:
    """The ws:// URL of an HTTP server that answers 403."""

    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=403)

    app = web.Application()
    app.router.add_get("/", refuse)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"ws://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def relay(address: str, port: int) -> AsyncIterator[int]:
    """A port at another address of this machine that leads to `port`."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    async with await asyncio.start_server(serve, address, 0) as listening:
        yield listening.sockets[0].getsockname()[1]


async def test_ten_obstacles_and_ten_messages(tls_server: NatsServer, tmp_path: Path) -> None:
    """Each is found by the step that it belongs to, and nothing is tried after it."""
    server = tls_server
    worker = Worker(tmp_path / "worker", server, server.directory / f"{WORKER}.seed")
    trust = f"tls.ca_file={server.directory / 'ca.pem'}"
    bus = server.coordinator_bus()
    await bus.connect()
    coordinator = Coordinator(bus, server.names)
    await coordinator.start(window=1)
    messages: list[str] = []

    async def obstacle(step: str, message: str, *overrides: str) -> None:
        code, lines = await run_check(worker, "adapter_cache_mib=1", *overrides)
        assert code == 1 and list(lines)[-1] == step, lines
        assert lines[step].startswith("FAILED") and message in lines[step], lines[step]
        assert all(line.startswith("ok") for name, line in lines.items() if name != step), lines
        messages.append(lines[step])

    code, lines = await run_check(worker, "adapter_cache_mib=1", trust)
    assert code == 0 and "TLSv1.3, certificate for localhost good for " in lines["tls"], lines

    # The way.
    await obstacle("dns", "has no address", trust, "url=wss://no-such-host.invalid")
    await obstacle("tcp", "nothing listens at localhost:", trust, f"url=wss://localhost:{free_port()}")
    await obstacle("tls", "does not speak TLS at that port", trust, f"url=wss://localhost:{server.port}")
    certificates.issue(server.directory, ["localhost"], days=-1)
    server.restart()
    await obstacle("tls", "its certificate has expired: renew it on the server", trust)
    certificates.issue(server.directory, ["localhost"])
    server.restart()
    async with relay("127.0.0.2", server.websocket_port) as port:
        await obstacle("tls", "is for another name than '127.0.0.2'", trust, f"url=wss://127.0.0.2:{port}")
    async with forbidding_proxy() as url:
        await obstacle("websocket", "answers HTTP 403 instead of opening a WebSocket: the proxy wants", f"url={url}")

    # The key.
    (tmp_path / "unknown.seed").write_text(make_key().seed)
    (tmp_path / "unknown.seed").chmod(0o600)
    await obstacle("credentials", "is not known there", trust, f"key_file={tmp_path / 'unknown.seed'}")
    code, lines = await run_check(worker, "adapter_cache_mib=1", trust)
    assert code == 0, lines

    # What the run says.
    coordinator.refuse = "it speaks protocol 1..1, the coordinator 2..3: install the same release"
    await obstacle("coordinator", "would refuse this worker: it speaks protocol 1..1", trust)
    coordinator.refuse = "it serves another model: weights: the run has 'a', here it is 'b'"
    await obstacle("coordinator", "would refuse this worker: it serves another model: weights", trust)
    await bus.close()
    await obstacle("coordinator", "the coordinator of run test does not answer: is it running?", trust)

    server.revoke_worker(WORKER)
    await asyncio.sleep(0.2)
    await obstacle("credentials", "was accepted before and is refused now: it was revoked", trust)
    assert len(set(messages)) == len(messages) == 11


async def test_a_wrong_authority_is_told_by_check_and_by_run(tmp_path: Path) -> None:
    certificates.make_authority(tmp_path, "another")
    with NatsServer(tmp_path / "nats", hosts=["localhost"]) as server:
        worker = Worker(tmp_path / "worker", server, server.add_worker(WORKER))
        trust = f"tls.ca_file={tmp_path / 'ca.pem'}"
        code, lines = await run_check(worker, "adapter_cache_mib=1", trust)
        assert code == 1
        assert "from another authority than that of tls.ca_file" in lines["tls"]
        code, lines = await run_check(worker, "adapter_cache_mib=1", f"tls.ca_file={tmp_path / 'none.pem'}")
        assert lines["tls"].startswith(f"FAILED  tls.ca_file = '{tmp_path / 'none.pem'}' cannot be read")
        code, lines = await run_check(worker, "adapter_cache_mib=1", f"tls.ca_file={server.directory / 'ca.pem'}")
        assert code == 1 and "the coordinator of run test does not answer" in lines["coordinator"]
        assert lines["credentials"] == f"ok      {server.worker_url} accepts the key of w1"
        process = await worker.start("--set", trust)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(20):
                line = (await process.stderr.readline()).decode()
        finally:
            process.terminate()
        assert (await worker.end())[0] == 0
        assert f"from another authority than that of tls.ca_file = '{tmp_path / 'ca.pem'}': trying again" in line
