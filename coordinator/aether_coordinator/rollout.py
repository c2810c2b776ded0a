"""One episode: a verifiers run of its task, its model calls answered through the gateway.

What only infrastructure can cause is tried again as a new attempt, and is never a reward. What the
policy can cause (turns, tokens, context used up) ends the episode truncated and scored. A failure of
the task's own code is data: the episode fails and stays out of its group's comparison.
"""

import asyncio
import math
from dataclasses import dataclass
from typing import Any, Literal

import renderers.client
from aether_chat.harness import CONTEXT_EXHAUSTED
from loguru import logger
from verifiers.v1 import Episode, ModelContext, SamplingConfig, TrainClientConfig

from aether_coordinator.gateway import SECRET_VARIABLE, Gateway, OpenEpisode
from aether_coordinator.samples import encode_episode, episode_reward, episode_samples, sampled_tokens
from aether_coordinator.sources import Source

INFRASTRUCTURE = {"ProviderError", "SandboxError", "InterceptionError", "TunnelError", "ToolsetError", "HarnessError"}
"""verifiers' error types whose boundary is infrastructure."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt."""

    kind: Literal["done", "infrastructure", "failed"]
    reward: float = 0.0
    tokens: int = 0
    truncated: bool = False
    trace: bytes = b""
    error: str = ""


def client_config(gateway: Gateway, model_path: str, renderer: dict[str, Any]) -> TrainClientConfig:
    """verifiers' train client against the gateway, with the renderer named explicitly."""
    return TrainClientConfig.model_validate(
        {
            "base_url": f"http://127.0.0.1:{gateway.port}/v1",
            "api_key_var": SECRET_VARIABLE,
            "renderer": renderer,
            "renderer_model_name": model_path,
        }
    )


def forget_model(gateway: Gateway, model: str) -> None:
    """The client caches the context length for every model name for ever, and each attempt has its own name."""
    renderers.client._max_prompt_len_cache.pop((f"http://127.0.0.1:{gateway.port}/v1/", model), None)  # pyright: ignore[reportPrivateUsage]


async def run_attempt(
    episode: OpenEpisode, source: Source, gateway: Gateway, client: TrainClientConfig, timeout_s: float
) -> Outcome:
    """Run one attempt of an episode to its end."""
    sampling = SamplingConfig.model_validate(_verifiers_sampling(source))
    context = ModelContext(model=episode.model, client=client, sampling=sampling)
    task = source.tasks[episode.group.task]
    gateway.open(episode)
    try:
        run = asyncio.ensure_future(source.env.run_slot(source.env.slots(task)[0], context))
        if not await _within(run, episode, timeout_s):
            return Outcome("failed", error=f"timeout: longer than {timeout_s:.0f} s without the waits for workers")
        return _judge(run.result(), episode)
    except Exception as error:
        # What a task's own code raises or leaves in its trace must not end the run.
        logger.bind(episode=episode.record.id).exception("episode failed unexpectedly")
        return Outcome("failed", error=f"{type(error).__name__}: {error}"[:500])
    finally:
        gateway.close(episode)
        forget_model(gateway, episode.model)


async def _within(run: "asyncio.Future[Any]", episode: OpenEpisode, timeout_s: float) -> bool:
    """Wait for the run; False, and the run cancelled, when its own time is used up."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        while not run.done():
            left = timeout_s - (loop.time() - started - episode.waited())
            if left <= 0:
                return False
            await asyncio.wait([run], timeout=min(left + 0.01, 30.0))
        return True
    finally:
        if not run.done():
            run.cancel()
            await asyncio.wait([run], timeout=30)


def _verifiers_sampling(source: Source) -> dict[str, Any]:
    values = source.settings.sampling.model_dump()
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {key: value for key, value in values.items() if neutral.get(key) != value}


def _judge(finished: Episode, episode: OpenEpisode) -> Outcome:
    """Classify a finished run by the boundary that its failure crossed."""
    errors = [*finished.errors, *(error for trace in finished.traces for error in trace.errors if not trace.ok)]
    if not finished.ok:
        last = errors[-1] if errors else None
        text = f"{last.type}: {last.message}" if last else "the episode did not end well and gives no reason"
        if episode.failure:
            return Outcome("infrastructure", error=episode.failure)
        if last and last.type in INFRASTRUCTURE and CONTEXT_EXHAUSTED not in last.message:
            return Outcome("infrastructure", error=text[:500])
        logger.bind(episode=episode.record.id).warning("episode failed: {}", text[:500])
        return Outcome("failed", error=text[:500])
    truncated = any(
        trace.is_truncated or trace.is_timeout or trace.stop_condition == CONTEXT_EXHAUSTED for trace in finished.traces
    )
    reward = episode_reward(finished)
    if not math.isfinite(reward):
        return Outcome("failed", error=f"the reward is {reward}")
    # Flattened once now: what could not enter a batch later must not be accepted.
    if episode.group.kind == "train" and not episode_samples(
        finished, episode.record, episode.group, advantage=0.0, temperature=1.0
    ):
        return Outcome("failed", error="the episode has no sampled token")
    return Outcome(
        "done",
        reward=reward,
        tokens=sampled_tokens(finished),
        truncated=truncated,
        trace=encode_episode(finished),
    )
