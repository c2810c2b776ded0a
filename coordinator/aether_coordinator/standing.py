"""Which workers may not work: revoked by the operator, or quarantined by the coordinator.

One file for each in the run directory, `workers/<name>.revoked` and `workers/<name>.quarantined`,
that holds the reason. They are the truth; what the command line tells a running coordinator is a hint to
look at them at once.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aether_common.errors import ConfigError, DiskError
from aether_common.files import disk_error, make_directory, write_durably
from loguru import logger

Ban = Literal["revoked", "quarantined"]
MAX_REASON = 1000
"""Characters; what a worker sends may be in it."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Reason by name."""

    revoked: dict[str, str] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)


def keys_directory(run_root: Path) -> Path:
    """Seeds of the workers, and what is held against them."""
    return run_root / "workers"


def read_standing(run_root: Path) -> Standing:
    """Raises `ConfigError` for a file that cannot be read."""
    found = Standing()
    for kind, names in (("revoked", found.revoked), ("quarantined", found.quarantined)):
        for path in sorted(keys_directory(run_root).glob(f"*.{kind}")):
            try:
                names[path.stem] = path.read_text(errors="replace").strip()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return found


def ban(run_root: Path, name: str, kind: Ban, reason: str) -> None:
    """Raises `DiskError`."""
    directory = keys_directory(run_root)
    make_directory(directory, mode=0o700)
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC: {reason}\n"
    write_durably(directory / f"{name}.{kind}", text.encode(), mode=0o600)


def lift(run_root: Path, name: str, kind: Ban) -> bool:
    """Whether there was one. Raises `DiskError`."""
    path = keys_directory(run_root) / f"{name}.{kind}"
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise disk_error(error, path) from error
    return True


class Admission:
    """Who may not work, as the running coordinator knows: the files, and quarantines that are in none yet."""

    def __init__(self, run_root: Path) -> None:
        self._run_root = run_root
        self._standing = Standing()
        self._unsaved: dict[str, str] = {}
        """Quarantines (reason by name) that are not in a file yet."""
        self._looking = asyncio.Lock()

    def load(self) -> None:
        """Raises `ConfigError` for a file that cannot be read."""
        self._standing = read_standing(self._run_root)

    @property
    def revoked(self) -> dict[str, str]:
        """Reason by name."""
        return self._standing.revoked

    def revocation(self, name: str) -> str:
        """Why a revoked worker may not register, and what helps; empty for others."""
        if name not in self.revoked:
            return ""
        return f"its key was revoked ({self.revoked[name]}): `aether-coordinator worker add {name}` makes another"

    def quarantined(self, name: str) -> str:
        """Why a worker gets no jobs; empty if it does."""
        return self._unsaved.get(name) or self._standing.quarantined.get(name, "")

    def quarantine(self, name: str, reason: str) -> bool:
        """Whether it was not quarantined before. `look` writes the file."""
        if self.quarantined(name):
            return False
        self._unsaved[name] = reason
        return True

    async def look(self) -> list[str]:
        """Write what is in no file yet and read the files again; returns who was revoked since the last time.

        What the disk refuses is logged, and tried again the next time.
        """
        async with self._looking:
            try:
                for name, reason in list(self._unsaved.items()):
                    await asyncio.to_thread(ban, self._run_root, name, "quarantined", reason)
                    self._standing.quarantined[name] = reason
                    self._unsaved.pop(name)
            except DiskError as error:
                logger.error("{}", error)
            try:
                found = await asyncio.to_thread(read_standing, self._run_root)
            except ConfigError as error:
                logger.error("{}", error)
                return []
            revoked = sorted(found.revoked.keys() - self._standing.revoked.keys())
            self._standing = found
        return revoked
