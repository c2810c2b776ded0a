"""The vLLM server of a worker: a supervised child on loopback.

It never outlives this process (see `guard`). When it ends or hangs it is started again with backoff; above a
memory limit it is recycled once the requests in flight are done. Its log lies in the state directory, rotated.
Nothing ends the supervision but `stop`.
"""

import asyncio
import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
from aether_common.child import tail
from loguru import logger

from aether_worker.engine import guard
from aether_worker.engine.base import EngineError, EngineUnavailable
from aether_worker.settings import WorkerSettings

POLL_S = 0.25
WATCH_S = 5.0
HTTP_S = 120.0
RESTART_S = (1.0, 60.0)
"""Shortest and longest wait before another start."""
STEADY_S = 60.0
"""A server that ran so long before it ended is started again without backoff."""
RECYCLE_S = 300.0
"""How long the requests in flight may take before a recycled server ends."""
HEALTH_S = 5.0
SILENT_S = 180.0
"""A server that does not answer /health for so long hangs."""
STALLED_S = 600.0
"""So does one that has requests and gives no token of any of them for so long."""
UNHEARD_S = 60.0
"""Requests that ended earlier than this without a token say nothing about the server."""
STOP_S = guard.GRACE_S + 5.0
LOG_BYTES = 64 << 20
LOGS = 3
"""Older logs that are kept."""


def arguments(settings: WorkerSettings, model: Path, port: int) -> list[str]:
    """The flags of the server."""
    vllm = settings.vllm
    return [
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model)),
        *("--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.slots)),
        *("--tensor-parallel-size", str(vllm.tensor_parallel_size)),
        *("--gpu-memory-utilization", str(vllm.gpu_memory_utilization)),
        "--enable-prefix-caching" if vllm.prefix_caching else "--no-enable-prefix-caching",
        "--enable-lora",
        *("--max-lora-rank", str(vllm.max_lora_rank)),
        *("--max-loras", str(vllm.max_loras)),
        *("--max-cpu-loras", str(2 * vllm.max_loras)),
        # Without it the endpoint for token ids answers 403.
        "--enable-scale-out",
        # The default logprobs are taken before the temperature.
        *("--logprobs-mode", "processed_logprobs"),
        # The model's own generation_config.json would add sampling defaults.
        *("--generation-config", "vllm"),
        # Without it every server draws the same numbers: equal prompts on two workers would give equal answers.
        *("--seed", str(secrets.randbits(31))),
        # Progress in steps of so many tokens.
        *("--stream-interval", "16"),
        *vllm.extra_args,
    ]


