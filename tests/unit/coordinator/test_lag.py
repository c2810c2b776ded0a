"""Admission and the cut of batches, against sequences worked out by hand."""

from aether_coordinator.lag import cut, may_open
from aether_coordinator.records import GroupRecord


def group(number: int, version: int, state: str = "ready") -> GroupRecord:
    return GroupRecord(id=number, kind="train", source="s", task=0, version=version, size=2, state=state)


def admitted(next_step: int, version: int, max_lag: int, last_step: int = 100, per_batch: int = 4) -> int:
    """How many groups may be open or ready at once."""
    count = 0
    while may_open(
        next_step=next_step,
        unbatched=count,
        groups_per_batch=per_batch,
        version=version,
        max_lag=max_lag,
        last_step=last_step,
    ):
        count += 1
    return count


def test_lag_0_admits_one_batch_per_version():
    assert admitted(next_step=1, version=0, max_lag=0) == 4
    # Batch 1 is cut, policy 1 is not there yet: nothing more.
    assert admitted(next_step=2, version=0, max_lag=0) == 0
    assert admitted(next_step=2, version=1, max_lag=0) == 4


def test_lag_1_overlaps_one_batch():
    assert admitted(next_step=1, version=0, max_lag=1) == 8
    assert admitted(next_step=2, version=0, max_lag=1) == 4
    assert admitted(next_step=3, version=0, max_lag=1) == 0


def test_no_groups_beyond_the_last_step():
    assert admitted(next_step=1, version=0, max_lag=5, last_step=2) == 8
    assert admitted(next_step=3, version=2, max_lag=5, last_step=2) == 0


def ids(groups: list[GroupRecord]) -> list[int]:
    return [group.id for group in groups]


def decide(groups: list[GroupRecord], next_step: int, max_lag: int, deadline_passed: bool = False):
    return cut(groups, next_step=next_step, groups_per_batch=2, max_lag=max_lag, deadline_passed=deadline_passed)


def test_the_lowest_ready_ids_are_taken():
    decision = decide([group(5, 0), group(2, 0), group(1, 0, "open"), group(4, 0)], next_step=1, max_lag=1)
    assert ids(decision.take) == [2, 4]


def test_not_enough_ready_groups():
    assert decide([group(1, 0), group(2, 0, "open")], next_step=1, max_lag=1).take == []


def test_groups_on_their_last_step_are_waited_for():
    groups = [group(1, 0, "open"), group(2, 0), group(3, 1), group(4, 1)]
    waiting = decide(groups, next_step=2, max_lag=1)
    assert ids(waiting.waits_for) == [1] and waiting.take == []
    late = decide(groups, next_step=2, max_lag=1, deadline_passed=True)
    assert ids(late.take) == [2, 3]


def test_groups_that_are_too_old_are_named():
    decision = decide([group(1, 0, "open"), group(2, 0), group(3, 1), group(4, 2)], next_step=3, max_lag=1)
    assert ids(decision.too_old) == [1, 2]
    assert ids(decision.take) == [3, 4]


def test_a_batch_waits_for_running_groups_that_later_batches_have_no_room_for():
    # Lag 2, two groups a batch. Version 0 may enter batches 1 to 3: with four groups running, batch 1 may be cut
    # without any of them (batches 2 and 3 take them), with five it must wait.
    running = [group(number, 0, "open") for number in range(1, 6)]
    ready = [group(6, 0), group(7, 0)]
    assert ids(decide([*running[:4], *ready], next_step=1, max_lag=2).take) == [6, 7]
    decision = decide([*running, *ready], next_step=1, max_lag=2)
    assert (decision.take, ids(decision.waits_for)) == ([], [1, 2, 3, 4, 5])
    assert ids(decide([*running, *ready], next_step=1, max_lag=2, deadline_passed=True).take) == [6, 7]
