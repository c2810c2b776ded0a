"""Groups on a real ledger: what a crash between two writes would leave behind."""

import asyncio

from aether_coordinator.groups import Groups
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import EpisodeRecord, GroupRecord, RunRecord
from aether_coordinator.status import Counters

LARGE = "a" * 64
"""Digest of a trace that is a file."""


def make_groups(ledger: Ledger, tmp_path) -> tuple[Groups, GroupRecord]:
    run = RunRecord(run="r", uuid="u", created_s=0.0, settings="{}")
    group = GroupRecord(id=1, kind="train", source="s", task=0, version=0, size=2).scored()
    episodes = [EpisodeRecord(group=1, index=index).accepted(0.5, 7, False, LARGE) for index in range(2)]
    ledger.commit_now(
        Write("groups", group.key, group.encode()), *(Write("episodes", e.key, e.encode()) for e in episodes)
    )
    groups = Groups(ledger, tmp_path, Counters(), max_attempts=1, drop_uniform=False)
    groups.load(run)
    return groups, group


async def test_a_trace_file_goes_only_after_no_record_needs_it(tmp_path):
    ledger = Ledger(tmp_path / "state")
    groups, group = make_groups(ledger, tmp_path)
    file = tmp_path / "traces" / f"{LARGE}.msgpack"
    file.write_bytes(b"trace")
    dropping = asyncio.create_task(groups.drop(group, "too old"))
    await asyncio.sleep(0.05)
    # Not committed: a start from here finds the group ready, and needs its traces.
    assert file.is_file()
    writer = asyncio.create_task(ledger.run())
    await dropping
    assert not file.exists()
    recorded = GroupRecord.decode(ledger.get("groups", group.key) or b"")
    assert (recorded.state, recorded.reason) == ("dropped", "too old")
    writer.cancel()
    ledger.close()


async def test_a_uniform_group_that_is_to_be_replaced_is_never_ready(tmp_path):
    ledger = Ledger(tmp_path / "state")
    group = GroupRecord(id=1, kind="train", source="s", task=0, version=0, size=2)
    episodes = [EpisodeRecord(group=1, index=index).accepted(0.5, 7, False, LARGE) for index in range(2)]
    ledger.commit_now(
        Write("groups", group.key, group.encode()), *(Write("episodes", e.key, e.encode()) for e in episodes)
    )
    counters = Counters()
    groups = Groups(ledger, tmp_path, counters, max_attempts=1, drop_uniform=True)
    groups.load(RunRecord(run="r", uuid="u", created_s=0.0, settings="{}"))
    completing = asyncio.create_task(groups.complete(group))
    await asyncio.sleep(0.05)
    # Not committed yet: a batch that is cut now must not find it.
    assert groups.unbatched() == []
    writer = asyncio.create_task(ledger.run())
    await completing
    assert groups.finished.get_nowait().reason == "all rewards are 0.5"
    assert (counters.groups_uniform, counters.groups_dropped, counters.tokens_dropped) == (1, 1, 14)
    writer.cancel()
    ledger.close()
