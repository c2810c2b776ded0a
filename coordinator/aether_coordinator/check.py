"""What would keep a run from starting: said in full by `check`, and before anything slow by `run`.

Importing verifiers takes seconds; `before_start` needs none of it, so that a used run directory, a
mistyped taskset or a port in use is said at once.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from aether_common.bus import read_seed
from aether_common.errors import AetherError, ConfigError, IdentityError, RunDirectoryError, TasksetError
from aether_common.files import FileLock
from aether_common.identity import compute_identity, differences, resolve_model

from aether_coordinator.control import read_token
from aether_coordinator.embedded import EmbeddedServer, answers, server_binary
from aether_coordinator.host import external_server
from aether_coordinator.ledger import Ledger
from aether_coordinator.loopback import port_in_use
from aether_coordinator.opening import changed_settings
from aether_coordinator.settings import ServerSettings, SourceSettings

MIN_FREE_GIB = 2
TRAINER_CHECK_S = 60.0
CHECK_TRIES = 3

Check = Callable[[ServerSettings], None]


def checks(settings: ServerSettings) -> Iterator[tuple[str, AetherError | None]]:
    """(subject, problem) of each check, in order; None where all is well."""
    steps: list[tuple[str, Check]] = [
        ("run directory", _run_directory),
        ("base model", _base_model),
        ("renderer", _renderer),
        *((f"taskset of {source.name}", _loads(source)) for source in (*settings.train, *settings.eval)),
        ("trainer", _trainer),
        ("ports", _ports),
        ("nats-server", _nats),
    ]
    for subject, step in steps:
        try:
            step(settings)
        except AetherError as error:
            yield subject, error
        else:
            yield subject, None


def before_start(settings: ServerSettings) -> None:
    """Everything that can be refused in a second. Raises the `AetherError` that names the first problem."""
    lock = lock_run(settings)
    try:
        resolve_model(settings.model, settings.base_model.revision)
        _trainer_settings(settings)
        for source in (*settings.train, *settings.eval):
            _is_installed(source)
        _recorded(settings)
        _nats(settings)
        if settings.nats.embedded:
            server = EmbeddedServer(settings)
            server.prepare()
            server.refuse_used_ports()
        _ports(settings)
    finally:
        lock.release()


def lock_run(settings: ServerSettings) -> FileLock:
    """The lock of the run directory. Raises `RunDirectoryError` when another coordinator has it."""
    root = settings.run_root
    return FileLock(root / "coordinator.lock", f"another coordinator runs on {root}: stop it first")


def _run_directory(settings: ServerSettings) -> None:
    root = settings.run_root
    parent = next(path for path in (root, *root.parents) if path.exists())
    if not parent.is_dir():
        raise RunDirectoryError(f"run_root = {root}: {parent} is a file: choose another directory")
    # As root, access() allows everything but writing to a read-only file system.
    if not os.access(parent, os.W_OK):
        raise RunDirectoryError(f"run_root = {root}: {parent} is not writable: choose another directory")
    free = shutil.disk_usage(parent).free / 2**30
    if free < MIN_FREE_GIB:
        raise RunDirectoryError(f"run_root = {root}: only {free:.1f} GiB free: free some space ({MIN_FREE_GIB} GiB)")
    if (root / "coordinator.lock").is_file():
        lock_run(settings).release()
    if (root / "state").is_dir():
        _recorded(settings)


def _recorded(settings: ServerSettings) -> None:
    """Refuse the state of another run, and settings that may not change."""
    ledger = Ledger(settings.run_root / "state")
    try:
        changed_settings(ledger, settings)
    finally:
        ledger.close()


def _base_model(settings: ServerSettings) -> None:
    expected = settings.base_model
    actual = compute_identity(
        settings.model, expected.revision, expected.dtype, expected.renderer, expected.quantization
    )
    if lines := differences(expected, actual):
        raise IdentityError(f"model {settings.model!r} is not the one of [base_model]: {'; '.join(lines)}")


def _renderer(settings: ServerSettings) -> None:
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig

    try:
        TypeAdapter[Any](RendererConfig).validate_python({"name": settings.base_model.renderer, **settings.renderer})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"base_model.renderer = {settings.base_model.renderer!r}: {first['msg'][:300]}") from error


def _loads(source: SourceSettings) -> Check:
    def load(_: ServerSettings) -> None:
        _is_installed(source)
        from aether_coordinator.sources import load_source

        load_source(source)

    return load


def _is_installed(source: SourceSettings) -> None:
    """Find the taskset's module as verifiers does, without importing either. Raises `TasksetError`."""
    module = source.taskset.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    verifiers = importlib.util.find_spec("verifiers")
    for root in (verifiers.submodule_search_locations or []) if verifiers else []:
        if any((Path(root) / "v1" / "tasksets" / name).exists() for name in (module, f"{module}.py")):
            return
    with suppress(ImportError, ValueError):
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            return
    raise TasksetError(
        f"source {source.name!r}: taskset {source.taskset!r} cannot be loaded: there is no module {module!r}: check "
        "the id, and that its package is installed in the coordinator's environment"
    )


def _trainer(settings: ServerSettings) -> None:
    found = _trainer_settings(settings)
    expected = settings.base_model
    actual = compute_identity(found["path"], found["revision"], found["serving_dtype"], expected.renderer)
    if lines := differences(expected, actual):
        config = settings.trainer.config
        raise IdentityError(f"the trainer ({config}) loads another model than base_model: {'; '.join(lines)}")


def _trainer_settings(settings: ServerSettings) -> dict[str, Any]:
    """Model and dtype of the trainer's settings, read in its own environment. Raises what is wrong with them."""
    process = settings.trainer
    if not process.config.is_file():
        raise ConfigError(f"trainer.config = {process.config}: no such file")
    command = [process.python or sys.executable, "-m", "aether_trainer", process.config]
    command += ["--run-root", settings.run_root, "--run", settings.run, "--check"]
    try:
        done = _unless_killed(command)
    except OSError as error:
        raise ConfigError(f"trainer.python = {process.python} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} -m aether_trainer does not answer within {TRAINER_CHECK_S:.0f} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        # Its messages are whole; a traceback (aether_trainer is not installed) has its cause in the last line.
        message = "\n".join(said) if done.returncode == ConfigError.exit_code else "".join(said[-1:])
        raise ConfigError(f"the trainer refuses its settings: {message}")
    found: dict[str, Any] = json.loads(done.stdout)
    if found["serving_dtype"] != settings.base_model.dtype:
        raise ConfigError(
            f"{process.config}: lora.serving_dtype = {found['serving_dtype']!r}, but base_model.dtype = "
            f"{settings.base_model.dtype!r} in server.toml: set both to the same"
        )
    return found


def _unless_killed(command: list[Any]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; one that is killed from outside is run again. Raises `ConfigError` in the end."""
    status = 0
    for _ in range(CHECK_TRIES):
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRAINER_CHECK_S, check=False)
        if (status := done.returncode) >= 0:
            return done
    raise ConfigError(
        f"{command[0]} -m aether_trainer was killed {CHECK_TRIES} times while it read its settings (signal {-status}): "
        "is the machine out of memory?"
    )


def _ports(settings: ServerSettings) -> None:
    if settings.control.token_file is not None:
        read_token(settings.control.token_file)
    for setting, port in (("gateway.port", settings.gateway.port), ("control.port", settings.control.port)):
        if port and answers(port):
            raise port_in_use(setting, port)


def _nats(settings: ServerSettings) -> None:
    if settings.nats.embedded:
        server_binary()
        return
    _, key_file = external_server(settings)
    read_seed(key_file)
