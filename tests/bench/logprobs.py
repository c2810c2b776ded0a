"""The trainer's recomputed logprobs against those that the CPU engine sampled with, both in float32.

    uv run python tests/bench/logprobs.py

Two models with random weights: the tiny one of the tests, and one in the shape of SmolLM2-135M. The adapter does
something (B is not 0). Prompts of mixed lengths, some of them shared by several completions, at temperatures 0.7 and
1.0; the engine batches and caches in its way, the trainer packs micro-batches with shared prompts in its own.
"""

import sys
from pathlib import Path

# This folder would hide the standard library's `queue` behind the benchmark of that name.
sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
from aether_common.digests import file_list_digest, list_files
from aether_common.wire import Sampling
from aether_trainer.forward import Row, plan, sampled_logprobs
from aether_trainer.policy import Policy, load_policy, write_adapter
from aether_trainer.settings import TrainerSettings
from aether_worker.engine.base import Generation, Request
from aether_worker.engine.transformers_engine import TransformersEngine
from aether_worker.settings import TransformersSettings
from bench._bench import finish, print_table
from tiny_model import make_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

GOAL = 1e-3
CONTEXT = 512
PROMPTS = (3, 17, 40, 41, 96, 200)
"""Lengths in tokens."""
COMPLETIONS = 4
"""Of each prompt and temperature."""
MAX_TOKENS = 24
TEMPERATURES = (0.7, 1.0)
THREADS = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A model to compare on, and how strong its random adapter is."""

    name: str
    path: Path
    vocabulary: int
    b_scale: float


def smollm_shaped(directory: Path) -> Path:
    """134.5 million random parameters in the shape of SmolLM2-135M, with a random output that is not flat."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_policy(model: Model) -> Policy:
    settings = TrainerSettings.model_validate(
        {
            "model": {"path": str(model.path), "dtype": "float32"},
            "lora": {"serving_dtype": "float32"},
            "compute": {"device": "cpu"},
        }
    )
    policy = load_policy(settings, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.weights.items():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * model.b_scale)
    return policy


def make_requests(model: Model, adapter: str) -> list[Request]:
    numbers = random.Random(2)
    prompts = [numbers.choices(range(3, model.vocabulary), k=length) for length in PROMPTS]
    return [
        Request(
            f"{temperature}-{len(prompt)}-{index}",
            adapter,
            prompt,
            Sampling(max_tokens=MAX_TOKENS - 5 * index, temperature=temperature),
            seed=index,
        )
        for temperature in TEMPERATURES
        for prompt in prompts
        for index in range(COMPLETIONS)
    ]


async def sample(model: Model, adapter: Path) -> list[tuple[Request, Generation]]:
    settings = TransformersSettings(threads=THREADS)
    engine = TransformersEngine(model.path, "float32", 32, CONTEXT, settings)
    await engine.start()
    try:
        digest = file_list_digest(list_files(adapter))
        await engine.load_adapter(1, digest, adapter)
        requests = make_requests(model, digest)
        generations = await asyncio.gather(*(engine.generate(request, lambda _: None) for request in requests))
        return list(zip(requests, generations, strict=True))
    finally:
        await engine.stop()


def recompute(policy: Policy, samples: list[tuple[Request, Generation]]) -> list[tuple[float, float]]:
    """(temperature, |trainer − sampler|) of every sampled token."""
    rows = [
        Row(
            tokens=request.prompt + generation.tokens,
            positions=list(range(len(request.prompt), len(request.prompt) + len(generation.tokens))),
            logprobs=generation.logprobs,
            advantages=[1.0] * len(generation.tokens),
            temperature=request.sampling.temperature,
        )
        for request, generation in samples
    ]
    differences: list[tuple[float, float]] = []
    for micro_batch in plan(rows, budget=1024):
        with torch.no_grad():
            logprobs_m, _ = sampled_logprobs(policy.model, micro_batch)
        sampled = [(row.temperature, logprob) for row in micro_batch.rows for logprob in row.logprobs]
        differences += [
            (temperature, abs(ours - theirs))
            for ours, (temperature, theirs) in zip(logprobs_m.tolist(), sampled, strict=True)
        ]
    return differences


def compare(model: Model, directory: Path) -> dict[str, float]:
    """Prints one row per temperature; returns the model's figures."""
    started = time.perf_counter()
    policy = make_policy(model)
    adapter = directory / f"adapter-{model.name}"
    write_adapter(policy, adapter, "float32")
    samples = asyncio.run(sample(model, adapter))
    differences = recompute(policy, samples)
    logprobs = [logprob for _, generation in samples for logprob in generation.logprobs]
    rows: list[tuple[object, ...]] = []
    for temperature in TEMPERATURES:
        values = [difference for at, difference in differences if at == temperature]
        rows.append((temperature, len(values), f"{statistics.fmean(values):.1e}", f"{max(values):.1e}"))
    print(
        f"{model.name}: {len(samples)} completions of prompts of {min(PROMPTS)} to {max(PROMPTS)} tokens, mean logprob "
        f"{statistics.fmean(logprobs):.2f}, {time.perf_counter() - started:.0f} s"
    )
    print_table(("temperature", "tokens", "mean |difference|", "max |difference|"), rows)
    return {
        "max": max(difference for _, difference in differences),
        "mean": statistics.fmean(difference for _, difference in differences),
        "tokens": len(differences),
    }


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    torch.set_num_threads(THREADS)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="aether-bench-") as name:
        directory = Path(name)
        models = [
            Model("tiny", make_tiny_model(directory / "tiny"), 259, 0.1),
            Model("smollm2-135m-shape", smollm_shaped(directory / "smollm"), 49152, 0.02),
        ]
        figures = {model.name: compare(model, directory) for model in models}
    largest = max(values["max"] for values in figures.values())
    print(f"largest difference {largest:.1e} (goal {GOAL:.0e})")
    finish(
        "logprobs",
        **{f"{name}_{figure}": value for name, values in figures.items() for figure, value in values.items()},
        max_difference=largest,
        ratio=largest / GOAL,
        goal=1.0,
        ok=largest < GOAL,
    )


if __name__ == "__main__":
    main()
