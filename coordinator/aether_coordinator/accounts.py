"""The nats-server configuration of a run: two accounts, one nkey per worker, least privilege.

Workers live in an account without JetStream and import exactly the services that they need; in a
single account, reply subjects (which are not permission-checked) would reach JetStream's whole
interface. Imports that write contain a wildcard: literal ones could be forged through reply subjects.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import nkeys
from aether_common.bus import in_url
from aether_common.names import Names


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


@dataclass(frozen=True, slots=True)
class Websocket:
    """Where workers connect: plain on loopback, or by TLS with these PEM files."""

    port: int
    host: str = "127.0.0.1"
    certificate: Path | None = None
    private_key: Path | None = None
    client_ca: Path | None = None
    """Whoever connects must show a certificate that this authority signed."""

    def listen(self) -> str:
        return f"{in_url(self.host)}:{self.port}"

    def tls(self) -> str:
        """The block's encryption, in the words of nats-server."""
        if self.certificate is None:
            return "no_tls: true"
        client = f'; ca_file: "{self.client_ca}"; verify: true' if self.client_ca else ""
        return f'tls {{ cert_file: "{self.certificate}"; key_file: "{self.private_key}"{client} }}'


def server_configuration(
    names: Names,
    *,
    directory: Path,
    coordinator: str,
    port: int,
    websocket: Websocket,
    max_storage_mib: int,
    monitor_port: int | None = None,
    pid_file: Path | None = None,
) -> str:
    """The text of `nats-server.conf`; `coordinator` is its public key. `workers.conf` lies beside it."""
    monitor = f'\n# Health and figures, on loopback only.\nhttp: "127.0.0.1:{monitor_port}"\n' if monitor_port else ""
    pid = f'\n# Commands that change workers.conf signal this process.\npid_file: "{pid_file}"\n' if pid_file else ""
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
# After a change: kill -HUP (a broken file keeps the old configuration). Ports and store_dir need a restart.
server_name: aether-{run}

# The coordinator connects here, on loopback only.
listen: "127.0.0.1:{port}"
{monitor}{pid}
# Limits of one connection, and how fast a dead link is noticed (20 s, twice). Who does not read what is sent to it
# for 10 s, or leaves 64 MB unread, is disconnected.
max_payload: 8MB
max_pending: 64MB
write_deadline: "10s"
max_subscriptions: 100
ping_interval: "20s"
ping_max: 2

# Messages and artefacts on their way between machines. What is lost here, the coordinator puts here again.
# max_file: at least nats.max_storage_mib of server.toml.
jetstream {{ store_dir: "{directory / "jetstream"}", max_mem: 64MB, max_file: {max_storage_mib}MB }}

# Workers connect here, by WebSocket. A new certificate in the same files serves new connections after kill -HUP.
websocket {{
  listen: "{websocket.listen()}"
  {websocket.tls()}
  handshake_timeout: "5s"
  compression: false
}}

accounts {{
  # The coordinator's account owns JetStream and offers the workers the services that they need, and nothing else.
  CORE {{
    jetstream: enabled
    users: [ {{ nkey: {coordinator}, allowed_connection_types: ["STANDARD"] }} ]
    exports: [
{export_lines}
    ]
  }}
  # The workers' account has no JetStream; what is not imported here does not exist for them.
  WORKERS {{
    # Of all workers together; subscriptions are those of one connection (a worker needs six).
    limits {{ max_connections: 2000, max_subscriptions: 32, max_payload: 4MB }}
    include "workers.conf"
    imports: [
{import_lines}
    ]
  }}
}}
"""
