"""Evaluations: due at the right versions, every task once, one file each, resumed after a restart."""

import json
from types import SimpleNamespace

import pytest
from aether_coordinator.evaluations import Evaluations, is_due
from aether_coordinator.groups import Groups
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import EpisodeRecord, GroupRecord, RunRecord
from aether_coordinator.settings import EvalSource
from aether_coordinator.status import Counters, evaluation_path

TASKS = 3


def source(**fields: object) -> SimpleNamespace:
    settings = EvalSource.model_validate({"name": "held", "taskset": "t", "episodes_per_task": 2, **fields})
    tasks = [SimpleNamespace(data=SimpleNamespace(name=f"task {number}")) for number in range(TASKS)]
    return SimpleNamespace(settings=settings, tasks=tasks)


class Parts:
    """Groups and evaluations on one ledger; made again for a restart."""

    def __init__(self, root, ledger: Ledger) -> None:
        self.ledger = ledger
        self.groups = Groups(ledger, root, Counters(), max_attempts=1, drop_uniform=False)
        self.groups.load(RunRecord(run="r", uuid="u", created_s=0.0, settings="{}"))
        self.evaluations = Evaluations(ledger, self.groups, {"held": source()}, root, 4)  # type: ignore[dict-item]
        self.evaluations.load([GroupRecord.decode(value) for _, value in ledger.scan("groups")])

    async def finish(self, task: int, rewards: tuple[float, float], *, tell: bool = True) -> None:
        """A group of version 0 is over; `tell` says it to the evaluations as well."""
        number = task + 1
        group = GroupRecord(id=number, kind="eval", source="held", task=task, version=0, size=2)
        episodes = [EpisodeRecord(group=number, index=i).accepted(r, 3, False, "") for i, r in enumerate(rewards)]
        if rewards[1] < 0:
            episodes[1] = EpisodeRecord(group=number, index=1).failed("sandbox")
        self.groups.groups[number] = group
        self.groups.episodes |= {episode.id: episode for episode in episodes}
        done = group.scored()
        self.ledger.commit_now(
            Write("groups", group.key, done.encode()), *(Write("episodes", e.key, e.encode()) for e in episodes)
        )
        if tell:
            await self.evaluations.finish(done)


@pytest.fixture
def parts(tmp_path):
    ledgers: list[Ledger] = []

    def make() -> Parts:
        for ledger in ledgers:
            ledger.close()
        ledgers[:] = [Ledger(tmp_path / "state")]
        return Parts(tmp_path, ledgers[0])

    yield make
    ledgers[0].close()


def test_when_an_evaluation_is_due():
    def due(every: int | None) -> list[int]:
        settings = EvalSource.model_validate({"name": "e", "taskset": "t", "every": every})
        return [version for version in range(8) if is_due(settings, version, 7)]

    assert due(None) == [0, 7]
    assert due(3) == [0, 3, 6, 7]


async def test_the_file_is_written_when_the_last_task_is_done(parts, tmp_path):
    run = parts()
    await run.evaluations.begin(0)
    await run.evaluations.begin(1)  # not due
    assert list(run.evaluations.running) == [("held", 0)] and run.evaluations.versions() == {0}
    assert run.evaluations.next_task() == ("held", 0, 0)
    await run.finish(0, (1.0, 0.0))
    await run.finish(2, (1.0, -1.0))
    path = evaluation_path(tmp_path, "held", 0)
    assert run.evaluations.next_task() == ("held", 0, 1) and not path.exists()
    await run.finish(1, (0.0, 0.0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["task"], line["index"], line["reward"]) for line in lines] == [
        (0, 0, 1.0),
        (0, 1, 0.0),
        (1, 0, 0.0),
        (1, 1, 0.0),
        (2, 0, 1.0),
        (2, 1, 0.0),
    ]
    assert lines[5]["error"] == "sandbox"
    (status,) = run.evaluations.status()
    assert (status.done, status.total, status.reward) == (6, 6, 0.4)  # the failed episode is no reward of 0
    assert run.evaluations.complete(0) and run.evaluations.versions() == set()


async def test_a_restart_goes_on_with_the_tasks_that_are_left(parts, tmp_path):
    run = parts()
    await run.evaluations.begin(0)
    await run.finish(0, (1.0, 1.0))
    run = parts()
    assert list(run.evaluations.running) == [("held", 0)]
    await run.evaluations.begin(0)
    assert run.evaluations.next_task() == ("held", 0, 1)
    await run.finish(1, (0.0, 0.0))
    await run.finish(2, (0.0, 0.0))
    (status,) = run.evaluations.status()
    assert (status.done, status.reward) == (6, 2 / 6)


async def test_a_file_that_a_crash_left_out_is_written_by_the_start_and_once(parts, tmp_path):
    run = parts()
    await run.evaluations.begin(0)
    for task in range(TASKS):
        await run.finish(task, (1.0, 0.0), tell=False)
    run = parts()
    path = evaluation_path(tmp_path, "held", 0)
    assert not path.exists()
    await run.evaluations.begin(0)
    assert len(path.read_text().splitlines()) == 6 and run.evaluations.running == {}
    written = path.stat().st_mtime_ns
    run = parts()
    await run.evaluations.begin(0)
    assert run.evaluations.running == {} and path.stat().st_mtime_ns == written
    assert run.evaluations.expired(0) == []
    assert sorted(set(run.evaluations.expired(1))) == [1, 2, 3]
    assert run.evaluations.expired(1) == [], "each time new ones only"
