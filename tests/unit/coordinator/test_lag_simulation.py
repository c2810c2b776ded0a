"""Slow and fast tasks mixed, simulated over the rules of `lag`: slow ones are not starved, hardly a token is lost."""

import heapq
import random
from dataclasses import dataclass, field

import pytest
from aether_coordinator.lag import cut, lag, may_open
from aether_coordinator.records import GroupRecord

SEEDS = 40
STEPS = 60
FAST_S, SLOW_S = (1.0, 3.0), (15.0, 40.0)


@dataclass
class Simulation:
    """A run whose groups take random times; `slow` is the share of slow tasks, `failing` that of failing groups."""

    seed: int
    per_batch: int
    max_lag: int
    slow: float
    step_s: float = 5.0
    deadline_s: float = 1800.0
    failing: float = 0.0
    groups: dict[int, GroupRecord] = field(default_factory=dict)
    is_slow: dict[int, bool] = field(default_factory=dict)
    batches: list[list[GroupRecord]] = field(default_factory=list)
    too_old: list[int] = field(default_factory=list)

    def run(self) -> "Simulation":
        random_ = random.Random(self.seed)
        now, version, busy_until, full_since = 0.0, 0, 0.0, {}
        ends: list[tuple[float, int]] = []
        trained: list[float] = []
        while version < STEPS:
            self._cut(now, full_since)
            # The trainer takes one batch after the other.
            while len(trained) < len(self.batches):
                busy_until = max(busy_until, now) + self.step_s
                trained.append(busy_until)
            while may_open(
                next_step=len(self.batches) + 1,
                unbatched=len(self.groups),
                groups_per_batch=self.per_batch,
                version=version,
                max_lag=self.max_lag,
                last_step=STEPS,
            ):
                number = len(self.is_slow) + 1
                self.is_slow[number] = random_.random() < self.slow
                group = GroupRecord(id=number, kind="train", source="s", task=0, version=version, size=2)
                self.groups[number] = group
                duration = random_.uniform(*(SLOW_S if self.is_slow[number] else FAST_S))
                heapq.heappush(ends, (now + duration, number))
            events = [ends[0][0]] if ends else []
            events += [trained[version]] if version < len(trained) else []
            events += [since + self.deadline_s + 0.001 for since in full_since.values()]
            assert events, f"stands still at step {len(self.batches) + 1}, version {version}"
            now = min(events)
            while ends and ends[0][0] <= now:
                number = heapq.heappop(ends)[1]
                if number in self.groups:
                    if random_.random() < self.failing:
                        del self.groups[number]
                    else:
                        self.groups[number] = self.groups[number].scored()
            while version < len(trained) and trained[version] <= now:
                version += 1
        return self

    def _cut(self, now: float, full_since: dict[int, float]) -> None:
        while (step := len(self.batches) + 1) <= STEPS:
            ready = sum(group.state == "ready" for group in self.groups.values())
            if ready >= self.per_batch:
                full_since.setdefault(step, now)
            decision = cut(
                self.groups.values(),
                next_step=step,
                groups_per_batch=self.per_batch,
                max_lag=self.max_lag,
                deadline_passed=step in full_since and now - full_since[step] > self.deadline_s,
            )
            for group in decision.too_old:
                self.too_old.append(group.id)
                del self.groups[group.id]
            if not decision.take:
                return
            full_since.pop(step, None)
            self.batches.append(decision.take)
            for group in decision.take:
                del self.groups[group.id]

    def batched(self) -> list[int]:
        return [group.id for batch in self.batches for group in batch]


@pytest.mark.parametrize("max_lag", [0, 1, 2, 4])
def test_no_group_is_lost_or_too_old(max_lag: int) -> None:
    for seed in range(SEEDS):
        shape = random.Random(seed)
        run = Simulation(
            seed,
            per_batch=shape.randint(1, 8),
            max_lag=max_lag,
            slow=shape.choice([0.1, 0.3, 0.5]),
            step_s=shape.choice([0.5, 5.0, 50.0]),
        ).run()
        assert run.too_old == []
        # Every group that was opened was trained, once: slow ones in exactly the share that was drawn.
        assert sorted(run.batched()) == sorted(run.is_slow)
        for step, batch in enumerate(run.batches, start=1):
            assert len(batch) == run.per_batch
            assert all(0 <= lag(step, group.version) <= max_lag for group in batch)


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_slow_groups_come_early_and_late_alike(max_lag: int) -> None:
    """At every point of a run the slow groups are trained in about their share, not saved up for the end."""
    halves = [0, 0]
    for seed in range(SEEDS):
        run = Simulation(seed, per_batch=4, max_lag=max_lag, slow=0.25).run()
        order = run.batched()
        for half, numbers in enumerate((order[: len(order) // 2], order[len(order) // 2 :])):
            halves[half] += sum(run.is_slow[number] for number in numbers)
    per_half = SEEDS * STEPS * 4 / 2
    assert halves[0] / per_half == pytest.approx(0.25, abs=0.03)
    assert halves[1] / per_half == pytest.approx(0.25, abs=0.03)


def test_failed_groups_are_replaced() -> None:
    for seed in range(SEEDS):
        run = Simulation(seed, per_batch=4, max_lag=1, slow=0.3, failing=0.1).run()
        assert run.too_old == []
        assert [len(batch) for batch in run.batches] == [4] * STEPS
        slow = sum(run.is_slow[number] for number in run.batched())
        drawn = sum(run.is_slow.values()) / len(run.is_slow)
        assert slow / (4 * STEPS) == pytest.approx(drawn, abs=0.05)


def test_a_deadline_drops_only_what_exceeds_it() -> None:
    """Slow groups take 15 to 40 s. A batch that waits 10 s for them loses some, one that waits 40 s none."""
    losses = {}
    for deadline in (10.0, 40.0):
        lost = opened = 0
        for seed in range(SEEDS):
            run = Simulation(seed, per_batch=4, max_lag=1, slow=0.1, deadline_s=deadline).run()
            lost, opened = lost + len(run.too_old), opened + len(run.is_slow)
            assert all(run.is_slow[number] for number in run.too_old)
        losses[deadline] = lost / opened
    assert losses[40.0] == 0
    assert 0 < losses[10.0] < 0.1
