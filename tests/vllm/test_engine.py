"""The vLLM engine against real vLLM: whose tokens, whose logprobs, and what is left when it dies."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from aether_common.wire import Sampling
from aether_worker.engine.base import EngineError, Generation, Progress, PromptTooLong, Request
from aether_worker.engine.vllm_engine import VllmEngine
from aether_worker.settings import WorkerSettings
from vllm_reference import Adapter, Reference, processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [1, 50, 60, 70, 99, 120]
TOLERANCE = 1e-4
"""float32 on one machine; 1e-6 was measured."""


def sampled(**values: Any) -> Sampling:
    return Sampling.model_validate(values)


async def generate(
    engine: VllmEngine, adapter: Adapter, job: str, on_progress: Progress = lambda _: None, **sampling: Any
) -> Generation:
    request = Request(job, adapter.digest, PROMPT, sampled(**({"max_tokens": 24} | sampling)), seed=0)
    return await engine.generate(request, on_progress)


async def test_two_adapters_side_by_side(engine: VllmEngine, adapters: list[Adapter], reference: Reference) -> None:
    """Greedy, in one batch: each gives what plain transformers gives with it, and they differ."""
    assert await engine.health()
    answers = await asyncio.gather(*(generate(engine, one, f"j{one.version}", temperature=0) for one in adapters[:2]))
    for adapter, answer in zip(adapters, answers, strict=False):
        best = reference.logits(adapter.digest, PROMPT, answer.tokens).argmax(-1).tolist()
        assert answer.tokens == best
        assert reference.error(adapter.digest, PROMPT, answer.tokens, answer.logprobs, 1.0) < TOLERANCE
    assert answers[0].tokens != answers[1].tokens
    assert answers[0].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: VllmEngine, adapters: list[Adapter], reference: Reference, temperature: float
) -> None:
    """What the trainer computes: log_softmax(logits / T)."""
    first = adapters[0]
    answers = await asyncio.gather(*(generate(engine, first, f"t{n}", temperature=temperature) for n in range(4)))
    for answer in answers:
        assert reference.error(first.digest, PROMPT, answer.tokens, answer.logprobs, temperature) < TOLERANCE
    assert len({tuple(answer.tokens) for answer in answers}) > 1
    # The other temperature, and the other adapter, are far away: the comparison can fail.
    tokens, logprobs = answers[0].tokens, answers[0].logprobs
    assert reference.error(first.digest, PROMPT, tokens, logprobs, 1.7 - temperature) > 100 * TOLERANCE
    assert reference.error(adapters[1].digest, PROMPT, tokens, logprobs, temperature) > 100 * TOLERANCE


async def test_a_stop_token_is_the_last_and_has_its_logprob(engine: VllmEngine, adapters: list[Adapter]) -> None:
    greedy = await generate(engine, adapters[0], "greedy", temperature=0)
    stop = greedy.tokens[3]
    request = Request(
        "stopped", adapters[0].digest, PROMPT, sampled(temperature=0, max_tokens=24, stop_token_ids=(stop,)), seed=0
    )
    progress: list[int] = []
    stopped = await engine.generate(request, progress.append)
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == greedy.tokens[: greedy.tokens.index(stop) + 1]
    assert progress[-1] == len(stopped.tokens) == len(stopped.logprobs)
    too_long = Request("long", adapters[0].digest, [5] * 256, sampled(max_tokens=1), seed=0)
    with pytest.raises(PromptTooLong):
        await engine.generate(too_long, lambda _: None)


async def test_adapters_come_and_go_under_load(
    engine: VllmEngine, adapters: list[Adapter], reference: Reference
) -> None:
    """While new ones are loaded and old ones unloaded, each answer comes from the adapter that was asked for."""
    answered: list[tuple[Adapter, Generation]] = []

    async def load(adapter: Adapter) -> None:
        await engine.load_adapter(adapter.version, adapter.digest, adapter.path)

    async def ask(adapter: Adapter, times: int) -> None:
        for number in range(times):
            answer = await generate(engine, adapter, f"{adapter.version}-{number}", temperature=1.0, max_tokens=6)
            answered.append((adapter, answer))

    for new in adapters[2:]:
        older = adapters[new.version - 2 : new.version]
        await asyncio.gather(load(new), *(ask(adapter, 3) for adapter in older))
        await ask(new, 1)
        await engine.unload_adapter(older[0].digest)
    assert len(answered) == 4 * 7
    for adapter, answer in answered:
        errors = [reference.error(one.digest, PROMPT, answer.tokens, answer.logprobs, 1.0) for one in adapters]
        assert [error < TOLERANCE for error in errors] == [one is adapter for one in adapters]


async def test_an_adapter_that_does_not_fit_is_refused(
    engine: VllmEngine, adapters: list[Adapter], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text((adapters[0].path / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(EngineError, match=r"adapter v9-\S+ cannot be loaded"):
        await engine.load_adapter(9, "9" * 64, tmp_path)
    assert await engine.health()


async def test_killed_under_load(
    engine: VllmEngine, adapters: list[Adapter], reference: Reference, settings: WorkerSettings
) -> None:
    """Its requests fail at once, it comes back with its adapters, and of the killed one no process is left."""
    latest = adapters[-1]
    before = processes(settings.model)
    (server,) = (pid for pid, command in before.items() if "api_server" in command and "guard" not in command)
    unheard = set(range(4))

    def heard(number: int) -> None:
        if number in unheard:
            unheard.remove(number)
            if not unheard:
                os.kill(server, signal.SIGKILL)

    async with asyncio.timeout(20):
        running = (generate(engine, latest, f"k{n}", lambda _, n=n: heard(n), max_tokens=200) for n in range(4))
        results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(result) for result in results] == 4 * [EngineError], results
    async with asyncio.timeout(200):
        while not await engine.health():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.2)
    assert not set(before) & set(processes(settings.model))
    answer = await generate(engine, latest, "again")
    assert reference.error(latest.digest, PROMPT, answer.tokens, answer.logprobs, 1.0) < TOLERANCE
