"""Worker credentials: an nkey per worker, its seed in the run directory, its user in `workers.conf`."""

from pathlib import Path

from aether_common.errors import ConfigError
from aether_common.files import make_directory, write_durably
from aether_common.names import Names, check_token

from aether_coordinator.accounts import add_worker, make_key
from aether_coordinator.embedded import EmbeddedServer
from aether_coordinator.settings import ServerSettings


def add_worker_key(settings: ServerSettings, name: str) -> tuple[Path, str, bool]:
    """Make a key for worker `name` and let a running server accept it.

    Returns the seed file, the WebSocket URL that the worker connects to, and whether a running
    server was told. Raises `ConfigError` for a bad or used name or an external server.
    """
    if settings.nats.url is not None:
        raise ConfigError(
            "worker add: nats.url names an external server: add the worker to its configuration by hand "
            "(the embedded server's workers.conf shows the permissions)"
        )
    check_token(name, "worker name")
    server = EmbeddedServer(settings)
    server.prepare()
    seed_file = settings.run_root / "workers" / f"{name}.nk"
    if seed_file.exists():
        raise ConfigError(f"worker {name!r} has a key already ({seed_file}): choose another name")
    key = make_key()
    add_worker(server.workers, Names(settings.run), name, key.public)
    make_directory(seed_file.parent, mode=0o700)
    write_durably(seed_file, key.seed.encode() + b"\n", mode=0o600)
    return seed_file, server.websocket_url, server.reload()
