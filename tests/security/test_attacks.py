"""Everything that a worker with a valid key must not do, tried over raw protocol."""

from pathlib import Path

import pytest
from security.attempts import all_attempts
from security.trying import breaches
from security.world import world

FEWEST = 60


async def test_every_attempt_fails_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with world(tmp_path) as target:
        contents = await target.contents()
        rows = [row async for row in breaches(target, all_attempts(target))]
        after = await target.contents()
        target.coordinator.check()
    with capsys.disabled():
        print()
        for attempt, outcome, wrong in rows:
            times = f" (x{attempt.count})" if attempt.count > 1 else ""
            print(f"{attempt.group:24}{attempt.what + times:60}{outcome[:60]}{'   <-- SUCCEEDED' if wrong else ''}")
        print(f"{sum(attempt.count for attempt, *_ in rows)} attempts in {len(rows)} rows")
    wrong = [f"{attempt.group}: {attempt.what}: {'; '.join(wrong)}" for attempt, _, wrong in rows if wrong]
    assert not wrong, "\n".join(wrong)
    assert {key: value for key, value in after.items() if contents.get(key) != value} == {}
    assert len({(attempt.group, attempt.what) for attempt, *_ in rows}) == len(rows) >= FEWEST
