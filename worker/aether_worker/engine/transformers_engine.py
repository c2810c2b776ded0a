"""The CPU engine: transformers and peft in one thread of this process.

Several adapters are loaded at once. A batch has one adapter: that of the oldest request; requests
that arrive meanwhile join the next one. Adapters are loaded and unloaded, and requests aborted,
between tokens.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from aether_common.wire import FinishReason
from loguru import logger
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from aether_worker.adapter_check import AdapterCheck
from aether_worker.engine.base import Engine, EngineError, Generation, Progress, Request, UnknownAdapter, room
from aether_worker.engine.decode import Row, decode
from aether_worker.settings import TransformersSettings

GATHER_S = 0.01
"""An idle engine waits so long for the other jobs of a group before it starts a batch."""
SIMILAR_TOKENS = 64


@dataclass(slots=True, eq=False)
class _Waiting:
    row: Row
    future: asyncio.Future[Generation]
    on_progress: Progress
    answered: bool = False


class TransformersEngine(Engine):
    name = "transformers"

    def __init__(self, model: Path, dtype: str, slots: int, max_model_len: int, settings: TransformersSettings) -> None:
        self._path = model
        self._dtype = getattr(torch, dtype)
        self._check = AdapterCheck(dtype)
        self._slots = slots
        self._max_model_len = max_model_len
        self._settings = settings
        self._base: Any = None
        self._peft: PeftModel | None = None
        self._names: dict[str, str] = {}
        """peft's adapter name by digest."""
        self._active = ""
        self._queue: list[_Waiting] = []
        self._requests: dict[str, _Waiting] = {}
        self._commands: list[tuple[Callable[[], None], Future[None]]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        await self._in_thread(self._load_model)

    async def health(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._base is not None

    def check_adapter(self, directory: Path) -> None:
        self._check(directory)

    async def load_adapter(self, version: int, digest: str, path: Path) -> None:
        await self._in_thread(lambda: self._load_adapter(version, digest, path))

    async def unload_adapter(self, digest: str) -> None:
        await self._in_thread(lambda: self._unload_adapter(digest))

    async def generate(self, request: Request, on_progress: Progress) -> Generation:
        if request.adapter not in self._names:
            raise UnknownAdapter(f"adapter {request.adapter} is not loaded")
        limit = room(request, self._max_model_len)
        if not request.prompt or max(request.prompt) >= self._base.config.get_text_config().vocab_size:
            raise EngineError("the prompt is empty or has token ids outside of the vocabulary")
        waiting = _Waiting(Row(request, limit), asyncio.get_running_loop().create_future(), on_progress)
        self._requests[request.job] = waiting
        with self._changed:
            self._queue.append(waiting)
            self._changed.notify()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            await self.abort(request.job)
            raise
        finally:
            self._requests.pop(request.job, None)

    async def abort(self, job: str) -> None:
        if waiting := self._requests.get(job):
            waiting.row.aborted = True
            with self._changed, suppress(ValueError):
                self._queue.remove(waiting)

    async def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30)

    async def _in_thread(self, call: Callable[[], None]) -> None:
        future: Future[None] = Future()
        with self._changed:
            if self._stopping or self._thread is None:
                raise EngineError("the engine is stopped")
            self._commands.append((call, future))
            self._changed.notify()
        await asyncio.wrap_future(future)

    # Everything below runs in the engine's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._commands or self._stopping):
                    self._changed.wait()
                if self._queue and not self._commands and not self._stopping:
                    self._gather()
            self._run_commands()
            if self._stopping:
                break
            if batch := self._take():
                self._run_batch(batch)
        for waiting in self._queue:
            self._fail(waiting, EngineError("the engine is stopped"))

    def _gather(self) -> None:
        count = 0
        while len(self._queue) != count and len(self._queue) < self._slots:
            count = len(self._queue)
            self._changed.wait(GATHER_S)

    def _run_commands(self) -> None:
        with self._changed:
            commands, self._commands = self._commands, []
        for call, future in commands:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                call()
            except Exception as error:
                failure = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
                failure.__cause__ = error
                future.set_exception(failure)
            else:
                future.set_result(None)

    def _take(self) -> list[_Waiting]:
        with self._changed:
            if not self._queue:
                return []
            oldest = self._queue[0].row.request
            batch = [waiting for waiting in self._queue if _joins(waiting.row.request, oldest)][: self._slots]
            taken = set(map(id, batch))
            self._queue = [waiting for waiting in self._queue if id(waiting) not in taken]
            return batch

    def _run_batch(self, batch: Sequence[_Waiting]) -> None:
        try:
            self._activate(batch[0].row.request.adapter)
            for part in [[waiting] for waiting in batch] if self._settings.batch_invariant else [batch]:
                rows = [waiting.row for waiting in part if not waiting.row.aborted]
                if rows and not self._stopping:
                    decode(self._base, rows, lambda part=part: self._between(part))
        except Exception as error:
            logger.exception("generation failed")
            failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
            for waiting in batch:
                self._fail(waiting, failure)
            return
        for waiting in batch:
            if waiting.row.live:
                self._fail(waiting, EngineError("the engine is stopped"))

    def _between(self, part: Sequence[_Waiting]) -> None:
        counts: list[tuple[Progress, int]] = []
        for waiting in part:
            row = waiting.row
            if self._stopping and row.live:
                row.aborted = True
                self._fail(waiting, EngineError("the engine is stopped"))
            elif row.finish is not None and not waiting.answered:
                self._finish(waiting, row.finish)
            elif row.live:
                counts.append((waiting.on_progress, len(row.tokens)))
        self._call(lambda: [report(count) for report, count in counts])
        if self._commands:
            active = self._active
            self._run_commands()
            self._activate(active)

    def _finish(self, waiting: _Waiting, reason: FinishReason) -> None:
        waiting.answered = True
        generation = Generation(waiting.row.tokens, waiting.row.logprobs, reason)
        self._call(lambda: None if waiting.future.done() else waiting.future.set_result(generation))

    def _fail(self, waiting: _Waiting, error: EngineError) -> None:
        self._call(lambda: None if waiting.future.done() else waiting.future.set_exception(error))

    def _call(self, call: Callable[[], object]) -> None:
        # After the end of the loop nobody waits for the answer.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def _load_model(self) -> None:
        torch.set_num_threads(self._settings.threads)
        transformers_logging.disable_progress_bar()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype)
        except Exception as error:
            raise EngineError(f"model {self._path} cannot be loaded: {type(error).__name__}: {error}") from error
        self._base = model.to(self._settings.device).eval()

    def _load_adapter(self, version: int, digest: str, path: Path) -> None:
        if digest in self._names:
            return
        name = f"v{version}-{digest}"
        # Without autocast the adapter stays in the serving dtype, as on every other engine.
        options: dict[str, Any] = {"adapter_name": name, "is_trainable": False, "autocast_adapter_dtype": False}
        try:
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(self._base, str(path), **options)
            else:
                self._peft.load_adapter(str(path), torch_device=self._settings.device, **options)
        except Exception as error:
            raise EngineError(f"adapter {path} cannot be loaded: {type(error).__name__}: {error}") from error
        self._base = self._peft.get_base_model().eval()
        self._names[digest] = name
        self._active = ""

    def _unload_adapter(self, digest: str) -> None:
        name = self._names.pop(digest, None)
        if name is None or self._peft is None:
            return
        if self._names:
            self._peft.set_adapter(next(iter(self._names.values())))
            self._peft.delete_adapter(name)
        else:
            # peft cannot be without any adapter.
            self._base, self._peft = self._peft.unload(), None
        self._active = ""

    def _activate(self, digest: str) -> None:
        if self._peft is None or digest not in self._names:
            raise UnknownAdapter(f"adapter {digest} is not loaded")
        if self._active != digest:
            self._peft.set_adapter(self._names[digest])
            self._active = digest


def _joins(request: Request, oldest: Request) -> bool:
    """Whether a request may be in a batch with the oldest: same adapter, and not mostly padding."""
    longer, shorter = sorted((len(request.prompt), len(oldest.prompt)), reverse=True)
    return request.adapter == oldest.adapter and longer <= 2 * shorter + SIMILAR_TOKENS
