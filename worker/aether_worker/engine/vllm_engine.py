"""vLLM as a supervised child on loopback.

The child never outlives this process. When it dies, the requests in flight fail at once, it is
started again with backoff, and the adapters are loaded again under the same names.
"""

import asyncio
import ctypes
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
from aether_common.wire import FinishReason
from loguru import logger

from aether_worker.engine.base import Engine, EngineError, Generation, Progress, Request, UnknownAdapter, room
from aether_worker.settings import WorkerSettings

MISSING_LOGPROB = -9999.0
POLL_S = 0.25
STOP_S = 15.0
HTTP_S = 120.0
RESTART_S = (1.0, 60.0)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


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
        *("--gpu-memory-utilization", str(vllm.gpu_memory_utilization)),
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
        *vllm.extra_args,
    ]


def environment() -> dict[str, str]:
    """Ours, with what the server needs; variables for its CPU build only where they are not set."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def sampling_params(request: Request, limit: int) -> dict[str, Any]:
    """The job's parameters in vLLM's words. No seed: seeded requests are sampled one by one."""
    sampling = request.sampling
    return {
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        # The stop set is the coordinator's alone.
        "ignore_eos": True,
        "logprobs": 1,
        "skip_special_tokens": False,
        "detokenize": False,
    }


class VllmEngine(Engine):
    name = "vllm"

    def __init__(self, settings: WorkerSettings, model: Path) -> None:
        self._settings = settings
        self._model = model
        self._log = settings.state_dir / "logs" / "vllm.log"
        self._adapters: dict[str, tuple[str, Path]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._http: aiohttp.ClientSession | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._url = ""
        self._ready = False

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HTTP_S, sock_connect=5))
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())

    async def health(self) -> bool:
        if not self._ready:
            return False
        try:
            return (await self._call("GET", "/health", timeout_s=2))[0] == 200
        except EngineError:
            return False

    async def load_adapter(self, version: int, digest: str, path: Path) -> None:
        name = f"v{version}-{digest}"
        await self._load(name, path)
        self._adapters[digest] = (name, path)

    async def unload_adapter(self, digest: str) -> None:
        if adapter := self._adapters.pop(digest, None):
            status, body = await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter[0]})
            if status not in (200, 404):
                raise EngineError(f"adapter {adapter[0]} cannot be unloaded: {status} {body}")

    async def generate(self, request: Request, on_progress: Progress) -> Generation:
        limit = room(request, self._settings.max_model_len)
        if request.adapter not in self._adapters:
            raise UnknownAdapter(f"adapter {request.adapter} is not loaded")
        name = self._adapters[request.adapter][0]
        body = {
            "model": name,
            "request_id": request.job,
            "token_ids": request.prompt,
            "sampling_params": sampling_params(request, limit),
        }
        try:
            status, answer = await self._call("POST", "/inference/v1/generate", body, timeout_s=None)
        except asyncio.CancelledError:
            await self.abort(request.job)
            raise
        if status == 404:
            raise UnknownAdapter(f"vLLM does not know {name}: {answer}")
        if status != 200:
            raise EngineError(f"vLLM answers {status}: {answer}")
        generation = read_answer(answer)
        on_progress(len(generation.tokens))
        return generation

    async def abort(self, job: str) -> None:
        # The server puts this before the id that it was sent.
        with suppress(EngineError):
            await self._call("POST", "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{job}"]}, 2)

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        await self._end_process()
        if self._http is not None:
            await self._http.close()

    async def _launch(self) -> None:
        """Start the child and wait until it is ready. Raises `EngineError` when it ends or takes too long."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        python = self._settings.vllm.python or Path(sys.executable)
        self._url = f"http://127.0.0.1:{port}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with self._log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    python,
                    *arguments(self._settings, self._model, port),
                    env=environment(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            except OSError as error:
                raise EngineError(f"vllm.python = '{python}' cannot be started: {error.strerror}") from error
        logger.info("vLLM starts (pid {}), its log is {}", self._process.pid, self._log)
        said = started
        try:
            while not await self._answers():
                now = time.monotonic()
                if self._process.returncode is not None:
                    self._fail(f"vLLM ended with exit code {self._process.returncode} while it started")
                if now - started > self._settings.vllm.startup_s:
                    self._fail(f"vLLM was not ready after vllm.startup_s = {self._settings.vllm.startup_s:.0f} s")
                if now - said > 30:
                    said = now
                    logger.info("vLLM is starting since {:.0f} s", now - started)
                await asyncio.sleep(POLL_S)
            for name, path in list(self._adapters.values()):
                await self._load(name, path)
        except BaseException:
            await self._end_process()
            raise
        self._ready = True
        logger.info("vLLM is ready after {:.0f} s", time.monotonic() - started)

    def _fail(self, problem: str) -> NoReturn:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 2000))
            tail = log.read().decode(errors="replace")
        raise EngineError(f"{problem}; the end of {self._log}:\n{tail}")

    async def _answers(self) -> bool:
        try:
            return (await self._call("GET", "/health", timeout_s=5))[0] == 200
        except EngineError:
            return False

    async def _supervise(self) -> None:
        """Start it again when it ends, for ever."""
        failures = 0
        while True:
            assert self._process is not None
            started = time.monotonic()
            code = await self._process.wait()
            self._ready = False
            await self._end_process()
            failures = failures + 1 if time.monotonic() - started < RESTART_S[1] else 1
            logger.error("vLLM ended with exit code {}, starting it again", code)
            while True:
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(RESTART_S[1], RESTART_S[0] * 2**failures))
                try:
                    await self._launch()
                    break
                except EngineError as error:
                    failures += 1
                    logger.error("{}", error)

    async def _end_process(self) -> None:
        """End the child and what it started."""
        process, self._ready = self._process, False
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
                    break
        # The server's own children have its group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    async def _load(self, name: str, path: Path) -> None:
        body = {"lora_name": name, "lora_path": str(path)}
        status, answer = await self._call("POST", "/v1/load_lora_adapter", body)
        # 400 also says that the name is there already, which then holds the same bytes.
        if status != 200 and not (status == 400 and "already" in str(answer)):
            raise EngineError(f"adapter {name} cannot be loaded: {status} {answer}")

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = HTTP_S
    ) -> tuple[int, Any]:
        """(status, JSON or text). Raises `EngineError` when the server does not answer."""
        if self._http is None:
            raise EngineError("vLLM is not started")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)
        try:
            async with self._http.request(method, self._url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.content_type == "application/json":
                    return response.status, await response.json()
                return response.status, text
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineError(f"vLLM does not answer {path}: {type(error).__name__} {error}") from error


def read_answer(answer: Any) -> Generation:
    """Tokens and logprobs of a `GenerateResponse`. Raises `EngineError` for everything incomplete."""
    try:
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice["token_ids"]]
        logprobs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        reason: FinishReason | None = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM's answer cannot be read ({error!r}): {str(answer)[:500]}") from error
    if reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended the request with finish_reason {reason!r}")
    if not tokens or len(tokens) != len(logprobs) or any(value <= MISSING_LOGPROB for value in logprobs):
        raise EngineError(f"vLLM's answer has {len(tokens)} tokens, but logprobs {str(logprobs)[:200]}")
    return Generation(tokens, logprobs, reason)


def _end_with_parent() -> None:
    """In the child: get SIGTERM when the worker dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
