"""An engine without a model: every job has the same completion, at once or at a fixed rate."""

import asyncio
from pathlib import Path

from aether_worker.engine.base import Engine, Generation, Progress, Request, UnknownAdapter, room
from aether_worker.settings import NullSettings

LOGPROB = -1.0


class NullEngine(Engine):
    name = "null"

    def __init__(self, settings: NullSettings, max_model_len: int) -> None:
        self._tokens = settings.tokens
        self._seconds = 1 / settings.tokens_per_s if settings.tokens_per_s else 0.0
        self._max_model_len = max_model_len
        self._adapters: set[str] = set()

    async def start(self) -> None:
        pass

    async def health(self) -> bool:
        return True

    async def load_adapter(self, version: int, digest: str, path: Path) -> None:
        self._adapters.add(digest)

    async def unload_adapter(self, digest: str) -> None:
        self._adapters.discard(digest)

    async def generate(self, request: Request, on_progress: Progress) -> Generation:
        if request.adapter not in self._adapters:
            raise UnknownAdapter(f"adapter {request.adapter} is not loaded")
        limit = room(request, self._max_model_len)
        tokens = self._tokens[:limit]
        if self._seconds:
            for count in range(1, len(tokens) + 1):
                await asyncio.sleep(self._seconds)
                on_progress(count)
        else:
            on_progress(len(tokens))
        return Generation(tokens, [LOGPROB] * len(tokens), "length" if limit < len(self._tokens) else "stop")

    async def abort(self, job: str) -> None:
        pass

    async def stop(self) -> None:
        self._adapters.clear()
