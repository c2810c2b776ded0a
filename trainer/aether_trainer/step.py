"""One optimizer step: all micro-batches of a batch, then one clipped AdamW update, or none."""

import itertools
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from aether_common.batch import Sample
from aether_common.errors import TrainerError
from aether_common.pipe import Mismatch
from loguru import logger
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from aether_trainer.forward import MicroBatch, Row, plan, sampled_logprobs, unpack
from aether_trainer.loss import policy_gradient_loss
from aether_trainer.policy import Policy
from aether_trainer.settings import OptimizerSettings, TrainerSettings

K3_CAP = 1e6


@dataclass(slots=True)
class Phases:
    """Seconds by phase of a step, as metrics `seconds_<phase>`."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        name = f"seconds_{phase}"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    metrics: dict[str, float]
    skipped: bool
    """Loss or gradient norm was not finite, and weights and optimizer are as before."""
    mismatch: dict[str, Mismatch]
    """By episode; those without a gradient are missing."""


def learning_rate(optimizer: OptimizerSettings, updates: int) -> float:
    """The learning rate of the update after `updates` others: linear warm-up, then constant."""
    return optimizer.learning_rate * min(1.0, (updates + 1) / max(1, optimizer.warmup_steps))


def train_step(
    policy: Policy,
    optimizer: AdamW,
    samples: Sequence[Sample],
    settings: TrainerSettings,
    *,
    step: int,
    updates: int,
    phases: Phases,
    progress: Callable[[float], None],
) -> StepResult:
    """Train on `samples` once, as step number `step`. `progress` gets the share of the tokens that is done.

    Metrics are over the batch, but entropy, kl and clip_fraction are over the tokens with a gradient, because
    rows without an advantage are not computed. Raises `TrainerError` when the GPU's memory does not suffice.
    """
    rows = [row for sample in samples if (row := unpack(sample)) is not None]
    micro_batches = plan(rows, settings.compute.micro_batch_tokens)
    sampled = sum(sample.sampled_count() for sample in samples)
    weights = list(policy.weights.values())
    for weight in weights:
        # Zero instead of None: a batch without any advantage is a gradient of 0, like one that was computed.
        weight.grad = torch.zeros_like(weight)

    sums: dict[str, float] = dict.fromkeys(("loss", "entropy", "kl", "clip_fraction", "tokens_trained"), 0.0)
    mismatch: dict[str, Mismatch] = {}
    done, total = 0, sum(micro_batch.cost for micro_batch in micro_batches)
    for micro_batch in micro_batches:
        stats, k3_m = _accumulate(policy, micro_batch, settings, sampled, phases)
        for name, value in stats.items():
            sums[name] += value
        add_mismatch(mismatch, micro_batch.rows, k3_m.tolist(), step)
        done += micro_batch.cost
        progress(done / total)

    with phases("optimizer"):
        grad_norm = float(clip_grad_norm_(weights, settings.optimizer.max_grad_norm))
        skipped = not (math.isfinite(sums["loss"]) and math.isfinite(grad_norm))
        rate = learning_rate(settings.optimizer, updates)
        if skipped:
            logger.warning(f"loss {sums['loss']}, gradient norm {grad_norm}: not finite, the update is skipped")
        else:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    trained = sums["tokens_trained"]
    rewards = {(sample.group, sample.episode): sample.reward for sample in samples}
    metrics = {
        "loss": sums["loss"],
        "reward": sum(rewards.values()) / len(rewards),
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "samples": float(len(samples)),
        "samples_trained": float(len(rows)),
        "tokens": float(sum(len(sample.tokens) // 4 for sample in samples)),
        "tokens_sampled": float(sampled),
        "tokens_trained": trained,
        "skipped": float(skipped),
    }
    if trained:
        metrics |= {name: sums[name] / trained for name in ("entropy", "kl", "clip_fraction")}
    # JSON has no NaN.
    return StepResult({name: value for name, value in metrics.items() if math.isfinite(value)}, skipped, mismatch)


def _accumulate(
    policy: Policy, micro_batch: MicroBatch, settings: TrainerSettings, sampled: int, phases: Phases
) -> tuple[dict[str, float], Tensor]:
    """Add the gradient of one micro-batch; returns its sums, and the k3 of its tokens (row after row)."""

    def flat(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=policy.model.device)

    try:
        with phases("forward"):
            logprobs_m, entropies_m = sampled_logprobs(policy.model, micro_batch)
            loss, stats = policy_gradient_loss(
                logprobs_m,
                flat([logprob for row in micro_batch.rows for logprob in row.logprobs]),
                flat([advantage for row in micro_batch.rows for advantage in row.advantages]),
                torch.ones_like(logprobs_m, dtype=torch.bool),
                normaliser=sampled,
                clip_low=settings.loss.clip_low,
                clip_high=settings.loss.clip_high,
            )
        with phases("backward"):
            loss.backward()
    except torch.OutOfMemoryError as error:
        raise TrainerError(
            f"the GPU's memory does not suffice for {micro_batch.cost} tokens at once "
            f"(compute.micro_batch_tokens = {settings.compute.micro_batch_tokens}): lower it"
        ) from error
    sums = {
        "loss": float(loss.detach()),
        "entropy": float(entropies_m.sum()),
        "kl": float(stats.kl),
        "clip_fraction": float(stats.clipped),
        "tokens_trained": float(stats.tokens),
    }
    return sums, stats.k3


def add_mismatch(mismatch: dict[str, Mismatch], rows: Sequence[Row], k3_m: Sequence[float], step: int) -> None:
    """Add the k3 of each row's tokens to its episode. A value beyond any sense is capped: JSON has no infinity."""
    values = iter(k3_m)
    for row in rows:
        own = itertools.islice(values, len(row.positions))
        k3 = [min(value, K3_CAP) if math.isfinite(value) else K3_CAP for value in own]
        known = mismatch.get(row.episode)
        mismatch[row.episode] = Mismatch(
            lag=step - 1 - row.version,
            tokens=len(k3) + (known.tokens if known else 0),
            total=sum(k3) + (known.total if known else 0.0),
            largest=max(*k3, known.largest if known else 0.0, 0.0),
        )