def environment() -> dict[str, str]:
    """Ours, with what the server needs; variables for its CPU build only where they are not set."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The paths of this environment's modules mean nothing to another's interpreter; with an API key it would
        # refuse our own requests; our settings may hold secrets.
        **{
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VLLM_API_KEY") and not name.startswith(WorkerSettings.PREFIX)
        },
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


class VllmServer:
    """One server process after the other; `on_start` is called with each that answers, before it is `ready`."""

    def __init__(self, settings: WorkerSettings, model: Path, on_start: Callable[[], Awaitable[None]]) -> None:
        self._settings = settings
        self._model = model
        self._on_start = on_start
        self._log = settings.state_dir / "logs" / "vllm.log"
        self._process: asyncio.subprocess.Process | None = None
        self._http: aiohttp.ClientSession | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._url = ""
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._unheard_since: float | None = None
        self._recycled = False
        self.ready = False

    async def start(self) -> None:
        """Start the first server. Raises `EngineError` when it ends or takes too long."""
        # Every slot has a request of its own.
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(sock_connect=5))
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        await self._end()
        if self._http is not None:
            await self._http.close()

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = HTTP_S
    ) -> tuple[int, Any]:
        """(status, JSON or text). Raises `EngineError` when the server does not answer."""
        async with self._answer(method, path, body, timeout_s) as response:
            text = await response.text()
            return response.status, await response.json() if response.content_type == "application/json" else text

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The response to a POST whose body comes as it is made, each part reported to `progressed`.

        The server is not recycled meanwhile, unless it takes too long: then it raises `EngineUnavailable`.
        """
        if not self.ready:
            raise EngineUnavailable("vLLM is starting")
        self._in_flight += 1
        self._idle.clear()
        if self._unheard_since is None:
            self._unheard_since = time.monotonic()
        try:
            async with self._answer("POST", path, body, None) as response:
                yield response
        except EngineError as error:
            if self._recycled:
                raise EngineUnavailable("vLLM was started again for its memory before this was done") from error
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
                if self._unheard_s() < UNHEARD_S:
                    self._unheard_since = None

    def progressed(self) -> None:
        """A request got tokens."""
        self._unheard_since = time.monotonic()

    def _unheard_s(self) -> float:
        """How long there have been requests without a token of any."""
        return 0.0 if self._unheard_since is None else time.monotonic() - self._unheard_since

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        if self._http is None:
            raise EngineUnavailable("vLLM is not started")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)
        try:
            async with self._http.request(method, self._url + path, json=body, timeout=timeout) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineError(f"vLLM does not answer {path}: {type(error).__name__} {error}") from error

    # ---- the process -------------------------------------------------------------------------------

    async def _launch(self) -> None:
        """Start a server and wait until it is ready. Raises `EngineError` when it ends or takes too long."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        python = str(self._settings.vllm.python or sys.executable)
        if not os.access(python, os.X_OK):
            raise EngineError(f"vllm.python = '{python}' cannot be started: no such program")
        self._url = f"http://127.0.0.1:{port}"
        started = time.monotonic()
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(rotate, self._log)
            with self._log.open("ab") as log:
                process = self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-ES", guard.__file__, python),
                    *arguments(self._settings, self._model, port),
                    env=environment(),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"vLLM cannot be started: {error}") from error
        logger.info("vLLM starts, its log is {}", self._log)
        said = started
        try:
            while True:
                healthy = await self._healthy()
                # First: another server may have taken the port, and answer there.
                if process.returncode is not None:
                    self._fail(f"vLLM ended with exit code {process.returncode} while it started")
                if healthy:
                    break
                now = time.monotonic()
                if now - started > self._settings.vllm.startup_s:
                    self._fail(f"vLLM was not ready after vllm.startup_s = {self._settings.vllm.startup_s:.0f} s")
                if now - said > 30:
                    said = now
                    logger.info("vLLM is starting since {:.0f} s: {}", now - started, tail(self._log, 1)[:200])
                await asyncio.sleep(POLL_S)
            await self._on_start()
        except BaseException:
            await self._end()
            raise
        self._unheard_since, self._recycled = None, False
        self.ready = True
        logger.info("vLLM is ready after {:.0f} s", time.monotonic() - started)

    def _fail(self, problem: str) -> NoReturn:
        raise EngineError(f"{problem}; the end of {self._log}:\n{tail(self._log, 20)}")

    async def _healthy(self) -> bool:
        with suppress(EngineError):
            return (await self.call("GET", "/health", timeout_s=HEALTH_S))[0] == 200
        return False

    async def health(self) -> bool:
        """Whether requests are taken now."""
        return self.ready and await self._healthy()

    async def _supervise(self) -> None:
        """Start a server again whenever one ends, for ever."""
        failures = 0
        while True:
            assert self._process is not None
            started = time.monotonic()
            watch = asyncio.create_task(self._watch(self._process))
            try:
                code = await self._process.wait()
            finally:
                watch.cancel()
            if not watch.done():
                logger.error("vLLM ended with exit code {}, starting it again: {}", code, tail(self._log, 3))
            await self._end()
            # Also one that was told to end: a memory limit below what it needs must not keep it from serving.
            failures = 0 if time.monotonic() - started > STEADY_S else failures + 1
            while True:
                if failures:
                    shortest, longest = RESTART_S
                    await asyncio.sleep(random.uniform(0.5, 1.0) * min(longest, shortest * 2 ** min(failures, 10)))
                try:
                    await self._launch()
                    break
                except Exception as error:
                    # Whatever a start fails of, the next one may succeed: without this task none would come.
                    failures += 1
                    logger.opt(exception=not isinstance(error, EngineError)).error("{}", error)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Bound log, memory and silence of a running server; returns when it was told to end."""
        started = answered = time.monotonic()
        limit = self._settings.vllm.max_memory_gib
        while True:
            await asyncio.sleep(WATCH_S)
            await asyncio.to_thread(rotate, self._log, LOG_BYTES)
            if await self._healthy():
                answered = time.monotonic()
            if time.monotonic() - answered > SILENT_S:
                logger.error("vLLM runs, but has not answered /health for {:.0f} s: starting it again", SILENT_S)
                break
            if self._unheard_s() > STALLED_S:
                logger.error("vLLM runs, but no request got a token for {:.0f} s: starting it again", STALLED_S)
                break
            if limit is None:
                continue
            used = (await asyncio.to_thread(resident_bytes, process.pid)) / (1 << 30)
            if used > limit:
                age = time.monotonic() - started
                logger.warning(
                    "vLLM uses {:.1f} GiB, more than vllm.max_memory_gib = {}: starting it again{}",
                    used,
                    limit,
                    f"; it was ready for {age:.0f} s only, raise that setting" if age < STEADY_S else "",
                )
                self.ready = False
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECYCLE_S):
                        await self._idle.wait()
                self._recycled = True
                break
        self.ready = False
        _close(process)

    async def _end(self) -> None:
        """End the server and what it started."""
        process, self.ready = self._process, False
        if process is None:
            return
        if process.returncode is None:
            _close(process)
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        # The guard has ended all of it, unless it was killed itself.
        for pid, _ in _session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process = None


def _close(process: asyncio.subprocess.Process) -> None:
    """Tell the guard to end the server."""
    assert process.stdin is not None
    process.stdin.close()


def rotate(log: Path, above: int = 0) -> None:
    """Keep the newest logs beside `log`, and empty it, if it is larger; a server that appends to it goes on.

    Never raises: on a full disk the lines are dropped. Of a huge log the last `LOG_BYTES` are kept.
    """
    older = [log.with_suffix(f".{number}.log") for number in range(1, LOGS + 1)]
    try:
        size = log.stat().st_size
        if size <= above:
            return
        for newer, old in reversed(list(itertools.pairwise(older))):
            if newer.exists():
                newer.replace(old)
        with log.open("rb") as source, older[0].open("wb") as target:
            source.seek(max(0, size - LOG_BYTES))
            shutil.copyfileobj(source, target)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("{} cannot be kept, its lines are dropped: {}", log, error)
        with suppress(OSError):
            older[0].unlink()
    with suppress(OSError):
        os.truncate(log, 0)


def resident_bytes(session: int) -> int:
    """Memory of all processes of a session, shared pages counted in each."""
    return sum(pages for _, pages in _session(session)) * os.sysconf("SC_PAGE_SIZE")


def _session(session: int) -> Iterator[tuple[int, int]]:
    """(process, resident pages) of all processes of a session."""
    directories: list[Path] = []
    with suppress(OSError):
        directories += Path("/proc").iterdir()
    for directory in directories:
        if directory.name.isdigit():
            with suppress(OSError):
                fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == session:
                    yield int(directory.name), int(fields[21])
