"""Which waiting turn is next, and for whom."""

from aether_coordinator.ready import Ready

ALL = {"w1", "w2"}


def ready(*turns: tuple[str, str, bool]) -> tuple[Ready, set[str]]:
    """(job, home, urgent) in their order; the set holds what waits."""
    waiting = {job for job, _, _ in turns}
    queue = Ready(waiting.__contains__)
    for order, (job, home, urgent) in enumerate(turns):
        queue.add(job, order, urgent=urgent, home=home)
    return queue, waiting


def test_urgent_ones_then_the_oldest() -> None:
    queue, _ = ready(("a", "", False), ("b", "w1", False), ("c", "", True))
    assert [queue.next(ALL, ALL, take_away=False) for _ in range(4)] == ["c", "a", "b", None]
    assert not queue


def test_a_turn_waits_for_its_home() -> None:
    queue, _ = ready(("a", "w1", False), ("b", "w2", False), ("c", "", False))
    assert [queue.next({"w2"}, ALL, take_away=False) for _ in range(3)] == ["b", "c", None]
    assert queue.next({"w1"}, ALL, take_away=False) == "a"


def test_a_slot_that_would_idle_takes_it_away_if_nothing_else_fits() -> None:
    queue, _ = ready(("a", "w1", False), ("b", "w1", False), ("c", "w2", False))
    assert [queue.next({"w2"}, ALL, take_away=True) for _ in range(3)] == ["c", "a", "b"]


def test_a_home_that_works_no_more_is_none() -> None:
    queue, _ = ready(("a", "w1", False), ("b", "w2", False))
    assert queue.next({"w2"}, {"w2"}, take_away=False) == "a"


def test_what_waits_no_more_is_skipped() -> None:
    queue, waiting = ready(("a", "", False), ("b", "w1", False), ("c", "w1", False))
    waiting -= {"a", "b"}
    assert queue.next(ALL, ALL, take_away=False) == "c"
    waiting.clear()
    queue.add("d", 9, urgent=False)
    assert queue.next(ALL, ALL, take_away=False) is None
    assert not queue
