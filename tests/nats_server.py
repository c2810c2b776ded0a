"""A real nats-server with the configuration of `aether_coordinator.accounts`, for tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from aether_common.bus import Bus
from aether_common.files import write_durably
from aether_common.names import Names
from aether_common.tls import Tls
from aether_coordinator import certificates
from aether_coordinator.accounts import Key, Websocket, make_key, server_configuration
from aether_coordinator.workers_conf import WorkerKey, read_workers, write_workers

BINARY = Path(sys.executable).parent / "nats-server"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def add_worker(path: Path, names: Names, worker: str, public: str) -> None:
    """Append a key to a `workers.conf` that nobody else changes."""
    write_workers(path, names, [*read_workers(path), WorkerKey(worker, public)])


class NatsServer:
    """Both ports and the store survive `kill` and `restart`. Use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        run: str = "test",
        max_storage_mib: int = 512,
        hosts: Sequence[str] = (),
        client_ca: Path | None = None,
    ) -> None:
        """With `hosts` workers connect by TLS, with a certificate for them from an authority in `directory`."""
        self.directory = directory
        self.hosts, self._client_ca = hosts, client_ca
        self.names = Names(run)
        self.port, self.websocket_port = free_port(), free_port()
        self.coordinator: Key = make_key()
        self._max_storage_mib = max_storage_mib
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def worker_url(self) -> str:
        if self.hosts:
            return f"wss://{self.hosts[0]}:{self.websocket_port}"
        return f"ws://127.0.0.1:{self.websocket_port}"

    @property
    def tls(self) -> Tls:
        """What a worker needs to trust this server."""
        return Tls(self.directory / "ca.pem") if self.hosts else Tls()

    @property
    def workers_conf(self) -> Path:
        return self.directory / "workers.conf"

    def __enter__(self) -> "NatsServer":
        self.directory.mkdir(parents=True, exist_ok=True)
        websocket = Websocket(self.websocket_port)
        if self.hosts:
            certificates.prepare(self.directory, self.names.run, self.hosts)
            pair = (self.directory / "server.pem", self.directory / "server.key")
            websocket = Websocket(self.websocket_port, "127.0.0.1", *pair, self._client_ca)
        (self.directory / "nats-server.conf").write_text(
            server_configuration(
                self.names,
                directory=self.directory,
                coordinator=self.coordinator.public,
                port=self.port,
                websocket=websocket,
                max_storage_mib=self._max_storage_mib,
            )
        )
        write_workers(self.workers_conf, self.names, read_workers(self.workers_conf))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.directory / "nats-server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [BINARY, "-c", self.directory / "nats-server.conf"], stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + 10
        for port in (self.port, self.websocket_port):
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise RuntimeError((self.directory / "nats-server.log").read_text()[-2000:])
                time.sleep(0.02)

    def kill(self) -> None:
        """End it like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def reload(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGHUP)

    def add_worker(self, worker: str) -> Path:
        """Give a worker a key; returns the file with its seed."""
        key = make_key()
        add_worker(self.workers_conf, self.names, worker, key.public)
        path = self.directory / f"{worker}.seed"
        write_durably(path, key.seed.encode(), mode=0o600)
        if self._process is not None:
            self.reload()
        return path

    def revoke_worker(self, worker: str) -> None:
        kept = [entry for entry in read_workers(self.workers_conf) if entry.worker != worker]
        write_workers(self.workers_conf, self.names, kept)
        self.reload()

    def coordinator_bus(self) -> Bus:
        """The coordinator's connection, not connected yet."""
        return Bus(self.url, self.coordinator.seed, "_INBOX_coordinator", "coordinator")

    def worker_bus(self, worker: str) -> Bus:
        """A worker's connection, not connected yet; the worker must have a key."""
        seed = (self.directory / f"{worker}.seed").read_text()
        return Bus(self.worker_url, seed, self.names.inbox(worker), worker, self.tls)
