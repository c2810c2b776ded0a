"""The loss against values worked out by hand."""

import math

import pytest
import torch
from aether_trainer.loss import policy_gradient_loss

# log r:                0    0.5   -0.5   0.5   -0.5   (masked)
LOGPROBS = torch.tensor([-1.0, -0.5, -2.0, -0.5, -2.0, -7.0])
SAMPLING = torch.tensor([-1.0, -1.0, -1.5, -1.0, -1.5, 0.0])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 3.0])
MASK = torch.tensor([True, True, True, True, True, False])
UP, DOWN = math.exp(0.5), math.exp(-0.5)  # 1.6487…, 0.6065…


def test_values_by_hand():
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, stats = policy_gradient_loss(logprobs, SAMPLING, ADVANTAGES, MASK, normaliser=8, clip_low=0.2, clip_high=0.28)
    loss.backward()
    # 1·1; min(1.65, 1.28); min(-0.61, -0.8); min(-1.65, -1.28); min(0.61, 0.8)
    assert loss.item() == pytest.approx(-(1 + 1.28 - 0.8 - UP + DOWN) / 8, abs=1e-6)
    assert loss.item() == pytest.approx(-0.05472617, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 8, 0, 0, UP / 8, -DOWN / 8, 0], abs=1e-6)
    assert (stats.tokens.item(), stats.clipped.item()) == (5, 2)
    # k3 = r - 1 - log r: twice 1.6487 - 1 - 0.5, twice 0.6065 - 1 + 0.5
    assert stats.kl.item() == pytest.approx(0.51050396, abs=1e-6)


def test_on_policy_the_gradient_is_the_policy_gradient():
    logprobs = SAMPLING.clone().requires_grad_()
    loss, stats = policy_gradient_loss(logprobs, SAMPLING, ADVANTAGES, MASK, normaliser=4, clip_low=0.2, clip_high=0.28)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0.25, 0.25, -0.25, 0])
    assert (stats.clipped.item(), stats.kl.item()) == (0, 0)


def test_micro_batches_add_up_and_shape_does_not_matter():
    def loss(part: slice) -> float:
        parts = [tensor[part].reshape(-1, 2) for tensor in (LOGPROBS, SAMPLING, ADVANTAGES, MASK)]
        return policy_gradient_loss(*parts, normaliser=5, clip_low=0.2, clip_high=0.28)[0].item()

    assert loss(slice(0, 2)) + loss(slice(2, 6)) == pytest.approx(loss(slice(0, 6)), abs=1e-6)


def test_garbage_outside_the_mask_has_no_influence():
    logprobs = torch.tensor([-1.0, float("nan")], requires_grad=True)
    sampling = torch.tensor([-1.0, float("-inf")])
    loss, stats = policy_gradient_loss(
        logprobs, sampling, torch.ones(2), torch.tensor([True, False]), normaliser=1, clip_low=0.2, clip_high=0.2
    )
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == -1 and logprobs.grad.tolist() == [-1, 0] and stats.kl.item() == 0
