"""The finished steps: `metrics/steps.jsonl`, one line per published step, oldest first.

What a crash left out is written again from the committed batches, without the trainer's figures.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from aether_common.files import make_directory, write_durably

from aether_coordinator.ledger import Ledger
from aether_coordinator.records import BatchRecord
from aether_coordinator.status import StepStatus

SHOWN = 200
"""Steps in the status; all are in the file."""
FIGURES = ("loss", "kl", "entropy", "grad_norm")
"""Of the trainer's metrics."""


class Steps:
    """The steps that were published."""

    def __init__(self, run_root: Path, ledger: Ledger) -> None:
        self._file = run_root / "metrics" / "steps.jsonl"
        self._ledger = ledger
        self._done: list[StepStatus] = []

    @property
    def newest(self) -> list[StepStatus]:
        return self._done[-SHOWN:]

    def load(self, newest: int) -> None:
        """Read the steps up to `newest`: a backup of a living run may hold the file newer than the state."""
        if self._file.is_file():
            steps = [StepStatus.model_validate_json(line) for line in self._file.read_text().splitlines()]
            self._done = [step for step in steps if step.step <= newest]

    async def add(self, batch: BatchRecord, metrics: Mapping[str, float], batches: Mapping[int, BatchRecord]) -> None:
        """One more was published; those of `batches` before it that are missing are added with it."""
        figures = {name: metrics[name] for name in FIGURES if name in metrics}
        self._done.append(_step(batch, time.time(), **figures))
        known = {step.step for step in self._done}
        self._done += [
            _step(record, 0.0) for step, record in batches.items() if step < batch.step and step not in known
        ]
        self._done.sort(key=lambda step: step.step)
        lines = "".join(step.model_dump_json() + "\n" for step in self._done).encode()

        def write() -> None:
            make_directory(self._file.parent)
            write_durably(self._file, lines)

        await self._ledger.write_file(write)


def _step(batch: BatchRecord, finished_s: float, **figures: float) -> StepStatus:
    return StepStatus(
        step=batch.step, reward=batch.reward, tokens=batch.tokens, lag=batch.lag, finished_s=finished_s, **figures
    )
