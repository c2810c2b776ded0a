"""What the trainer's tests share: a tiny model, settings, samples, a link that stops when the batches end."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aether_common.arrays import pack_floats, pack_tokens
from aether_common.batch import Batch, Sample, batch_path
from aether_common.pipe import CheckpointWritten, Failed, Progress, Ready
from aether_trainer.policy import Policy, load_policy
from aether_trainer.settings import TrainerSettings
from tiny_model import make_tiny_model

ALL_LINEAR_AND_HEAD = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class StopsWhenIdle:
    """A coordinator that wants the trainer to exit as soon as it waits; keeps what it was told."""

    def __init__(self) -> None:
        self.stopping = False
        self.news: list[Ready | Progress | CheckpointWritten | Failed] = []

    def send(self, news: Ready | Progress | CheckpointWritten | Failed) -> None:
        self.news.append(news)

    def wait(self, seconds: float) -> None:
        self.stopping = True


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def _settings(tiny: Path, /, **tables: object) -> TrainerSettings:
    values: dict[str, object] = {
        "model": {"path": str(tiny), "dtype": "float32"},
        "lora": {"target_modules": ALL_LINEAR_AND_HEAD, "serving_dtype": "float32"},
        "optimizer": {"learning_rate": 1e-2},
        "compute": {"device": "cpu", "micro_batch_tokens": 128},
    }
    return TrainerSettings.model_validate(values | tables)


@pytest.fixture
def make_settings(tiny: Path) -> Callable[..., TrainerSettings]:
    return lambda **tables: _settings(tiny, **tables)


@pytest.fixture
def policy(tiny: Path) -> Policy:
    """A policy whose adapter does something: B is random instead of 0."""
    policy = load_policy(_settings(tiny), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.weights.items():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return policy


def _sample(
    tokens: list[int], mask: list[int], advantage: float, group: int = 0, episode: str = "e", temperature: float = 1.0
) -> Sample:
    """A sample whose sampling logprobs are about those of a uniform policy over the 259 tokens."""
    noise = random.Random(str(tokens))
    logprobs = [(-5.55 + noise.uniform(-0.05, 0.05)) * flag for flag in mask]
    return Sample(
        source="test",
        group=group,
        episode=episode,
        version=0,
        reward=max(0.0, advantage),
        temperature=temperature,
        tokens=pack_tokens(tokens),
        sampled=bytes(mask),
        logprobs=pack_floats(logprobs),
        advantages=pack_floats([advantage * flag for flag in mask]),
    )


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return _sample


def _batch(run_root: Path, step: int, groups: int = 3, size: int = 4, length: int = 6, run: str = "demo") -> Batch:
    """Write a batch of `groups` prompts with `size` completions each; advantages of a group sum to 0."""
    random_tokens = random.Random(step)
    samples: list[Sample] = []
    for group in range(groups):
        prompt = [random_tokens.randrange(3, 259) for _ in range(10 + group)]
        for index in range(size):
            completion = [random_tokens.randrange(3, 259) for _ in range(length + index)]
            mask = [0] * len(prompt) + [1] * len(completion)
            advantage = 0.5 if index % 2 else -0.5
            samples.append(_sample(prompt + completion, mask, advantage, group, f"{group}-{index}"))
    batch = Batch(run=run, step=step, samples=samples)
    path = batch_path(run_root, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_bytes(batch.encode())
    path.with_suffix(".tmp").rename(path)
    return batch


@pytest.fixture
def write_batch() -> Callable[..., Batch]:
    return _batch


@pytest.fixture
def link() -> type[StopsWhenIdle]:
    return StopsWhenIdle
