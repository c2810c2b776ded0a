"""The loss of one step: a pure function of logprobs.

Clipped policy gradient with an importance ratio against the sampling logprobs (Schulman et al. 2017,
"Proximal Policy Optimization Algorithms", eq. 7), advantages relative to the group (Shao et al. 2024,
"DeepSeekMath", GRPO; here mean-centred without the standard deviation, as in Liu et al. 2025,
"Understanding R1-Zero-Like Training"), separate lower and upper clip and normalisation over the tokens of
the batch (Yu et al. 2025, "DAPO").
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossStats:
    """Without gradient. Sums over the tokens of the mask are scalars, so that micro-batches add up."""

    tokens: Tensor
    """Tokens in the mask."""
    clipped: Tensor
    """Tokens that get no gradient because their ratio left the trust region."""
    k3: Tensor
    """Of each token (the shape of the logprobs, 0 outside the mask), the k3 estimate of KL(sampler ‖ trainer) (Schulman
    2020, "Approximating KL Divergence"): (r - 1) - log r with r = p_trainer / p_sampler, unbiased over tokens drawn
    from the sampler and never negative."""

    @property
    def kl(self) -> Tensor:
        """Sum of k3."""
        return self.k3.sum()


def policy_gradient_loss(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    normaliser: float,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, LossStats]:
    """Sum over the mask of -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A), divided by `normaliser`.

    All four tensors have one shape (any): `logprobs` of the trainer (float32, with gradient) and
    `sampling_logprobs` of the same tokens, both at the sampling temperature; `advantages`; boolean `mask`.
    `normaliser` is the number of ALL sampled tokens of the batch, so that micro-batches add up to the loss of
    the batch and leaving out rows without advantage does not change the learning rate.

    Returns the scalar loss and its statistics.
    """
    log_ratio = torch.where(mask, logprobs - sampling_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    loss = -torch.where(mask, objective, 0.0).sum() / normaliser

    with torch.no_grad():
        too_high = (ratio > 1 + clip_high) & (advantages > 0)
        too_low = (ratio < 1 - clip_low) & (advantages < 0)
        stats = LossStats(
            tokens=mask.sum(),
            clipped=(mask & (too_high | too_low)).sum(),
            # Exact for logprobs that are nearly equal, where ratio - 1 keeps no digit.
            k3=torch.expm1(log_ratio) - log_ratio,
        )
    return loss, stats
