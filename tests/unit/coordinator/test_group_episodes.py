"""The episodes of a group: accepted once, attempts counted, failures typed, too few to compare dropped."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aether_common.digests import sha256_bytes
from aether_coordinator.groups import INLINE_TRACE, Groups
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import EpisodeRecord, GroupRecord, RunRecord, StateError
from aether_coordinator.rollout import Outcome
from aether_coordinator.status import Counters

Attempt = Callable[[EpisodeRecord], Awaitable[Outcome]]


class Opened:
    """One open train group on a ledger whose writer runs."""

    def __init__(self, ledger: Ledger, groups: Groups, counters: Counters) -> None:
        self.ledger, self.groups, self.counters = ledger, groups, counters
        self.group: GroupRecord
        self.seen: list[tuple[int, int]] = []

    async def run(self, index: int, *outcomes: Outcome) -> Outcome | None:
        """Run an episode whose attempts end like `outcomes`."""
        left = list(outcomes)

        async def attempt(episode: EpisodeRecord) -> Outcome:
            self.seen.append((index, episode.attempt))
            return left.pop(0)

        return await self.groups.run_episode(self.group, index, attempt)

    def recorded(self, index: int) -> EpisodeRecord:
        return self.groups.recorded_episodes(self.group)[index]

    def group_recorded(self) -> GroupRecord:
        return GroupRecord.decode(self.ledger.get("groups", self.group.key) or b"")


@pytest.fixture
async def opened(tmp_path):
    ledger = Ledger(tmp_path / "state")
    writer = asyncio.create_task(ledger.run())
    counters = Counters()
    groups = Groups(ledger, tmp_path, counters, max_attempts=3, drop_uniform=False)
    groups.load(RunRecord(run="r", uuid="u", created_s=0.0, settings="{}"))
    opened = Opened(ledger, groups, counters)
    opened.group = await groups.open("train", "s", 5, 2, 3, 1)
    yield opened
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    ledger.close()


def done(reward: float, trace: bytes = b"") -> Outcome:
    return Outcome("done", reward=reward, tokens=4, trace=trace or b"trace %f" % reward)


async def test_a_group_is_ready_when_its_last_episode_is_final(opened):
    assert (opened.group.id, opened.groups.run.next_group, opened.groups.drawn) == (1, 2, {"s": 1})
    for index, reward in enumerate((0.0, 1.0)):
        await opened.run(index, done(reward))
    assert opened.group_recorded().state == "open" and opened.groups.finished.empty()
    await opened.run(2, done(0.5))
    assert opened.group_recorded().state == "ready"
    assert opened.groups.finished.get_nowait().id == 1
    assert [episode.reward for episode in opened.groups.recorded_episodes(opened.group)] == [0.0, 1.0, 0.5]
    assert (opened.counters.episodes_accepted, opened.counters.groups_uniform) == (3, 0)


async def test_an_episode_is_accepted_once(opened):
    await opened.run(0, done(1.0))
    assert await opened.run(0, done(0.0)) is None, "it is final: nothing runs"
    assert opened.seen == [(0, 0)] and opened.recorded(0).reward == 1.0
    with pytest.raises(StateError, match="g00000001-e000"):
        opened.recorded(0).accepted(0.0, 1, False, "x")


async def test_infrastructure_costs_an_attempt_and_its_journal(opened):
    key = b"g00000001-e000/0/%s/000000" % (b"a" * 64)
    await opened.ledger.commit(Write("journal", key, b"x"))
    await opened.run(0, Outcome("infrastructure", error="three workers lost"), done(1.0))
    assert opened.seen == [(0, 0), (0, 1)]
    assert opened.ledger.get("journal", key) is None
    episode = opened.recorded(0)
    assert (episode.state, episode.attempt, episode.reward) == ("done", 1, 1.0)


async def test_attempts_are_bounded_and_never_a_reward_of_0(opened):
    lost = Outcome("infrastructure", error="three workers lost")
    await opened.run(0, lost, lost, lost, done(1.0))
    assert opened.seen == [(0, 0), (0, 1), (0, 2)]
    assert (opened.recorded(0).state, opened.recorded(0).error) == ("failed", "three workers lost")
    await opened.run(1, done(1.0))
    await opened.run(2, done(0.0))
    assert opened.group_recorded().state == "ready", "two are left to compare"
    assert opened.counters.episodes_failed == 1


async def test_a_failure_of_the_task_is_final_at_once(opened):
    await opened.run(0, Outcome("failed", error="TaskError: why"), done(1.0))
    assert opened.seen == [(0, 0)] and opened.recorded(0).error == "TaskError: why"


async def test_one_finished_episode_cannot_be_compared(opened):
    await opened.run(0, done(1.0))
    for index in (1, 2):
        await opened.run(index, Outcome("failed", error="TaskError: why"))
    recorded = opened.group_recorded()
    assert recorded.state == "dropped" and recorded.reason == "1 of 3 episodes finished: TaskError: why"
    assert opened.groups.finished.get_nowait().state == "dropped"
    assert (opened.counters.groups_dropped, opened.counters.tokens_dropped) == (1, 4)
    assert opened.groups.groups == {} and opened.groups.episodes == {}
    assert list(opened.ledger.scan("traces")) == []


async def test_an_attempt_of_a_dropped_group_counts_no_more(opened):
    started, go_on = asyncio.Event(), asyncio.Event()

    async def attempt(episode: EpisodeRecord) -> Outcome:
        started.set()
        await go_on.wait()
        return done(1.0)

    running = asyncio.create_task(opened.groups.run_episode(opened.group, 0, attempt))
    await started.wait()
    await opened.groups.drop(opened.group, "too old")
    go_on.set()
    assert await running is None
    assert opened.recorded(0).state == "running" and opened.counters.episodes_accepted == 0


async def test_large_traces_are_files_named_by_their_digest(opened, tmp_path):
    small, large = b"s", b"l" * (INLINE_TRACE + 1)
    await opened.run(0, done(1.0, small))
    await opened.run(1, done(0.0, large))
    assert opened.groups.trace(sha256_bytes(small)) == small and opened.groups.trace(sha256_bytes(large)) == large
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [f"{sha256_bytes(large)}.msgpack"]
    assert [key for key, _ in opened.ledger.scan("traces")] == [sha256_bytes(small).encode()]


async def test_a_restart_finds_what_is_not_over(opened, tmp_path):
    await opened.run(0, done(1.0))
    again = Groups(opened.ledger, tmp_path, Counters(), max_attempts=3, drop_uniform=False)
    again.load(RunRecord.decode(opened.ledger.get("run", b"run") or b""))
    assert again.run.next_group == 2 and again.drawn == {"s": 1}
    assert [episode.state for episode in again.of(again.groups[1])] == ["done", "running", "running"]
