"""Which worker's logprobs stand out."""

import random
import statistics
import time
from pathlib import Path

from aether_common.pipe import CheckpointWritten, Mismatch, decode_from_trainer
from aether_coordinator.journal import TurnKey
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.mismatch import Mismatches, median_of_others, worker_of
from aether_coordinator.records import TurnRecord, episode_id


class Fleet:
    """Named episodes `<worker>-<number>`."""

    def __init__(self) -> None:
        self.out: list[tuple[str, str]] = []
        self.mismatches = Mismatches(lambda worker, reason: self.out.append((worker, reason)))

    def step(self, lag: int = 0, **k3: list[float]) -> None:
        measured = {
            f"{worker}-{number}": Mismatch(lag=lag, tokens=10, total=10 * value, largest=2 * value)
            for worker, values in k3.items()
            for number, value in enumerate(values)
        }
        self.mismatches.add(measured, lambda episode: episode.split("-")[0])


def test_one_that_is_far_from_the_others_stands_out() -> None:
    fleet = Fleet()
    fleet.step(a=[1e-4] * 8, b=[2e-4] * 8, c=[0.3] * 7)
    assert fleet.out == []  # Seven episodes are too few.
    fleet.step(c=[0.3])
    ((worker, reason),) = fleet.out
    assert worker == "c" and "k3 0.3 per token at lag 0 (median of 8 episodes), 0.00015 on the other workers" in reason
    # Forgotten with that: after a release it starts anew.
    fleet.step(c=[0.3] * 7)
    assert len(fleet.out) == 1


def test_a_changed_policy_is_nobodys_fault() -> None:
    """A lag, or a policy that moved far, shows on all workers alike; a few surprising episodes are no median."""
    fleet = Fleet()
    fleet.step(lag=1, a=[0.5] * 8, b=[0.4] * 8)
    fleet.step(lag=0, a=[1e-4] * 8)
    fleet.step(lag=0, b=[1e-4] * 5 + [3.0] * 3)
    fleet.step(lag=0, c=[4.9e-3] * 8)  # Many times the others, and still only rounding.
    assert fleet.out == []


def test_nobody_stands_out_alone() -> None:
    fleet = Fleet()
    fleet.step(a=[5.0] * 64)
    assert fleet.out == []


def test_the_median_of_the_others_needs_no_list_of_them() -> None:
    draw = random.Random(0)
    for _ in range(300):
        own = [draw.choice((0.0, 0.1, 0.2, draw.random())) for _ in range(draw.randrange(0, 12))]
        others = [draw.choice((0.0, 0.1, 0.2, draw.random())) for _ in range(draw.randrange(1, 12))]
        assert median_of_others(sorted(own + others), sorted(own)) == statistics.median(others)


def test_a_large_fleet_is_compared_in_no_time() -> None:
    fleet = Fleet()
    draw = random.Random(0)
    fleet.step(lag=1, **{f"w{number}": [0.1 + draw.random() for _ in range(64)] for number in range(500)})
    began = time.process_time()
    fleet.step(lag=1, w0=[0.5])
    assert time.process_time() - began < 2 and fleet.out == []


def test_what_is_shown() -> None:
    fleet = Fleet()
    assert fleet.mismatches.of("a") is None
    fleet.step(lag=1, a=[1.0])
    fleet.step(lag=0, a=[0.1, 0.3])
    mean, tail = fleet.mismatches.of("a") or (0.0, 0.0)
    assert (round(mean, 6), tail) == (0.2, 0.2)
    line = CheckpointWritten(step=1, mismatch={"1-0": Mismatch(lag=0, tokens=3, total=0.5, largest=0.25)}).encode()
    assert decode_from_trainer(line) == CheckpointWritten(
        step=1, mismatch={"1-0": Mismatch(lag=0, tokens=3, total=0.5, largest=0.25)}
    )


def test_the_worker_of_an_episode(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state")

    def answered(index: int, attempt: int, count: int, worker: str) -> Write:
        record = TurnRecord(
            job="j", worker=worker, dispatch=0, reply="", version=0, adapter="", tokens=b"", logprobs=b"",
            finish_reason="stop",
        )  # fmt: skip
        return Write("journal", TurnKey(episode_id(1, index), attempt, "a" * 64, count).journal, record.encode())

    ledger.commit_now(
        answered(0, 0, 0, "w1"),
        answered(0, 0, 1, "w1"),
        answered(1, 9, 0, "w1"),
        answered(1, 10, 0, "w2"),
        answered(2, 0, 0, "w1"),
        answered(2, 0, 1, "w2"),
    )
    assert [worker_of(ledger, episode_id(1, index)) for index in range(4)] == ["w1", "w2", None, None]
    ledger.close()
