"""vLLM behind the engine interface: adapters under names that are never used twice, completions as streams."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

from aether_common.wire import FinishReason

from aether_worker.adapter_check import AdapterCheck
from aether_worker.engine.base import (
    Engine,
    EngineError,
    EngineUnavailable,
    Generation,
    Progress,
    Request,
    UnknownAdapter,
    room,
)
from aether_worker.engine.vllm_server import VllmServer
from aether_worker.settings import WorkerSettings

MISSING_LOGPROB = -9999.0
GENERATE = "/inference/v1/generate"
PROBE = {"temperature": 0.0, "max_tokens": 1, "logprobs": 1, "detokenize": False}
PROBE_PROMPT = [0]


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
        self._max_model_len = settings.max_model_len
        self._check = AdapterCheck(settings.dtype, settings.vllm.max_lora_rank)
        self._adapters: dict[str, tuple[str, Path]] = {}
        self._server = VllmServer(settings, model, self._load_again)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    async def health(self) -> bool:
        return await self._server.health()

    def check_adapter(self, directory: Path) -> None:
        self._check(directory)

    async def load_adapter(self, version: int, digest: str, path: Path) -> None:
        if not self._server.ready:
            raise EngineUnavailable("vLLM is starting")
        name = f"v{version}-{digest}"
        await self._load(name, path)
        self._adapters[digest] = (name, path)

    async def _load_again(self) -> None:
        """A new server has none of the adapters."""
        for name, path in list(self._adapters.values()):
            await self._load(name, path)

    async def _load(self, name: str, path: Path) -> None:
        """Load an adapter and sample one token with it: what cannot be used shows here, not in a job."""
        status, answer = await self._server.call(
            "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}
        )
        # 400 also says that the name is there already, which then holds the same bytes.
        if status != 200 and not (status == 400 and "already" in str(answer)):
            raise EngineError(f"adapter {name} cannot be loaded: {status} {answer}")
        body = {"model": name, "token_ids": PROBE_PROMPT, "sampling_params": PROBE}
        status, answer = await self._server.call("POST", GENERATE, body)
        if status != 200:
            with suppress(EngineError):
                await self._unload(name)
            raise EngineError(f"adapter {name} is loaded, but cannot be used: {status} {answer}")

    async def unload_adapter(self, digest: str) -> None:
        adapter = self._adapters.pop(digest, None)
        # A server that starts gets only what is in the table.
        if adapter is not None and self._server.ready:
            await self._unload(adapter[0])

    async def _unload(self, name: str) -> None:
        status, answer = await self._server.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if status not in (200, 404):
            raise EngineError(f"adapter {name} cannot be unloaded: {status} {answer}")

    async def generate(self, request: Request, on_progress: Progress) -> Generation:
        limit = room(request, self._max_model_len)
        if request.adapter not in self._adapters:
            raise UnknownAdapter(f"adapter {request.adapter} is not loaded")
        name = self._adapters[request.adapter][0]
        body = {
            "model": name,
            "request_id": request.job,
            "token_ids": request.prompt,
            "sampling_params": sampling_params(request, limit),
            "stream": True,
        }
        try:
            return await self._stream(name, body, on_progress)
        except asyncio.CancelledError:
            await self.abort(request.job)
            raise

    async def _stream(self, name: str, body: dict[str, Any], on_progress: Progress) -> Generation:
        tokens: list[int] = []
        logprobs: list[float] = []
        reason: str | None = None
        async with self._server.stream(GENERATE, body) as response:
            if response.status == 404:
                raise UnknownAdapter(f"vLLM does not know {name}: {await response.text()}")
            if response.status != 200:
                raise EngineError(f"vLLM answers {response.status}: {await response.text()}")
            async for event in events(response.content):
                reason = read_event(event, tokens, logprobs) or reason
                self._server.progressed()
                on_progress(len(tokens))
        return checked(tokens, logprobs, reason)

    async def abort(self, job: str) -> None:
        # The server puts this before the id that it was sent.
        with suppress(EngineError):
            ids = {"request_ids": [f"generate-tokens-{job}"]}
            await self._server.call("POST", "/inference/v1/abort_requests", ids, timeout_s=2)


async def events(lines: Any) -> AsyncGenerator[Any]:
    """The JSON of every server-sent event. Raises `EngineError` when the stream does not end as it should."""
    async for line in lines:
        text = line.strip()
        if text == b"data: [DONE]":
            return
        if text.startswith(b"data: "):
            try:
                yield json.loads(text[6:])
            except ValueError as error:
                raise EngineError(f"vLLM's answer cannot be read: {text[:500]!r}") from error
    raise EngineError("vLLM's answer broke off")


def read_event(event: Any, tokens: list[int], logprobs: list[float]) -> str | None:
    """Append the tokens and logprobs of one event; returns its finish reason. Raises `EngineError`."""
    if isinstance(event, dict) and "error" in event:
        raise EngineError(f"vLLM failed: {event['error']}")
    try:
        choice = event["choices"][0]
        tokens += [int(token) for token in choice["token_ids"]]
        logprobs += [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        return choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM's answer cannot be read ({error!r}): {str(event)[:500]}") from error


def is_logprob(value: float) -> bool:
    return math.isfinite(value) and value > MISSING_LOGPROB


def checked(tokens: list[int], logprobs: list[float], reason: str | None) -> Generation:
    """The whole completion. Raises `EngineError` for everything incomplete."""
    if reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended the request with finish_reason {reason!r}")
    if not tokens or len(tokens) != len(logprobs) or not all(map(is_logprob, logprobs)):
        raise EngineError(f"vLLM's answer has {len(tokens)} tokens, but logprobs {str(logprobs)[:200]}")
    finish: FinishReason = reason
    return Generation(tokens, logprobs, finish)
