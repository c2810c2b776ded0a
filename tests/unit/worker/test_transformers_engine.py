"""The CPU engine against independent forward passes of the same model."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aether_common.wire import Sampling
from aether_worker.engine.base import EngineError, PromptTooLong, Request, UnknownAdapter
from aether_worker.engine.transformers_engine import TransformersEngine
from aether_worker.settings import TransformersSettings
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_model import make_tiny_model
from transformers import LlamaForCausalLM

A, B = "a" * 64, "b" * 64
CONTEXT = 128


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("engine")
    make_tiny_model(directory / "model")
    for seed, digest in enumerate((A, B)):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(LlamaForCausalLM.from_pretrained(directory / "model"), config).save_pretrained(
            directory / digest
        )
    return directory


def make_engine(directory: Path, **settings: Any) -> TransformersEngine:
    return TransformersEngine(directory / "model", "float32", 16, CONTEXT, TransformersSettings(**settings))


@pytest.fixture
async def engine(directory: Path) -> AsyncIterator[TransformersEngine]:
    engine = make_engine(directory)
    await engine.start()
    for version, digest in enumerate((A, B)):
        await engine.load_adapter(version, digest, directory / digest)
    yield engine
    await engine.stop()


def reference(directory: Path, digest: str) -> PeftModel:
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(directory / "model"), str(directory / digest))


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 259), k=length)


def quiet(_: int) -> None:
    pass


@torch.inference_mode()
def forward_logprobs(model: PeftModel, request: Request, tokens: list[int]) -> list[float]:
    """log_softmax(logits / T) of the whole sequence in one forward pass."""
    logits = model(torch.tensor([request.prompt + tokens])).logits[0, len(request.prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
    return logprobs[range(len(tokens)), tokens].tolist()


async def test_logprobs_of_mixed_lengths_and_two_adapters_are_those_of_a_forward_pass(
    engine: TransformersEngine, directory: Path
) -> None:
    shared = prompt(20, 0)
    prompts = [shared + prompt(5, 1), shared + prompt(9, 2), prompt(3, 3), shared + prompt(5, 1), prompt(40, 4)]
    requests = [
        Request(f"{digest[0]}{i}", digest, tokens, Sampling(max_tokens=5 + i, temperature=temperature), seed=i)
        for digest in (A, B)
        for temperature in (0.7, 1.0)
        for i, tokens in enumerate(prompts)
    ]
    requests = [Request(f"{n}", r.adapter, r.prompt, r.sampling, n) for n, r in enumerate(requests)]
    answers = await asyncio.gather(*(engine.generate(request, quiet) for request in requests))
    models = {digest: reference(directory, digest) for digest in (A, B)}
    for request, answer in zip(requests, answers, strict=True):
        expected = forward_logprobs(models[request.adapter], request, answer.tokens)
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        assert answer.finish_reason == "length"
        assert len(answer.tokens) == request.sampling.max_tokens


async def test_greedy_equals_generate_of_transformers(engine: TransformersEngine, directory: Path) -> None:
    request = Request("greedy", A, prompt(12, 5), Sampling(max_tokens=20, temperature=0), seed=1)
    answer = await engine.generate(request, quiet)
    model = reference(directory, A)
    output = model.generate(
        input_ids=torch.tensor([request.prompt]),
        attention_mask=torch.ones(1, 12),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
    )
    assert answer.tokens == output[0, 12:].tolist()
    assert answer.logprobs == pytest.approx(forward_logprobs(model, request, answer.tokens), abs=1e-4)


async def test_a_stop_token_is_the_last_token(engine: TransformersEngine) -> None:
    free = Request("free", A, prompt(10, 6), Sampling(max_tokens=12), seed=3)
    tokens = (await engine.generate(free, quiet)).tokens
    stop = tokens[4]
    first = tokens.index(stop)
    stopped = Request("stopped", A, free.prompt, Sampling(max_tokens=12, stop_token_ids=(stop,)), seed=3)
    answer = await engine.generate(stopped, quiet)
    assert answer.tokens == tokens[: first + 1]
    assert len(answer.logprobs) == first + 1
    assert answer.finish_reason == "stop"


async def test_the_context_ends_a_completion(engine: TransformersEngine) -> None:
    request = Request("long", A, prompt(CONTEXT - 3, 7), Sampling(max_tokens=50), seed=3)
    answer = await engine.generate(request, quiet)
    assert (len(answer.tokens), answer.finish_reason) == (3, "length")
    with pytest.raises(PromptTooLong, match="128 tokens"):
        await engine.generate(Request("longer", A, prompt(CONTEXT, 7), Sampling(max_tokens=1), seed=3), quiet)


async def test_seeds_fix_the_completion(engine: TransformersEngine) -> None:
    def request(name: str, seed: int) -> Request:
        return Request(name, A, prompt(10, 8), Sampling(max_tokens=16), seed=seed)

    one, same, other = await asyncio.gather(
        *(engine.generate(request(name, seed), quiet) for name, seed in (("x", 5), ("y", 5), ("z", 6)))
    )
    assert one.tokens == same.tokens
    assert one.tokens != other.tokens


async def test_batch_invariant_tokens_do_not_depend_on_the_queue(directory: Path) -> None:
    engine = make_engine(directory, batch_invariant=True)
    await engine.start()
    await engine.load_adapter(0, A, directory / A)
    await engine.load_adapter(1, B, directory / B)
    request = Request("it", A, prompt(15, 9), Sampling(max_tokens=20), seed=11)
    alone = await engine.generate(request, quiet)
    others = [Request(f"o{i}", (A, B)[i % 2], prompt(5 + 3 * i, i), Sampling(max_tokens=10), seed=i) for i in range(6)]
    crowd = await asyncio.gather(*(engine.generate(r, quiet) for r in [*others[:3], request, *others[3:]]))
    await engine.stop()
    assert crowd[3] == alone


async def test_progress_is_reported_and_a_cancelled_call_leaves_the_batch(engine: TransformersEngine) -> None:
    seen: list[int] = []
    started = asyncio.Event()

    def report(count: int) -> None:
        seen.append(count)
        started.set()

    long = Request("long", A, prompt(5, 10), Sampling(max_tokens=100), seed=1)
    short = Request("short", A, prompt(5, 10), Sampling(max_tokens=30), seed=2)
    call = asyncio.create_task(engine.generate(long, report))
    other = asyncio.create_task(engine.generate(short, quiet))
    await started.wait()
    call.cancel()
    assert len((await other).tokens) == 30
    with pytest.raises(asyncio.CancelledError):
        await call
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) < 100


async def test_adapters_come_and_go_while_others_generate(engine: TransformersEngine, directory: Path) -> None:
    request = Request("a", A, prompt(5, 11), Sampling(max_tokens=60), seed=1)
    before = await engine.generate(request, quiet)
    running = asyncio.create_task(engine.generate(request, quiet))
    await engine.unload_adapter(B)
    await engine.load_adapter(7, B, directory / B)
    assert (await running).tokens == before.tokens
    await engine.unload_adapter(A)
    await engine.unload_adapter(B)
    with pytest.raises(UnknownAdapter):
        await engine.generate(request, quiet)
    await engine.load_adapter(8, A, directory / A)
    assert (await engine.generate(request, quiet)).tokens == before.tokens


async def test_what_is_no_token_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(EngineError, match="vocabulary"):
        await engine.generate(Request("x", A, [259], Sampling(max_tokens=1), seed=1), quiet)


async def test_a_model_that_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    engine = TransformersEngine(tmp_path, "float32", 1, 16, TransformersSettings())
    with pytest.raises(EngineError, match="cannot be loaded"):
        await engine.start()
    await engine.stop()
