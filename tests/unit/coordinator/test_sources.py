"""The order in which tasks are drawn."""

from collections import Counter

from aether_coordinator.settings import TrainSource
from aether_coordinator.sources import next_source, task_at


def source(name: str, weight: float) -> TrainSource:
    return TrainSource(name=name, taskset="t", weight=weight)


def test_every_epoch_draws_every_task_once_in_another_order():
    epochs = [[task_at(10 * epoch + i, 10, seed=0, name="s", shuffle=True) for i in range(10)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert epochs[0] != [task_at(i, 10, seed=1, name="s", shuffle=True) for i in range(10)]


def test_without_shuffle_the_order_is_the_tasksets():
    assert [task_at(i, 3, seed=0, name="s", shuffle=False) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_sources_share_by_weight():
    sources = [source("a", 3.0), source("b", 1.0)]
    drawn: dict[str, int] = {}
    order = []
    for _ in range(8):
        name = next_source(sources, drawn).name
        order.append(name)
        drawn[name] = drawn.get(name, 0) + 1
    # a at 0, 1/3, 2/3, 1; b at 0, 1: worked out by hand, ties go to the first.
    assert order == ["a", "b", "a", "a", "a", "b", "a", "a"]
    assert Counter(order) == {"a": 6, "b": 2}
