"""`aether-worker check`: could this worker run? One line each: ok, or what to do. Registers nothing."""

import asyncio
import importlib.util
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from aether_common.bus import read_seed
from aether_common.errors import AetherError, ConfigError

from aether_worker.node import bus_of, identity_of
from aether_worker.settings import WorkerSettings, prepare_state_dir

MIN_FREE_MIB = 512

Say = Callable[[str], None]


async def check(file: Path, overrides: list[str] | None, say: Say) -> bool:
    """Whether everything is ok; lines go to `say`."""
    try:
        settings = WorkerSettings.load(file, overrides)
    except AetherError as error:
        say(f"settings      FAILED  {error}")
        return False
    say(f"settings      ok      {file}")
    checks: list[tuple[str, Callable[[WorkerSettings], Awaitable[str]]]] = [
        ("key", _key),
        ("model", _model),
        ("engine", _engine),
        ("state_dir", _state_dir),
        ("connection", _connection),
    ]
    good = True
    for name, step in checks:
        try:
            say(f"{name:<13} ok      {await step(settings)}")
        except AetherError as error:
            good = False
            say(f"{name:<13} FAILED  {error}")
    return good


async def _key(settings: WorkerSettings) -> str:
    read_seed(settings.key_file)
    return str(settings.key_file)


async def _model(settings: WorkerSettings) -> str:
    identity = await asyncio.to_thread(identity_of, settings)
    lines = [f"{key} = {value}" for key, value in identity.model_dump().items() if value]
    return "identity computed from the files:\n" + "\n".join(f"{'':<22}{line}" for line in lines)


async def _engine(settings: WorkerSettings) -> str:
    if settings.engine == "null":
        return "null: answers fixed tokens, for benchmarks only"
    if settings.engine == "transformers":
        missing = [name for name in ("torch", "transformers", "peft") if not _installed(name)]
        if missing:
            raise ConfigError(
                f"engine = 'transformers' needs {', '.join(missing)}: uv sync --package aether-worker --extra cpu"
            )
        return "transformers: torch, transformers and peft are installed"
    python = settings.vllm.python
    if python is None:
        if not _installed("vllm"):
            raise ConfigError(
                "engine = 'vllm', but vllm is not installed here: uv sync --package aether-worker --extra vllm, or set "
                "vllm.python to the interpreter of an environment that has it"
            )
        return "vllm: installed in this environment"
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ConfigError(f"vllm.python = '{python}' cannot be started: {error.strerror}") from error
    output, _ = await process.communicate()
    if process.returncode != 0:
        # The CPU build has another distribution name.
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        process = await asyncio.create_subprocess_exec(python, "-c", code)
        if await process.wait() != 0:
            raise ConfigError(f"vllm.python = '{python}' has no vllm: install it there, or name another interpreter")
    return f"vllm: {output.decode().strip() or 'found'} of {python}"


def _installed(module: str) -> bool:
    """Whether a package is there; a folder of that name on the path is none."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


async def _state_dir(settings: WorkerSettings) -> str:
    prepare_state_dir(settings.state_dir)
    free = shutil.disk_usage(settings.state_dir).free >> 20
    if free < settings.adapter_cache_mib + MIN_FREE_MIB:
        raise ConfigError(
            f"state_dir = '{settings.state_dir}' has {free} MiB free, less than adapter_cache_mib = "
            f"{settings.adapter_cache_mib} and {MIN_FREE_MIB} for logs: free space, or lower adapter_cache_mib"
        )
    return f"{settings.state_dir}, {free} MiB free"


async def _connection(settings: WorkerSettings) -> str:
    bus = bus_of(settings, read_seed(settings.key_file))
    try:
        await bus.connect()
    finally:
        await bus.close()
    return f"{settings.url} accepts the key of {settings.name}"
