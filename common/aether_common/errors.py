"""Errors that a user sees.

1. One class per boundary that was crossed; the class fixes the exit code.
2. The message says what is wrong, where (file, key, value) and what to do.
3. The command lines print the message alone; `--debug` adds the traceback.
"""


class AetherError(Exception):
    """Base of everything that ends a command with a message instead of a traceback."""

    exit_code = 1


class ConfigError(AetherError):
    """A setting, file or argument is unusable as given."""

    exit_code = 2


class IdentityError(AetherError):
    """A model differs from the one that the run is pinned to."""

    exit_code = 3


class RunDirectoryError(AetherError):
    """A run directory belongs to another run, is in use, full or damaged."""

    exit_code = 4


class DiskError(RunDirectoryError):
    """A disk refuses a write: full, read-only, no permission. Writing again later can help."""

    exit_code = 12


class BusError(AetherError):
    """nats-server cannot be reached, refuses us, or belongs to another run."""

    exit_code = 5


class AuthorizationError(BusError):
    """The credential is unknown or revoked: trying again cannot help."""

    exit_code = 6


class TrainerError(AetherError):
    """The trainer stopped and cannot be restarted usefully."""

    exit_code = 7


class EngineError(AetherError):
    """The inference engine cannot start or stopped serving."""

    exit_code = 8


class TasksetError(AetherError):
    """A verifiers taskset or environment cannot be loaded."""

    exit_code = 9


class MessageError(AetherError):
    """A message cannot be read: not msgpack, a missing field, or an unsupported protocol version."""
