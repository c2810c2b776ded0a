"""The nats-server configuration of a run: two accounts, one nkey per worker, least privilege.

Workers live in an account without JetStream and import exactly the services that they need; in a
single account, reply subjects (which are not permission-checked) would reach JetStream's whole
interface. Imports that write contain a wildcard: literal ones could be forged through reply subjects.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import nkeys
from aether_common.errors import ConfigError
from aether_common.files import write_durably
from aether_common.names import Names, check_token

_USER = re.compile(r"nkey: (U[A-Z2-7]{55})(?:(?!nkey: ).)*?# worker ([a-z0-9-]{1,64})\s", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Key:
    """An nkey pair of a user: the public key goes to the server, the seed stays with its owner."""

    public: str
    seed: str


def make_key() -> Key:
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    pair = nkeys.from_seed(bytearray(seed))
    return Key(public=bytes(pair.public_key).decode(), seed=bytes(seed).decode())


def public_key(seed: str) -> str:
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def server_configuration(
    names: Names,
    *,
    directory: Path,
    coordinator: str,
    port: int,
    websocket_port: int,
    max_storage_mib: int,
    monitor_port: int | None = None,
) -> str:
    """The text of `nats-server.conf`; `coordinator` is its public key. `workers.conf` lies beside it."""
    monitor = f'\n# Health and figures, on loopback only.\nhttp: "127.0.0.1:{monitor_port}"\n' if monitor_port else ""
    run = names.run
    exports = [
        (names.next_api, True),
        (names.ack_api, False),
        (names.all_replies, False),
        (names.artifact_get_api, True),
        (names.artifact_meta_api(), False),
        *((names.fleet(kind), False) for kind in ("hb", "reg", "poll")),
    ]
    export_lines = "\n".join(
        f'      {{service: "{subject}"{", response_type: stream" if stream else ""}, accounts: [WORKERS]}}'
        for subject, stream in exports
    )
    imports = [
        (names.next_api, f', to: "{names.next()}"'),
        (names.ack_api, ""),
        (names.all_replies, ""),
        (names.artifact_get_api, f', to: "{names.artifact_get}"'),
        (names.artifact_meta_api(), f', to: "{names.artifact_meta()}"'),
        *((names.fleet(kind), ", share: true") for kind in ("hb", "reg", "poll")),
    ]
    import_lines = "\n".join(
        f'      {{service: {{account: CORE, subject: "{subject}"}}{mapping}}}' for subject, mapping in imports
    )
    return f"""\
# nats-server of the Aether RL run {run}. Written by aether-coordinator.
server_name: aether-{run}

# The coordinator connects here, on loopback only.
listen: "127.0.0.1:{port}"
{monitor}
# Limits of one connection, and how fast a dead link is noticed (20 s, twice).
max_payload: 8MB
max_pending: 64MB
max_subscriptions: 100
ping_interval: "20s"
ping_max: 2

# Messages and artefacts on their way between machines.
jetstream {{ store_dir: "{directory / "jetstream"}", max_mem: 64MB, max_file: {max_storage_mib}MB }}

# Workers connect here.
websocket {{ listen: "127.0.0.1:{websocket_port}", no_tls: true, handshake_timeout: "5s", compression: false }}

accounts {{
  # The coordinator's account owns JetStream and offers the workers what they need.
  CORE {{
    jetstream: enabled
    users: [ {{ nkey: {coordinator}, allowed_connection_types: ["STANDARD"] }} ]
    exports: [
{export_lines}
    ]
  }}
  # The workers' account has no JetStream; what is not imported here does not exist for them.
  WORKERS {{
    limits {{ max_connections: 2000, max_payload: 4MB }}
    include "workers.conf"
    imports: [
{import_lines}
    ]
  }}
}}
"""


def worker_user(names: Names, worker: str, public: str) -> str:
    """One user of `workers.conf`: what this worker may publish, and its own inbox."""
    publish = [
        names.next(worker),
        names.ack(worker),
        names.reply(worker, "*"),
        names.artifact_get,
        names.artifact_meta(),
        *(names.fleet(kind, worker) for kind in ("hb", "reg", "poll")),
    ]
    allowed = ", ".join(f'"{subject}"' for subject in publish)
    return (
        f'  {{ nkey: {public}, allowed_connection_types: ["WEBSOCKET"], permissions: {{\n'
        f"      publish: {{ allow: [ {allowed} ] }}\n"
        f'      subscribe: {{ allow: [ "{names.inbox(worker)}.>" ] }} }} }} # worker {worker}\n'
    )


def read_workers(path: Path) -> list[tuple[str, str]]:
    """(worker, public key) of every user in a `workers.conf`. Raises `ConfigError` when it is no text."""
    if not path.is_file():
        return []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return [(worker, public) for public, worker in _USER.findall(text)]


def write_workers(path: Path, names: Names, workers: list[tuple[str, str]]) -> None:
    """Replace `workers.conf`; the server reads it at start and on SIGHUP."""
    users = "".join(worker_user(names, worker, public) for worker, public in workers)
    write_durably(path, f"users: [\n{users}]\n".encode(), mode=0o600)


def add_worker(path: Path, names: Names, worker: str, public: str) -> None:
    """Append a worker. Raises `ConfigError` when it has a key already."""
    check_token(worker, "worker name")
    workers = read_workers(path)
    if worker in dict(workers):
        raise ConfigError(f"worker {worker!r} has a key already ({path}): choose another name")
    write_workers(path, names, [*workers, (worker, public)])
