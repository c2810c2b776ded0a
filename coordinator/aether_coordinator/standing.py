"""Which workers may not work: revoked by the operator, or quarantined by the coordinator.

One file for each in the run directory, `workers/<name>.revoked` and `workers/<name>.quarantined`,
that holds the reason. They are the truth; what the command line tells a running coordinator is a hint to
look at them at once.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aether_common.errors import ConfigError
from aether_common.files import disk_error, make_directory, write_durably

Ban = Literal["revoked", "quarantined"]


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
