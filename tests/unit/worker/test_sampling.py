"""Draws and their logprobs, against values worked out by hand."""

import math

import pytest
import torch
from aether_common.errors import EngineError
from aether_common.wire import Sampling
from aether_worker.engine.decode import common_prefix
from aether_worker.engine.sampling import Draw, draw_tokens, uniform

PROBABILITIES = [0.5, 0.3, 0.15, 0.05]
LOGITS = [math.log(p) for p in PROBABILITIES]


def draw_many(sampling: Sampling, count: int = 2000) -> tuple[list[float], dict[int, float]]:
    draws = [Draw(sampling, seed=seed, position=3, seen=[0]) for seed in range(count)]
    tokens, logprobs = draw_tokens(torch.tensor([LOGITS] * count), draws)
    return [tokens.count(token) / count for token in range(4)], dict(zip(tokens, logprobs, strict=True))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(max_tokens=1), PROBABILITIES),
        # p² / Σp² with p = .5 .3 .15 .05: Σ = .365
        (Sampling(max_tokens=1, temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Sampling(max_tokens=1, top_k=2), [0.625, 0.375, 0, 0]),
        # 0.5 + 0.3 does not reach 0.9, the third token crosses it.
        (Sampling(max_tokens=1, top_p=0.9), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sampling(max_tokens=1, top_p=0.01), [1, 0, 0, 0]),
        # Tokens below 0.4 × 0.5 are dropped.
        (Sampling(max_tokens=1, min_p=0.4), [0.625, 0.375, 0, 0]),
        # Token 0 was seen: its negative logit doubles, 0.5 becomes 0.25 before normalisation.
        (Sampling(max_tokens=1, repetition_penalty=2.0), [0.25 / 0.75, 0.3 / 0.75, 0.15 / 0.75, 0.05 / 0.75]),
    ],
)
def test_frequencies_and_logprobs(sampling: Sampling, expected: list[float]) -> None:
    frequencies, logprobs = draw_many(sampling)
    assert frequencies == pytest.approx(expected, abs=0.04)
    for token, logprob in logprobs.items():
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_greedy_has_the_logprob_of_the_plain_distribution() -> None:
    assert draw_tokens(torch.tensor([LOGITS]), [Draw(Sampling(max_tokens=1, temperature=0), 1, 0, [])]) == (
        [0],
        [pytest.approx(math.log(0.5))],
    )


def test_uniform_depends_on_seed_and_position() -> None:
    values = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(values) == 400
    assert all(0 <= value < 1 for value in values)
    assert uniform(2**63 - 1, 5) == uniform(2**63 - 1, 5)


def test_logits_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(EngineError, match="not finite"):
        draw_tokens(torch.tensor([[float("nan"), 1.0]]), [Draw(Sampling(max_tokens=1), 1, 0, [])])


def test_common_prefix_leaves_a_token_to_each() -> None:
    assert common_prefix([(1, 2, 3)]) == 0
    assert common_prefix([(1, 2, 3), (1, 2)]) == 1
    assert common_prefix([(1, 2, 3), (1, 2, 4), (1, 2, 3, 5)]) == 2
    assert common_prefix([(1,), (2, 3)]) == 0
