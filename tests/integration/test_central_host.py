"""A run on a nats-server of its own: `nats init`, TLS, `worker add`, a new certificate while it runs."""

import ssl
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from aether_common.files import write_durably
from nats_server import BINARY, free_port
from tiny_run import TinyRun

SERVER_START_S = 10


def start(configuration: Path, port: int) -> subprocess.Popen[bytes]:
    with configuration.with_name("nats-server.log").open("ab") as log:
        process = subprocess.Popen([BINARY, "-c", configuration], stdout=log, stderr=log)
    deadline = time.monotonic() + SERVER_START_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            ssl.get_server_certificate(("127.0.0.1", port))
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(configuration.with_name("nats-server.log").read_text())


@pytest.mark.long
def test_a_run_over_tls_on_a_server_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    directory, port = tmp_path / "nats", free_port()
    run = TinyRun(tmp_path, tiny_model, steps=1, nats={"directory": str(directory)})
    before = run.command("aether-coordinator", "check", str(tmp_path / "server.toml"))
    assert f"make it with `aether-coordinator nats init {directory} --run tiny`" in before.stdout
    ports = ["--port", str(free_port()), "--websocket-port", str(port), "--monitor-port", str(free_port())]
    options = ["--run", "tiny", "--host", "localhost", "--self-signed", *ports]
    made = run.command("aether-coordinator", "nats", "init", str(directory), *options)
    assert made.returncode == 0, made.stderr
    server = start(directory / "nats-server.conf", port)
    try:
        worker = run.add_worker("w1")
        lines = worker.read_text()
        assert f'url = "wss://localhost:{port}"' in lines
        assert f'tls.ca_file = "{directory / "ca.pem"}"' in lines
        run.start_coordinator()
        run.start_worker("w1")
        run.wait(lambda status: status["workers"], 60, "the worker")
        first = ssl.get_server_certificate(("127.0.0.1", port))
        renewed = run.command("aether-coordinator", "nats", "renew", str(directory))
        assert renewed.stdout.strip() == f"{directory / 'server.pem'} is new"
        reloaded = run.command("aether-coordinator", "nats", "reload", "--config", str(tmp_path / "server.toml"))
        assert reloaded.returncode == 0, reloaded.stderr
        time.sleep(0.3)
        assert ssl.get_server_certificate(("127.0.0.1", port)) != first
        # A file that nats-server would refuse does not reach it.
        good = (directory / "nats-server.conf").read_bytes()
        write_durably(directory / "nats-server.conf", good + b"nonsense: 1\n")
        refused = run.command("aether-coordinator", "nats", "reload", "--config", str(tmp_path / "server.toml"))
        assert refused.returncode == 2
        assert "nats-server would refuse its files, so it was not told" in refused.stderr
        write_durably(directory / "nats-server.conf", good)
        run.finish(240)
        assert len(run.steps()) == 1
    finally:
        run.close()
        server.terminate()
        server.wait(10)
