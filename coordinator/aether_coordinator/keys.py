"""Credentials of workers, made, rotated and revoked while the run goes on.

A key is an nkey: its seed lies in the run directory until it is on the worker's machine, its user in
`workers.conf` of the nats-server. A server that is configured elsewhere cannot be edited from here:
then the operator is told what to change there.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from aether_common.errors import AetherError, ConfigError
from aether_common.files import make_directory, write_durably
from aether_common.names import Names, check_token

from aether_coordinator.accounts import make_key
from aether_coordinator.events import append_event
from aether_coordinator.host import server_of
from aether_coordinator.settings import ServerSettings
from aether_coordinator.standing import ban, keys_directory, lift, read_standing
from aether_coordinator.workers_conf import WorkerKey, expired, locked, read_workers, worker_user, write_workers

SHOWN = 20
"""Names in a message."""


class Host(Protocol):
    """A nats-server whose files lie on this machine."""

    @property
    def workers(self) -> Path: ...

    @property
    def websocket_url(self) -> str: ...

    @property
    def ca_file(self) -> Path | None: ...

    def reload(self) -> bool:
        """Let a running server read its files again; False when none runs."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a key, and what is left to do."""

    lines: tuple[str, ...] = ()
    """For `worker.toml`."""
    notes: tuple[str, ...] = ()
    """For the operator."""


