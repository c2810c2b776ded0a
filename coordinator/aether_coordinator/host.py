"""A nats-server that runs on this host on its own: the files that `nats init` writes, and who uses them.

The operator starts it (systemd, a container); the coordinator connects to it and the `worker` commands edit
its `workers.conf`.
"""

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from aether_common.bus import check_host, is_loopback
from aether_common.errors import BusError, ConfigError
from aether_common.files import make_directory, write_durably
from aether_common.names import Names

from aether_coordinator import certificates
from aether_coordinator.accounts import Websocket, make_key, public_key, server_configuration
from aether_coordinator.embedded import EmbeddedServer, server_binary, signal_reload
from aether_coordinator.settings import ServerSettings
from aether_coordinator.workers_conf import write_workers

CONFIGURATION, WORKERS, KEY, ADDRESSES, PID = (
    "nats-server.conf",
    "workers.conf",
    "coordinator.nk",
    "host.json",
    "nats-server.pid",
)


class HostedServer:
    """What `nats init` wrote into a directory. Raises `ConfigError` when that is missing or of another run."""

    def __init__(self, directory: Path, run: str | None = None, public_url: str | None = None) -> None:
        self.directory = directory
        self.configuration = directory / CONFIGURATION
        self.workers = directory / WORKERS
        self.key_file = directory / KEY
        file = directory / ADDRESSES
        try:
            found = json.loads(file.read_text())
            self.run: str = found["run"]
            self.url: str = found["url"]
            self.websocket_url: str = public_url or found["websocket_url"]
            self.self_signed: list[str] = found["self_signed"]
        except FileNotFoundError:
            raise ConfigError(
                f"{file} does not exist: make it with `aether-coordinator nats init {directory} --run {run or 'NAME'}`"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: cannot be read: {type(error).__name__}: {error}") from error
        if run is not None and self.run != run:
            raise ConfigError(f"nats.directory = '{directory}' is of run {self.run!r}, not {run!r}: make one for it")

    def next_steps(self) -> str:
        """For the operator who just made it."""
        binary = "nats-server"
        with suppress(BusError):
            binary = server_binary()
        trust = f"\nWorkers need {self.ca_file} too; `worker add` says where it goes.\n" if self.ca_file else ""
        return f"""\
{self.directory} is ready. Start the server, and keep it running:

  {binary} -c {self.configuration}

In server.toml:

  [nats]
  directory = "{self.directory}"

Then add workers, which will dial {self.websocket_url}:

  aether-coordinator worker add NAME --config server.toml
{trust}"""

    @property
    def ca_file(self) -> Path | None:
        """The private authority that workers must trust; None where their system's do."""
        return self.directory / certificates.AUTHORITY if self.self_signed else None

    def reload(self) -> bool:
        """Let a running server read its configuration again. False when none runs."""
        return signal_reload(self.directory / PID)


def server_of(settings: ServerSettings) -> EmbeddedServer | HostedServer | None:
    """The run's nats-server, its files ready to be edited; None when it is configured elsewhere.

    Both have `workers` (the file), `websocket_url`, `ca_file` and `reload`.
    """
    if settings.nats.directory is not None:
        return HostedServer(settings.nats.directory, settings.run, settings.nats.public_url)
    if settings.nats.url is not None:
        return None
    server = EmbeddedServer(settings)
    server.prepare()
    return server


def external_server(settings: ServerSettings) -> tuple[str, Path]:
    """URL and key file of the coordinator at a server that is not embedded. Raises `ConfigError`."""
    nats = settings.nats
    if nats.directory is None:
        assert nats.url is not None and nats.key_file is not None
        return nats.url, nats.key_file
    server = HostedServer(nats.directory, settings.run)
    return nats.url or server.url, nats.key_file or server.key_file


def write_host(
    directory: Path,
    run: str,
    *,
    hosts: Sequence[str] = (),
    port: int = 4222,
    websocket_port: int = 8443,
    monitor_port: int = 8222,
    listen: str | None = None,
    self_signed: bool = False,
    certificate: Path | None = None,
    private_key: Path | None = None,
    client_ca: Path | None = None,
    max_storage_mib: int = 4096,
    force: bool = False,
) -> HostedServer:
    """Write everything that nats-server needs for a run. Raises `ConfigError` before anything is written."""
    names = Names(run)
    directory = directory.expanduser().resolve()
    if (certificate is None) != (private_key is None):
        raise ConfigError("--certificate and --private-key belong together: give both or neither")
    if self_signed and certificate:
        raise ConfigError("--self-signed and --certificate exclude each other: give one")
    encrypted = self_signed or certificate is not None
    if client_ca is not None and not encrypted:
        raise ConfigError("--client-ca needs TLS: give --self-signed, or --certificate and --private-key")
    for option, path in (("--certificate", certificate), ("--private-key", private_key), ("--client-ca", client_ca)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{option} {path}: no such file")
    try:
        hosts = [check_host(host) for host in hosts]
    except ValueError as error:
        raise ConfigError(f"--host: {error}") from None
    if self_signed and not hosts:
        raise ConfigError("--self-signed needs --host: the name or address that workers dial, once for each")
    address = listen or ("0.0.0.0" if encrypted else "127.0.0.1")
    if not encrypted and not is_loopback(address):
        raise ConfigError(
            f"--listen {address} without TLS would let keys and jobs travel unencrypted: give --self-signed, or "
            "--certificate and --private-key; behind a proxy on this host leave --listen out"
        )
    server, server_key = certificate, private_key
    made = [CONFIGURATION, WORKERS, KEY, ADDRESSES]
    if self_signed:
        server, server_key = directory / certificates.SERVER, directory / certificates.SERVER_KEY
        made += [certificates.AUTHORITY, certificates.AUTHORITY_KEY, certificates.SERVER, certificates.SERVER_KEY]
    if not force and (there := [name for name in made if (directory / name).exists()]):
        raise ConfigError(
            f"{directory / there[0]} exists: choose another directory, or replace it by --force (every key of the run "
            "is then made anew: workers must be added again)"
        )
    if encrypted:
        assert server is not None
        host = hosts[0] if hosts else certificates.first_name(server)
        websocket_url = certificates.websocket_url(host, websocket_port)
    else:
        # A proxy in front has its own port, most often that of HTTPS.
        websocket_url = certificates.websocket_url(hosts[0]) if hosts else f"ws://127.0.0.1:{websocket_port}"
    make_directory(directory, mode=0o700)
    if self_signed:
        certificates.make_authority(directory, run)
        certificates.issue(directory, hosts)
    write_durably(directory / KEY, make_key().seed.encode() + b"\n", mode=0o600)
    write_workers(directory / WORKERS, names, [])
    text = server_configuration(
        names,
        directory=directory,
        coordinator=public_key((directory / KEY).read_text().strip()),
        port=port,
        websocket=Websocket(websocket_port, address, _absolute(server), _absolute(server_key), _absolute(client_ca)),
        max_storage_mib=max_storage_mib,
        monitor_port=monitor_port,
        pid_file=directory / PID,
    )
    write_durably(directory / CONFIGURATION, text.encode(), mode=0o600)
    write_durably(
        directory / ADDRESSES,
        _addresses(run, f"nats://127.0.0.1:{port}", websocket_url, hosts if self_signed else []),
        mode=0o600,
    )
    return HostedServer(directory, run)


def _addresses(run: str, url: str, websocket_url: str, self_signed: Sequence[str]) -> bytes:
    """What the commands must know about the server; its configuration says it in other words."""
    found = {"run": run, "url": url, "websocket_url": websocket_url, "self_signed": list(self_signed)}
    return json.dumps(found, indent=2).encode() + b"\n"


def renew(directory: Path, hosts: Sequence[str] = ()) -> HostedServer:
    """Make the server's certificate again, for other hosts if given. Raises `ConfigError` unless it is self-signed."""
    directory = directory.expanduser().resolve()
    server = HostedServer(directory)
    if not server.self_signed:
        raise ConfigError(
            f"{directory} was not made with --self-signed: replace the files that {server.configuration} names, then "
            "run `aether-coordinator nats reload`"
        )
    try:
        named = [check_host(host) for host in hosts] or server.self_signed
    except ValueError as error:
        raise ConfigError(f"--host: {error}") from None
    certificates.issue(directory, named)
    if hosts:
        port = urlsplit(server.websocket_url).port or 443
        server.websocket_url, server.self_signed = certificates.websocket_url(named[0], port), named
        addresses = _addresses(server.run, server.url, server.websocket_url, named)
        write_durably(directory / ADDRESSES, addresses, mode=0o600)
    return server


def reload(settings: ServerSettings) -> str:
    """Let the run's server read its files again, if it would accept them; says what was done. Raises `ConfigError`."""
    server = server_of(settings)
    if server is None:
        raise ConfigError("nats.url names a server that is configured elsewhere: reload it there")
    tried = subprocess.run(
        [server_binary(), "-t", "-c", str(server.configuration)], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        raise ConfigError(f"nats-server would refuse its files, so it was not told: {tried.stderr.strip()}")
    if not server.reload():
        raise ConfigError(f"no nats-server of {server.directory} is running: it reads its files when it starts")
    return f"nats-server reads {server.configuration} and its certificates again"


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()
