"""A whole run, done once for all tests that look at what it leaves behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun

STEPS = 12


class FinishedRun:
    """Twelve synchronous steps with one worker, over."""

    def __init__(self, run: TinyRun, status: dict[str, Any], exit_status: int) -> None:
        self.run = run
        self.status = status
        """The last JSON of `aether-coordinator status --json` while it ran."""
        self.exit_status = exit_status


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[FinishedRun]:
    batch = {"groups": 2, "group_size": 16, "max_policy_lag": 0}
    held_out = {
        "name": "held_out",
        "taskset": "aether_lowercase",
        "taskset_args": {"count": 4, "first": 100},
        "sampling": {"temperature": 1.0, "max_tokens": 12},
        "every": STEPS // 3,
    }
    run = TinyRun(tmp_path_factory.mktemp("finished"), tiny_model, steps=STEPS, batch=batch, eval=[held_out])
    try:
        run.add_worker("w1")
        coordinator = run.start_coordinator()
        run.start_worker("w1")
        status = run.wait(lambda status: status["step"] >= STEPS // 2, 180, "half of the steps")
        coordinator.wait(120)
        run.close()
        yield FinishedRun(run, status, coordinator.returncode)
    finally:
        run.close()
