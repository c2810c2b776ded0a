"""`aether-worker check`: each line ok or what to do."""

import asyncio
import sys
from pathlib import Path

from aether_coordinator import certificates
from nats_server import NatsServer

from .conftest import WORKER
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


async def test_all_is_well(server: NatsServer, tmp_path: Path) -> None:
    worker = Worker(tmp_path / "worker", server, server.directory / f"{WORKER}.seed")
    code, lines = await run_check(worker, "adapter_cache_mib=1")
    assert list(lines) == ["settings", "key", "model", "engine", "state_dir", "connection"]
    assert all(line.startswith("ok") for line in lines.values()), lines
    assert code == 0
    assert "accepts the key of w1" in lines["connection"]


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
    server.revoke_worker(WORKER)
    code, lines = await run_check(worker, "adapter_cache_mib=1")
    assert code == 1
    assert "refuses the key of w1" in lines["connection"]
    server.kill()
    code, lines = await run_check(worker, "adapter_cache_mib=1", "slots=0")
    assert "slots = 0" in lines["settings"]
    assert code == 1


async def test_a_wrong_authority_is_told_by_check_and_by_run(tmp_path: Path) -> None:
    certificates.make_authority(tmp_path, "another")
    with NatsServer(tmp_path / "nats", hosts=["localhost"]) as server:
        worker = Worker(tmp_path / "worker", server, server.add_worker(WORKER))
        trust = f"tls.ca_file={tmp_path / 'ca.pem'}"
        code, lines = await run_check(worker, "adapter_cache_mib=1", trust)
        assert code == 1
        assert "from another authority than that of tls.ca_file" in lines["connection"]
        code, lines = await run_check(worker, "adapter_cache_mib=1", f"tls.ca_file={tmp_path / 'none.pem'}")
        assert lines["connection"].startswith(f"FAILED  tls.ca_file = '{tmp_path / 'none.pem'}' cannot be read")
        code, lines = await run_check(worker, "adapter_cache_mib=1", f"tls.ca_file={server.directory / 'ca.pem'}")
        assert code == 0
        assert lines["connection"] == f"ok      {server.worker_url} accepts the key of w1"
        process = await worker.start("--set", trust)
        assert process.stderr is not None
        try:
            async with asyncio.timeout(20):
                line = (await process.stderr.readline()).decode()
        finally:
            process.terminate()
        assert (await worker.end())[0] == 0
        assert f"from another authority than that of tls.ca_file = '{tmp_path / 'ca.pem'}': trying again" in line
