"""What the worker needs of an inference engine, and the errors it can answer with.

Token ids in, token ids and logprobs out. Logprobs are those of the distribution sampled from,
temperature included; at temperature 0 (greedy) those of the plain distribution (temperature 1).
The stop token is the last sampled token, with its logprob; on a length stop nothing is appended.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aether_common.errors import EngineError
from aether_common.wire import FinishReason, Sampling

__all__ = [
    "Engine",
    "EngineError",
    "EngineUnavailable",
    "Generation",
    "Progress",
    "PromptTooLong",
    "Request",
    "UnknownAdapter",
]

Progress = Callable[[int], None]
"""Called in the event loop with the number of tokens generated so far."""


class PromptTooLong(EngineError):
    """The prompt leaves no room for a token: no worker with this context length can serve it."""


class UnknownAdapter(EngineError):
    """The adapter is not loaded."""


class EngineUnavailable(EngineError):
    """The engine is starting, or was started again on purpose: no failure of the job or of this worker."""


@dataclass(frozen=True, slots=True)
class Request:
    """One job as the engine sees it."""

    job: str
    adapter: str
    """Digest of a loaded adapter."""
    prompt: list[int]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Generation:
    tokens: list[int]
    logprobs: list[float]
    """One per token."""
    finish_reason: FinishReason


class Engine(ABC):
    """One inference engine. All methods are called in the event loop."""

    name: str

    @abstractmethod
    async def start(self) -> None:
        """Load the base model. Raises `EngineError` when that fails."""

    @abstractmethod
    async def health(self) -> bool:
        """Whether it can generate now."""

    def check_adapter(self, directory: Path) -> None:  # noqa: B027 - an engine without a model takes any
        """Whether the engine could serve a verified adapter, by its files. Raises `AdapterError`; runs in a thread."""

    @abstractmethod
    async def load_adapter(self, version: int, digest: str, path: Path) -> None:
        """Load the adapter in directory `path`, which stays until it is unloaded. Raises `EngineError`."""

    @abstractmethod
    async def unload_adapter(self, digest: str) -> None:
        """Forget an adapter that no request uses; nothing happens if it is not loaded."""

    @abstractmethod
    async def generate(self, request: Request, on_progress: Progress) -> Generation:
        """Sample one completion. Cancelling the call aborts it.

        Raises `PromptTooLong`, `UnknownAdapter` or `EngineError`.
        """

    @abstractmethod
    async def abort(self, job: str) -> None:
        """Stop generating for `job` soon; its `generate` call is cancelled by the caller."""

    @abstractmethod
    async def stop(self) -> None:
        """End everything that `start` began. May be called twice, and after a failed start."""


def room(request: Request, max_model_len: int) -> int:
    """Tokens that may be generated: `max_tokens`, or less where the context ends. Raises `PromptTooLong`."""
    free = max_model_len - len(request.prompt)
    if free < 1:
        raise PromptTooLong(
            f"the prompt has {len(request.prompt)} tokens: max_model_len = {max_model_len} leaves no room for an answer"
        )
    return min(request.sampling.max_tokens, free)
