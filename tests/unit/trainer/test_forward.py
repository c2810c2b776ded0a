"""Shared prompts, micro-batches and skipped rows against a plain forward of each sequence."""

from collections.abc import Callable

import pytest
import torch
from aether_common.batch import Sample
from aether_trainer import forward
from aether_trainer.forward import Row, plan, sampled_logprobs, unpack
from aether_trainer.policy import Policy
from aether_trainer.settings import TrainerSettings
from aether_trainer.step import Phases, train_step
from torch import Tensor

MakeSample = Callable[..., Sample]
PROMPT_A, PROMPT_B = list(range(10, 30)), list(range(40, 47))


def mixed_samples(make: MakeSample) -> list[Sample]:
    """Two groups with shared prompts, a multi-turn sample in one of them, and a prompt of its own."""

    def single(prompt: list[int], completion: list[int], advantage: float, temperature: float = 1.0) -> Sample:
        mask = [0] * len(prompt) + [1] * len(completion)
        return make(prompt + completion, mask, advantage, temperature=temperature)

    turns = [50, 51, 52, 60, 61, 62, 63, 70, 71, 2]
    return [
        single(PROMPT_A, [100, 101, 2], 0.5),
        single(PROMPT_A, [102], -0.5, temperature=0.7),
        make(PROMPT_A + turns, [0] * 20 + [1, 1, 1, 0, 0, 0, 0, 1, 1, 1], 0.25, temperature=0.7),
        single(PROMPT_B, [200, 201, 202, 203, 204], 1.0, temperature=1.3),
        single(PROMPT_B, [205, 2], -1.0, temperature=1.3),
        make([80, 81, 82, 83], [0, 1, 0, 1], 0.75),
    ]


def naive_logprobs(policy: Policy, row: Row) -> Tensor:
    """[S] logprobs by one full forward of one unpadded sequence."""
    logits = policy.model(input_ids=torch.tensor([row.tokens])).logits[0].float() / row.temperature
    table = logits.log_softmax(-1)
    return torch.stack([table[position - 1, row.tokens[position]] for position in row.positions])


def weighted_gradient(policy: Policy, total: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    total.backward()
    return {name: weight.grad.clone() for name, weight in policy.weights.items() if weight.grad is not None}


@pytest.mark.parametrize(("budget", "chunk"), [(10_000, 1024), (30, 1024), (10_000, 2), (1, 1)])
def test_equals_a_naive_forward(
    policy: Policy, make_sample: MakeSample, monkeypatch: pytest.MonkeyPatch, budget: int, chunk: int
):
    monkeypatch.setattr(forward, "HEAD_CHUNK", chunk)
    rows = [row for sample in mixed_samples(make_sample) if (row := unpack(sample))]
    assert len(rows) == 6
    micro_batches = plan(rows, budget)
    if budget == 10_000:
        assert sorted((part.prefix, len(part.rows)) for part in micro_batches) == [(0, 1), (6, 2), (19, 3)]
    else:
        assert all(part.cost <= budget or len(part.rows) == 1 for part in micro_batches)

    pairs = [(row, part, index) for part in micro_batches for index, row in enumerate(part.rows)]
    assert sorted(row.tokens for row, _, _ in pairs) == sorted(row.tokens for row in rows)
    ours, entropies = zip(*[sampled_logprobs(policy.model, part) for part in micro_batches], strict=True)
    ours = torch.cat(ours)
    expected = torch.cat([naive_logprobs(policy, row) for row, _, _ in pairs])
    assert (ours - expected).abs().max() < 1e-5
    assert all(0 < entropy < 5.6 for entropy in torch.cat(entropies).tolist())

    factors = torch.linspace(-1, 1, len(ours))
    ours_gradient = weighted_gradient(policy, (ours * factors).sum())
    naive_gradient = weighted_gradient(policy, (expected * factors).sum())
    assert ours_gradient.keys() == naive_gradient.keys() == policy.weights.keys()
    for name, gradient in naive_gradient.items():
        assert gradient.abs().max() > 0
        assert (gradient - ours_gradient[name]).abs().max() < 1e-5, name


def test_entropy_is_that_of_the_distribution_at_the_temperature(policy: Policy, make_sample: MakeSample):
    row = unpack(make_sample([5, 6, 7], [0, 0, 1], 1.0, temperature=0.5))
    assert row is not None
    _, entropies = sampled_logprobs(policy.model, plan([row], 100)[0])
    logits = policy.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1] / 0.5
    assert entropies.item() == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().item(), abs=1e-5)


def gradient_of_step(policy: Policy, samples: list[Sample], settings: TrainerSettings) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(policy.weights.values(), lr=0.0)
    train_step(policy, optimizer, samples, settings, step=1, updates=0, phases=Phases(), progress=lambda share: None)
    gradients = {name: weight.grad for name, weight in policy.weights.items()}
    return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


def test_rows_without_advantage_count_in_the_normaliser_only(
    policy: Policy, make_sample: MakeSample, make_settings: Callable[..., TrainerSettings]
):
    settings = make_settings(optimizer={"learning_rate": 0.0, "max_grad_norm": 1e9})
    samples = mixed_samples(make_sample)
    idle = make_sample([*PROMPT_A, 7, 8, 9, 2], [0] * 20 + [1] * 4, 0.0)
    assert unpack(idle) is None
    sampled = sum(sample.sampled_count() for sample in samples)
    without = gradient_of_step(policy, samples, settings)
    with_idle = gradient_of_step(policy, [*samples, idle], settings)
    for name, gradient in without.items():
        torch.testing.assert_close(with_idle[name], gradient * sampled / (sampled + 4), rtol=1e-4, atol=1e-7)

    # The same batch with an advantage too small to matter computes the row: the gradient is the same.
    computed = make_sample([*PROMPT_A, 7, 8, 9, 2], [0] * 20 + [1] * 4, 1e-12)
    for name, gradient in gradient_of_step(policy, [*samples, computed], settings).items():
        torch.testing.assert_close(with_idle[name], gradient, rtol=1e-4, atol=1e-7)


def test_a_step_equals_the_loss_computed_naively(
    policy: Policy, make_sample: MakeSample, make_settings: Callable[..., TrainerSettings]
):
    samples = mixed_samples(make_sample)
    optimizer = torch.optim.AdamW(policy.weights.values(), lr=0.0)
    settings = make_settings(optimizer={"learning_rate": 0.0})
    shares: list[float] = []
    result = train_step(
        policy, optimizer, samples, settings, step=1, updates=0, phases=Phases(), progress=shares.append
    )
    expected, divergence, count = 0.0, 0.0, 0
    for row in (row for sample in samples if (row := unpack(sample))):
        for ours, theirs, advantage in zip(
            naive_logprobs(policy, row).tolist(), row.logprobs, row.advantages, strict=True
        ):
            ratio = 2.718281828459045 ** (ours - theirs)
            expected -= min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            divergence += ratio - 1 - (ours - theirs)
            count += 1
    assert result.metrics["tokens_sampled"] == result.metrics["tokens_trained"] == count == 19
    assert result.metrics["loss"] == pytest.approx(expected / count, abs=1e-5)
    assert result.metrics["kl"] == pytest.approx(divergence / count, abs=1e-5)
    assert shares == sorted(shares) and shares[-1] == 1.0
    # By episode (here all are one); step 1 trains from version 0.
    (mismatch,) = result.mismatch.values()
    assert (mismatch.lag, mismatch.tokens) == (0, count)
    assert mismatch.total == pytest.approx(divergence, abs=1e-5)
    assert 0 < mismatch.largest < mismatch.total
