"""One worker process: engine, connection, registration, then jobs until it is told to end.

It ends by SIGTERM or SIGINT (drain: finish or hand back, exit 0), at the coordinator's request, when
a newer incarnation supersedes it, or when its key is refused. A second signal ends it at once.
"""

import asyncio
import os
import platform
import random
import signal
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from aether_common.bus import Bus, read_seed
from aether_common.errors import AetherError, AuthorizationError, BusError, ConfigError
from aether_common.files import FileLock
from aether_common.identity import ModelIdentity, compute_identity, resolve_model
from aether_common.names import Names
from aether_common.wire import PROTOCOL, PROTOCOL_MIN, Reason, Registration
from loguru import logger

from aether_worker.adapters import AdapterCache
from aether_worker.artifacts import Artifacts
from aether_worker.engine.base import Engine
from aether_worker.lane import Lane
from aether_worker.loaded import LoadedAdapters
from aether_worker.presence import Presence, Superseded
from aether_worker.reach import bus_of, explain_refusal, remember_accepted
from aether_worker.settings import WorkerSettings

CONNECT_RETRY_S = (1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the worker ends, and the error that it ends with, if any."""

    reason: Reason
    error: AetherError | None = None


async def run_worker(settings: WorkerSettings) -> None:
    """Work until the end is asked for. Raises `AetherError` when it ends for a bad reason."""
    seed = read_seed(settings.key_file)
    lock = FileLock(settings.state_dir / "lock", f"{settings.state_dir} is used by another aether-worker")
    ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
    _catch_signals(ending)
    engine: Engine | None = None
    bus: Bus | None = None
    try:
        identity = await asyncio.to_thread(identity_of, settings)
        engine = make_engine(settings)
        bus = await _unless_ended(connect(settings, seed), ending)
        logger.info("connected to {}, starting engine {}", settings.url, settings.engine)
        await _unless_ended(engine.start(), ending)
        await _serve(settings, identity, engine, bus, ending)
    except _Ended:
        logger.info("ended before the registration")
    finally:
        if engine is not None:
            await engine.stop()
        if bus is not None:
            await bus.close()
        lock.release()


async def _serve(
    settings: WorkerSettings, identity: ModelIdentity, engine: Engine, bus: Bus, ending: asyncio.Future[Ending]
) -> None:
    names = Names(settings.run)
    registration = registration_of(settings, identity)
    artifacts = Artifacts(bus, names)
    cache = AdapterCache(
        settings.state_dir / "adapters", settings.adapter_cache_mib << 20, artifacts, engine.check_adapter
    )
    adapters = LoadedAdapters(engine, cache)
    lane = Lane(
        bus,
        names,
        settings.name,
        registration.incarnation,
        slots=settings.slots,
        prefetch=settings.prefetch,
        engine=engine,
        adapters=adapters,
    )

    def end(error: AetherError | None) -> None:
        if not ending.done():
            ending.set_result(Ending(Reason.SUPERSEDED if isinstance(error, Superseded) else Reason.DRAIN, error))

    presence = Presence(bus, names, registration, end)
    answer = await _unless_ended(presence.register(), ending)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_watch_key(bus)),
                tasks.create_task(adapters.run()),
                tasks.create_task(lane.run(answer.lease_s)),
                tasks.create_task(presence.run(lane, adapters, engine)),
            ]
            asked = await asyncio.shield(ending)
            presence.draining = True
            presence.beat_now()
            await lane.drain(asked.reason, settings.drain_s if asked.reason is Reason.DRAIN else 0.0)
            await presence.farewell()
            for task in running:
                task.cancel()
    except BaseExceptionGroup as group:
        raise _first(group) from group
    if asked.error is not None:
        raise asked.error
    logger.info("drained")


async def connect(settings: WorkerSettings, seed: str) -> Bus:
    """Try until connected. Raises `AuthorizationError` when the key is refused."""
    attempt = 0
    while True:
        bus = bus_of(settings, seed)
        try:
            await bus.connect()
            remember_accepted(settings)
            return bus
        except AuthorizationError as error:
            await bus.close()
            raise explain_refusal(settings, error) from error
        except BusError as error:
            await bus.close()
            if attempt % 10 == 0:
                logger.warning("{}: trying again", error)
            attempt += 1
            await asyncio.sleep(random.uniform(*CONNECT_RETRY_S))


def identity_of(settings: WorkerSettings) -> ModelIdentity:
    """Computed from the files that the engine loads."""
    return compute_identity(settings.model, settings.revision, settings.dtype, quantization=settings.quantization)


def registration_of(settings: WorkerSettings, identity: ModelIdentity, *, check_only: bool = False) -> Registration:
    return Registration(
        check_only=check_only,
        worker=settings.name,
        incarnation=uuid.uuid4().hex,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL,
        engine=settings.engine,
        slots=settings.slots,
        window=settings.window,
        identity=identity,
        max_model_len=settings.max_model_len,
        versions=package_versions(settings.engine),
    )


def package_versions(engine: str) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    packages = {"transformers": ["torch", "transformers", "peft"], "vllm": ["vllm", "torch"]}
    for package in ["aether-worker", "nats-py", *packages.get(engine, [])]:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def make_engine(settings: WorkerSettings) -> Engine:
    """The configured engine, not started. Only here is it imported: torch takes seconds."""
    match settings.engine:
        case "null":
            from aether_worker.engine.null_engine import NullEngine

            return NullEngine(settings.null, settings.max_model_len)
        case "transformers":
            # OpenMP reads these when torch is loaded; spinning threads starve the other processes.
            os.environ.setdefault("OMP_NUM_THREADS", str(settings.transformers.threads))
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            try:
                from aether_worker.engine.transformers_engine import TransformersEngine
            except ImportError as error:
                raise ConfigError(
                    f"engine = 'transformers' needs packages that are not installed ({error.name}): "
                    "uv sync --package aether-worker --extra cpu"
                ) from error
            return TransformersEngine(
                model_path(settings), settings.dtype, settings.slots, settings.max_model_len, settings.transformers
            )
        case "vllm":
            from aether_worker.engine.vllm_engine import VllmEngine

            return VllmEngine(settings, model_path(settings))


def model_path(settings: WorkerSettings) -> Path:
    return resolve_model(settings.model, settings.revision)


class _Ended(Exception):
    """The end was asked for before there was anything to hand back."""


async def _unless_ended[T](work: Coroutine[Any, Any, T], ending: asyncio.Future[Ending]) -> T:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, ending], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Ended
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _watch_key(bus: Bus) -> None:
    await bus.refused.wait()
    raise bus.refusal()


def _catch_signals(ending: asyncio.Future[Ending]) -> None:
    def caught(number: signal.Signals) -> None:
        if ending.done():
            os._exit(128 + number)
        logger.info("{}: draining, once more to end at once", number.name)
        ending.set_result(Ending(Reason.DRAIN))

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, caught, number)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to tell of several that came together: one with a message for the user, if there is one."""
    told = group.subgroup(AetherError)
    error: BaseException = told if told is not None else group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
