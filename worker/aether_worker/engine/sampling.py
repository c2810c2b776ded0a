"""Draw the next token of each row, with its logprob in the distribution that it was drawn from.

The draw inverts the cumulative distribution at a uniform number that depends on the job's seed and
the position only: the same seed gives the same draw in every batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from aether_common.errors import EngineError
from aether_common.wire import Sampling
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's parameters of the next draw."""

    sampling: Sampling
    seed: int
    position: int
    """Number of completion tokens before this one."""
    seen: Sequence[int]
    """Prompt and completion tokens so far (for the repetition penalty)."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, keyed by seed and position."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def draw_tokens(logits_rv: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of R rows, from logits (R, V). Raises `EngineError` for logits that are not finite.

    Order of the transformations as in vLLM: penalty, temperature, min_p, top_k, top_p. Greedy rows
    (temperature 0) take the most likely token and its logprob at temperature 1.
    """
    logits_rv = logits_rv.float()
    for row, draw in enumerate(draws):
        if draw.sampling.repetition_penalty != 1.0:
            logits_rv[row] = penalise(logits_rv[row], draw.seen, draw.sampling.repetition_penalty)
    temperatures = [draw.sampling.temperature or 1.0 for draw in draws]
    scaled_rv = logits_rv
    if any(temperature != 1.0 for temperature in temperatures):
        scaled_rv = logits_rv / torch.tensor(temperatures, device=logits_rv.device)[:, None]
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0 and draw.sampling.shaped():
            scaled_rv[row] = restrict(scaled_rv[row], draw.sampling)
    logprobs_rv = torch.log_softmax(scaled_rv, dim=-1)
    # In float32 the cumulative sum over a large vocabulary loses the tail.
    cumulative_rv = logprobs_rv.double().exp_().cumsum(dim=-1)
    total_r1 = cumulative_rv[:, -1:]
    if not bool(torch.isfinite(total_r1).all()):
        raise EngineError("the model's logits are not finite: check the adapter and the dtype")
    points_r1 = torch.tensor([[uniform(draw.seed, draw.position)] for draw in draws], dtype=torch.float64)
    points_r1 = points_r1.to(total_r1.device) * total_r1
    # Rounding must not reach the total, behind which there is no token.
    points_r1 = torch.minimum(points_r1, torch.nextafter(total_r1, torch.zeros_like(total_r1)))
    tokens_r = torch.searchsorted(cumulative_rv, points_r1, right=True)[:, 0]
    greedy_r = torch.tensor([draw.sampling.temperature == 0 for draw in draws], device=tokens_r.device)
    if bool(greedy_r.any()):
        tokens_r = torch.where(greedy_r, logits_rv.argmax(dim=-1), tokens_r)
    chosen_r = logprobs_rv.gather(1, tokens_r[:, None])[:, 0]
    return tokens_r.tolist(), chosen_r.tolist()


def penalise(logits_v: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, arXiv:1909.05858) on every token seen so far."""
    index = torch.tensor(sorted(set(seen)), dtype=torch.long, device=logits_v.device)
    values = logits_v[index]
    return logits_v.index_put((index,), torch.where(values < 0, values * penalty, values / penalty))


def restrict(scaled_v: Tensor, sampling: Sampling) -> Tensor:
    """Set the logits of tokens that min_p, top_k or top_p exclude to -inf; scaled by the temperature before."""
    if sampling.min_p > 0:
        probabilities_v = torch.softmax(scaled_v, dim=-1)
        scaled_v = scaled_v.masked_fill(probabilities_v < sampling.min_p * probabilities_v.max(), -torch.inf)
    if 0 < sampling.top_k < scaled_v.numel():
        smallest = torch.topk(scaled_v, sampling.top_k).values[-1]
        scaled_v = scaled_v.masked_fill(scaled_v < smallest, -torch.inf)
    if sampling.top_p < 1:
        sorted_v, order_v = torch.sort(scaled_v, descending=True)
        before_v = torch.softmax(sorted_v, dim=-1).cumsum(dim=-1) - torch.softmax(sorted_v, dim=-1)
        # The token that crosses top_p is kept, and so is always the first.
        scaled_v = scaled_v.index_fill(0, order_v[before_v >= sampling.top_p], -torch.inf)
    return scaled_v
