"""Policy lag: which groups may be opened, and which groups a batch takes. Pure functions.

Step s trains from policy s-1, so a group of version v in step s has lag (s-1) - v. A group is
admitted only if it cannot exceed the maximum in the step that the groups ahead of it leave for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from aether_coordinator.records import GroupRecord


def lag(step: int, version: int) -> int:
    """Lag of a group of `version` in the batch of `step`."""
    return step - 1 - version


def step_for_new_group(next_step: int, unbatched: int, groups_per_batch: int) -> int:
    """The step that a group opened now would enter, `unbatched` train groups being ahead of it."""
    return next_step + unbatched // groups_per_batch


def may_open(
    *, next_step: int, unbatched: int, groups_per_batch: int, version: int, max_lag: int, last_step: int
) -> bool:
    """Whether a train group of `version` may be opened now."""
    step = step_for_new_group(next_step, unbatched, groups_per_batch)
    return step <= last_step and lag(step, version) <= max_lag


@dataclass(frozen=True, slots=True)
class Cut:
    """What to do about the batch of the next step."""

    take: list[GroupRecord]
    """The groups of the batch, by id; empty when it is not time yet."""
    too_old: list[GroupRecord]
    """Ready or open groups that no batch may take any more."""
    waits_for: list[GroupRecord]
    """Running groups that the batch must not leave to later ones, which have no room for all of them."""


def cut(
    groups: Iterable[GroupRecord], *, next_step: int, groups_per_batch: int, max_lag: int, deadline_passed: bool
) -> Cut:
    """Decide about the batch of `next_step` from the open and ready train groups.

    The ready groups with the lowest ids are taken, never the first to finish: those would be the
    short ones. A batch waits, up to a deadline, for running groups that it would leave without a place:
    versions rise with the ids, so the i-th group that is left enters, at best, the (i // groups per
    batch)-th batch after this one, and must not be too old there.
    """
    unbatched = sorted((group for group in groups if group.state in ("open", "ready")), key=lambda group: group.id)
    too_old = [group for group in unbatched if lag(next_step, group.version) > max_lag]
    admissible = [group for group in unbatched if lag(next_step, group.version) <= max_lag]
    take = [group for group in admissible if group.state == "ready"][:groups_per_batch]
    left = [group for group in admissible if group not in take]
    without_place = [
        index
        for index, group in enumerate(left)
        if lag(step_for_new_group(next_step + 1, index, groups_per_batch), group.version) > max_lag
    ]
    waits_for = [group for group in left[: max(without_place, default=-1) + 1] if group.state == "open"]
    if len(take) < groups_per_batch or (waits_for and not deadline_passed):
        take = []
    return Cut(take=take, too_old=too_old, waits_for=waits_for)