class Keys:
    """The keys of one run's workers."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._root = settings.run_root
        self._names = Names(settings.run)
        self.host: Host | None = server_of(settings)
        """None: it is configured elsewhere."""

    def all(self) -> list[WorkerKey]:
        """Every key that nats-server accepts; none is known of a server elsewhere."""
        return read_workers(self.host.workers) if self.host else []

    def add(self, name: str) -> Change:
        """Make the first key of a worker, or a new one after it was revoked. Raises `ConfigError` if it has one."""
        check_token(name, "worker name")
        if self.host is None:
            if self._seed_file(name).exists():
                raise ConfigError(f"worker {name!r} has a key already ({self._seed_file(name)}): {ANOTHER}")
            change = self._elsewhere(name, "append inside the brackets of `users: [ … ]`:")
        else:
            with locked(self.host.workers):
                keys, gone = self._kept()
                if any(key.worker == name for key in keys):
                    raise ConfigError(f"worker {name!r} has a key already ({self.host.workers}): {ANOTHER}")
                change = self._change(name, self._replace([*keys, self._new(name)], gone))
        lift(self._root, name, "revoked")
        append_event(self._root, "added", "a key was made", name)
        self._tell()
        return change

    def rotate(self, name: str, overlap: timedelta) -> Change:
        """Make another key; those before are good for `overlap` more. Raises `ConfigError` if there is none."""
        check_token(name, "worker name")
        minutes = overlap.total_seconds() / 60
        if self.host is None:
            if not self._seed_file(name).exists():
                raise self._unknown(name, [])
            change = self._elsewhere(name, f"append this user, and after {minutes:g} minutes remove the old one:")
        else:
            until = datetime.now(UTC).replace(microsecond=0) + overlap
            with locked(self.host.workers):
                keys, gone = self._kept()
                if not any(key.worker == name for key in keys):
                    raise self._unknown(name, keys)
                ending = [
                    key if key.worker != name else key._replace(until=min(key.until or until, until))
                    for key in keys
                    if key.worker != name or overlap
                ]
                change = self._change(name, self._replace([*ending, self._new(name)], gone))
        good = f"the old one is good for {minutes:g} more minutes" if overlap else "the old one is no longer good"
        append_event(self._root, "rotated", f"another key was made, {good}", name)
        return Change(change.lines, (*change.notes, f"copy the seed file to the worker, then restart it; {good}"))

    def revoke(self, name: str) -> Change:
        """Remove every key of a worker and take its jobs away; it stays out until it is added again.

        Raises `ConfigError` for a name that is not known.
        """
        check_token(name, "worker name")
        if self.host is None:
            ban(self._root, name, "revoked", "by the operator")
            notes = (f"in its workers.conf remove every user marked `# worker {name}`, then: {RELOAD}",)
        else:
            with locked(self.host.workers):
                keys, gone = self._kept()
                if not any(key.worker == name for key in keys) and not self._seed_file(name).exists():
                    raise self._unknown(name, keys)
                ban(self._root, name, "revoked", "by the operator")
                notes = self._replace([key for key in keys if key.worker != name], gone)
        self._seed_file(name).unlink(missing_ok=True)
        append_event(self._root, "revoked", "by the operator", name)
        self._tell()
        return Change(notes=notes)

    def release(self, name: str) -> None:
        """End a quarantine. Raises `ConfigError` when there is none."""
        check_token(name, "worker name")
        if not lift(self._root, name, "quarantined"):
            held = ", ".join(sorted(read_standing(self._root).quarantined)[:SHOWN]) or "none"
            raise ConfigError(f"worker {name!r} is not quarantined (quarantined are: {held})")
        append_event(self._root, "released", "by the operator", name)
        self._tell()

    def remove_expired(self) -> list[WorkerKey]:
        """End the keys whose time is over; they are returned."""
        if self.host is None or not expired(self.all(), datetime.now(UTC)):
            return []
        with locked(self.host.workers):
            keys, gone = self._kept()
            if gone:
                self._replace(keys, gone)
        return gone

    # ---- parts -------------------------------------------------------------------------------------

    def _kept(self) -> tuple[list[WorkerKey], list[WorkerKey]]:
        keys = self.all()
        gone = expired(keys, datetime.now(UTC))
        return [key for key in keys if key not in gone] if gone else keys, gone

    def _seed_file(self, name: str) -> Path:
        return keys_directory(self._root) / f"{name}.nk"

    def _new(self, name: str) -> WorkerKey:
        key = make_key()
        make_directory(keys_directory(self._root), mode=0o700)
        write_durably(self._seed_file(name), key.seed.encode() + b"\n", mode=0o600)
        return WorkerKey(name, key.public)

    def _replace(self, keys: Sequence[WorkerKey], gone: Sequence[WorkerKey]) -> tuple[str, ...]:
        """Let these keys be the good ones, without those that are `gone`; returns what the operator should know."""
        assert self.host is not None
        write_workers(self.host.workers, self._names, keys)
        told = self.host.reload()
        for key in gone:
            append_event(
                self._root, "key_expired", f"the key before the rotation ended at {key.until_text}", key.worker
            )
        return () if told else ("no nats-server of this run is running here: it reads the keys at its next start",)

    def _change(self, name: str, notes: tuple[str, ...]) -> Change:
        assert self.host is not None
        return Change(self._lines(name, self.host.websocket_url, self.host.ca_file), notes)

    def _elsewhere(self, name: str, what: str) -> Change:
        user = worker_user(self._names, self._new(name)).rstrip()
        nats = self.settings.nats
        notes = [
            f"nats.url = {nats.url!r} is configured elsewhere. In its workers.conf {what}",
            user,
            f"then: {RELOAD}",
        ]
        if not nats.public_url:
            notes.append("replace HOST by the name of that server (nats.public_url sets it)")
        return Change(self._lines(name, nats.public_url or "wss://HOST", None), tuple(notes))

    def _lines(self, name: str, url: str, ca_file: Path | None) -> tuple[str, ...]:
        lines = {"name": name, "run": self.settings.run, "url": url, "key_file": str(self._seed_file(name))}
        if ca_file is not None:
            lines["tls.ca_file"] = str(ca_file)
        return tuple(f"{key} = {_quoted(value)}" for key, value in lines.items())

    def _unknown(self, name: str, keys: Sequence[WorkerKey]) -> ConfigError:
        known = sorted({key.worker for key in keys} or {path.stem for path in keys_directory(self._root).glob("*.nk")})
        shown = ", ".join(known[:SHOWN]) + (" …" if len(known) > SHOWN else "") or "none"
        return ConfigError(f"worker {name!r} has no key: workers with one are: {shown}")

    def _tell(self) -> None:
        """Let a running coordinator look at the files at once; one that does not hear it looks by itself soon."""
        from aether_coordinator.control import call

        with suppress(AetherError):
            call(self._root, "/workers", post=True)


def refuse_other_user(run_root: Path) -> None:
    """Raise `ConfigError` unless this is the user of the run: it could not read what another, root too, writes."""
    with suppress(FileNotFoundError):
        owner = (run_root / "coordinator.lock").stat().st_uid
        if owner != os.geteuid():
            raise ConfigError(
                f"the run in {run_root} belongs to another user (uid {owner}), who could not read the files that this "
                f"command writes: sudo -u '#{owner}' aether-coordinator worker …"
            )


ANOTHER = "choose another name, or make it another key by `aether-coordinator worker rotate`"
RELOAD = "`nats-server --signal reload`, or kill -HUP its process"


def _quoted(text: str) -> str:
    """A TOML string."""
    return json.dumps(text, ensure_ascii=False)
