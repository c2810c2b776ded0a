"""Group scoring: advantages of a group's episodes. Pure functions."""

from collections.abc import Sequence


def mean_centred(rewards: Sequence[float]) -> list[float]:
    """GRPO advantages without division by the standard deviation: reward minus the group's mean.

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training") leaves the division out because
    it weights tasks by how little their rewards vary.
    """
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal: the group has no gradient."""
    return all(reward == rewards[0] for reward in rewards)
