"""`aether-coordinator check`: what would keep a run from starting, one line each."""

import os
import shutil
from collections.abc import Callable, Iterator

from aether_common.bus import read_seed
from aether_common.errors import AetherError
from aether_common.identity import compute_identity, differences

from aether_coordinator.embedded import server_binary
from aether_coordinator.settings import ServerSettings

MIN_FREE_GIB = 2


def checks(settings: ServerSettings) -> Iterator[tuple[str, str]]:
    """(subject, problem) for each check; an empty problem means that all is well."""
    yield _try("run directory", lambda: _run_directory(settings))
    yield _try("base model", lambda: _base_model(settings))
    yield _try("renderer", lambda: _renderer(settings))
    for source in (*settings.train, *settings.eval):
        yield _try(f"taskset of {source.name}", lambda source=source: _taskset(source))
    yield _try("trainer", lambda: _trainer(settings))
    yield _try("nats-server", lambda: _nats(settings))


def _try(subject: str, check: Callable[[], str]) -> tuple[str, str]:
    try:
        return subject, check()
    except AetherError as error:
        return subject, str(error)


def _run_directory(settings: ServerSettings) -> str:
    root = settings.run_root
    parent = next(path for path in (root, *root.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        return f"{parent} is not writable: choose another run_root"
    free = shutil.disk_usage(parent).free / 2**30
    return "" if free >= MIN_FREE_GIB else f"only {free:.1f} GiB free at {parent}: free some space"


def _base_model(settings: ServerSettings) -> str:
    expected = settings.base_model
    actual = compute_identity(
        settings.model, expected.revision, expected.dtype, expected.renderer, expected.quantization
    )
    return "; ".join(differences(expected, actual))


def _renderer(settings: ServerSettings) -> str:
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig

    try:
        TypeAdapter(RendererConfig).validate_python({"name": settings.base_model.renderer, **settings.renderer})
    except ValidationError as error:
        first = error.errors()[0]
        return f"base_model.renderer = {settings.base_model.renderer!r}: {first['msg'][:300]}"
    return ""


def _taskset(source: object) -> str:
    from aether_coordinator.settings import SourceSettings
    from aether_coordinator.sources import load_source

    assert isinstance(source, SourceSettings)
    load_source(source)
    return ""


def _trainer(settings: ServerSettings) -> str:
    process = settings.trainer
    if not process.config.is_file():
        return f"trainer.config = {process.config}: no such file"
    if process.python is not None and not os.access(process.python, os.X_OK):
        return f"trainer.python = {process.python}: no such interpreter"
    return ""


def _nats(settings: ServerSettings) -> str:
    if settings.nats.url is None:
        server_binary()
        return ""
    assert settings.nats.key_file is not None
    read_seed(settings.nats.key_file)
    return ""
