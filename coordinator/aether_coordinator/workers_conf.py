"""`workers.conf`: the users of the workers' account, one for each key, each with exactly its permissions.

nats-server reads it at start and on SIGHUP. The comment behind a user names its worker and, while a
key is being rotated, the end of the old one: that is the only record of which keys are good.
"""

import fcntl
import os
import re
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from aether_common.errors import ConfigError
from aether_common.files import disk_error, write_durably
from aether_common.names import Names

_PART = re.compile(r"nkey:\s*(U[A-Z2-7]{55})\b|# worker ([a-z0-9-]{1,64})(?: until (\S+))?[ \t]*$", re.MULTILINE)
_UNTIL = "%Y-%m-%dT%H:%M:%SZ"
LOCK_S = 10.0


class WorkerKey(NamedTuple):
    """A key that nats-server accepts for a worker."""

    worker: str
    public: str
    until: datetime | None = None
    """UTC; None: until it is revoked or rotated."""

    @property
    def until_text(self) -> str:
        return self.until.strftime(_UNTIL) if self.until else ""


def worker_user(names: Names, key: WorkerKey) -> str:
    """One user: what this worker may publish, and its own inbox."""
    worker = key.worker
    publish = [
        names.next(worker),
        names.ack(worker),
        names.reply(worker, "*"),
        names.artifact_get,
        names.artifact_meta(),
        *(names.fleet(kind, worker) for kind in ("hb", "reg", "poll")),
    ]
    allowed = ", ".join(f'"{subject}"' for subject in publish)
    until = f" until {key.until_text}" if key.until else ""
    return (
        f'  {{ nkey: {key.public}, allowed_connection_types: ["WEBSOCKET"], permissions: {{\n'
        f"      publish: {{ allow: [ {allowed} ] }}\n"
        f'      subscribe: {{ allow: [ "{names.inbox(worker)}.>" ] }} }} }} # worker {worker}{until}\n'
    )


def read_workers(path: Path) -> list[WorkerKey]:
    """Every user, in the order of the file. Raises `ConfigError` for a file that is not as we write it."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    parts = list(_PART.finditer(text))
    keys: list[WorkerKey] = []
    for user, comment in zip(parts[::2], parts[1::2], strict=False):
        public, (_, worker, until) = user.group(1), comment.groups()
        if public is None or worker is None:
            raise _unpaired(path, text, user)
        keys.append(WorkerKey(worker, public, _until(path, worker, until)))
    if len(parts) % 2:
        raise _unpaired(path, text, parts[-1])
    return keys


def _unpaired(path: Path, text: str, part: re.Match[str]) -> ConfigError:
    """To go on would lose this user when the file is written again."""
    line = text.count("\n", 0, part.start()) + 1
    return ConfigError(f"{path}, line {line}: each user needs the comment `# worker NAME` behind it, and only that")


def _until(path: Path, worker: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.strptime(text, _UNTIL).replace(tzinfo=UTC)
    except ValueError:
        raise ConfigError(f"{path}: worker {worker} until {text!r}: write it as 2030-01-31T12:00:00Z") from None


def write_workers(path: Path, names: Names, keys: Iterable[WorkerKey]) -> None:
    """Replace the file: the server sees the old or the new one, never a part."""
    users = "".join(worker_user(names, key) for key in keys)
    write_durably(path, f"users: [\n{users}]\n".encode(), mode=0o600)


def expired(keys: Iterable[WorkerKey], now: datetime) -> list[WorkerKey]:
    return [key for key in keys if key.until is not None and key.until <= now]


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Keep other processes from changing the file meanwhile. Raises `ConfigError` when one takes too long."""
    try:
        descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise ConfigError(f"{path} is being changed by another process: try again")
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
