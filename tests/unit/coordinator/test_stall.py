"""Which jobs of a worker have stalled."""

from aether_coordinator.stall import Progress

LIMIT = 100.0


def test_a_slow_job_is_not_stalled_and_one_that_stands_still_is() -> None:
    progress = Progress(0.0)
    for now in range(0, 1000, 5):
        # One token in 90 s, one job that stopped at its third token, one that waits for a slot.
        progress.beat(now, {"slow": now // 90, "dead": min(3, now), "waits": 0}, now, idle=False)
    assert progress.stalled(995, ["slow", "dead", "waits", "on its way"], LIMIT) == {"dead"}


def test_a_worker_that_stands_still_stalls_all_its_jobs() -> None:
    progress = Progress(0.0)
    progress.beat(10, {"a": 5, "b": 0}, 5, idle=False)
    progress.beat(109, {"a": 5, "b": 0}, 5, idle=False)
    assert progress.stalled(109, ["a", "b", "c"], LIMIT) == set()
    assert progress.stalled(110, ["a", "b", "c"], LIMIT) == {"a", "b", "c"}


def test_idle_time_is_no_stall() -> None:
    progress = Progress(0.0)
    progress.beat(500, {}, 0, idle=True)
    assert progress.stalled(599, ["new"], LIMIT) == set()
    progress.beat(600, {"new": 0}, 0, idle=False)
    assert progress.stalled(600, ["new"], LIMIT) == {"new"}


def test_after_a_stall_the_time_begins_anew() -> None:
    progress = Progress(0.0)
    progress.beat(0, {"a": 4, "b": 1}, 5, idle=False)
    progress.beat(100, {"a": 4, "b": 1}, 5, idle=False)
    assert progress.stalled(100, ["a", "b"], LIMIT) == {"a", "b"}
    progress.taken(100, ["a", "b"])
    # The same job again, because there is no other worker, and a new one.
    progress.beat(105, {"a": 4, "c": 0}, 5, idle=False)
    assert progress.stalled(199, ["a", "c"], LIMIT) == set()
    assert progress.stalled(205, ["a", "c"], LIMIT) == {"a", "c"}


def test_a_job_that_comes_again_starts_anew() -> None:
    progress = Progress(0.0)
    progress.beat(0, {"a": 4}, 4, idle=False)
    progress.beat(50, {}, 10, idle=False)
    progress.beat(60, {"a": 4}, 20, idle=False)
    progress.beat(120, {"a": 4}, 30, idle=False)
    assert progress.stalled(120, ["a"], LIMIT) == set()
    assert progress.stalled(160, ["a"], LIMIT) == {"a"}
