"""The live view of a run in a terminal.

Everything goes to stderr, so that stdout carries results only. Without a terminal there is one plain
line per finished step and per change of state, and none that merely repeats the last.
"""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aether_coordinator.status import EvaluationStatus, RunStatus

HEARTBEAT_S = 30.0
"""Without a terminal: at most this long without a line."""
SHOWN_STEPS = 6
_BARS = "▁▂▃▄▅▆▇█"


class Progress:
    """Shows what it is told; owns the live display between `__enter__` and `__exit__`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._live: Live | None = None
        self._line = ""
        self._printed = 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str, style: str = "") -> None:
        """A line that stays."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def waiting(self, text: str) -> None:
        """What is being waited for before there is a status."""
        if self._live is not None:
            self._live.update(Text(f"… {text}", style="dim"))
        elif text != self._line:
            self._print(text)

    def update(self, status: RunStatus) -> None:
        if self._live is not None:
            self._live.update(view(status))
            return
        text = line(status)
        new = milestone(text) != milestone(self._line)
        if new or (text != self._line and time.monotonic() - self._printed >= HEARTBEAT_S):
            self._print(text)

    def _print(self, text: str) -> None:
        self.say(text)
        self._line, self._printed = text, time.monotonic()


def milestone(text: str) -> str:
    """The part of a plain line whose change is worth a new line at once."""
    return text.partition(" | ")[0]


def line(status: RunStatus) -> str:
    """One line: milestone first, then what changes all the time."""
    head = f"{status.state}: step {status.step}/{status.steps}"
    if status.steps_done:
        head += f", reward {status.steps_done[-1].reward:.3f}, lag {status.steps_done[-1].lag:.1f}"
    head += f", policy {status.policy_version}" if status.policy_version >= 0 else ""
    parts = [
        head,
        f"{status.step_share:.0%} of the next step",
        f"{status.tokens_per_s:.0f} tokens/s",
        f"turns {status.turns_waiting} waiting, {status.turns_running} running",
        f"workers {connected(status)}",
        *(f"{running.source}@{running.version} {running.done}/{running.total}" for running in unfinished(status)),
        *(f"waits for {cause}" for cause in status.waits_for),
    ]
    return " | ".join(parts)


def connected(status: RunStatus) -> int:
    return sum(worker.state in ("connected", "draining") for worker in status.workers)


def unfinished(status: RunStatus) -> list[EvaluationStatus]:
    return [evaluation for evaluation in status.evaluations if evaluation.done < evaluation.total]


def sparkline(values: list[float]) -> str:
    """Rewards between 0 and 1 as a row of bars; values outside are clipped."""
    top = len(_BARS) - 1
    return "".join(_BARS[round(min(1.0, max(0.0, value)) * top)] for value in values)


def view(status: RunStatus) -> RenderableType:
    """The live display."""
    rewards = [step.reward for step in status.steps_done]
    head = Text()
    head.append(f"{status.run} ", style="bold").append(f"{status.state}", style=_state_style(status))
    for cause in status.waits_for:
        head.append(f"\nwaits for {cause}", style="yellow")
    figures = Table.grid(padding=(0, 3))
    lag = f"{status.steps_done[-1].lag:.1f}" if status.steps_done else "–"
    reward = f"{rewards[-1]:.3f}" if rewards else "–"
    policy = str(status.policy_version) if status.policy_version >= 0 else "–"
    figures.add_row(
        _figure("step", f"{status.step}/{status.steps}"),
        _figure("reward", reward),
        _figure("policy", policy),
        _figure("lag", lag),
    )
    # Two rows: one does not fit into 80 columns.
    figures.add_row(
        _figure("tokens/s", f"{status.tokens_per_s:.0f}"),
        _figure("turns waiting", str(status.turns_waiting)),
        _figure("running", str(status.turns_running)),
        _figure("workers", str(connected(status))),
    )
    parts: list[RenderableType] = [head, figures, _bar("next step", status.step_share, _groups(status))]
    for evaluation in unfinished(status):
        share = evaluation.done / evaluation.total if evaluation.total else 0.0
        label = f"{evaluation.source}@{evaluation.version}"
        parts.append(_bar(label, share, f"{evaluation.done}/{evaluation.total}"))
    if rewards:
        parts.append(Text.assemble(("reward   ", "dim"), (sparkline(rewards), "blue")))
    parts.extend(_steps(status))
    parts.append(_workers(status))
    return Group(*parts)


def render_status(status: RunStatus) -> str:
    """The live display once, as text for a terminal or a file."""
    console = Console(highlight=False)
    with console.capture() as capture:
        console.print(view(status))
    return capture.get().rstrip()


def _figure(label: str, value: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, "bold"))


def _groups(status: RunStatus) -> str:
    return f"groups {status.groups_ready} ready of {status.groups_per_batch}, {status.groups_open} open"


def _bar(label: str, share: float, detail: str) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        Text(f"{label:<18}", style="dim"),
        ProgressBar(total=1.0, completed=min(1.0, max(0.0, share)), width=40),
        Text(f"{share:>4.0%}"),
        Text(detail, style="dim"),
    )
    return row


def _steps(status: RunStatus) -> list[RenderableType]:
    if not status.steps_done:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("step", "reward", "loss", "kl", "entropy", "grad norm", "tokens", "lag"):
        table.add_column(heading, justify="right")
    for step in status.steps_done[-SHOWN_STEPS:]:
        table.add_row(
            str(step.step),
            f"{step.reward:.3f}",
            f"{step.loss:+.4f}",
            f"{step.kl:.1e}",
            f"{step.entropy:.3f}",
            f"{step.grad_norm:.2f}",
            str(step.tokens),
            f"{step.lag:.1f}",
        )
    return [table]


def _workers(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    for worker in status.workers:
        table.add_row(
            Text(worker.name),
            Text(worker.state, style="green" if worker.state == "connected" else "yellow"),
            Text(f"{worker.running} jobs, {worker.slots} slots", style="dim"),
            Text(f"{worker.tokens_per_s:.0f} tokens/s", style="dim"),
            Text(worker.reason, style="yellow"),
        )
    return table


def _state_style(status: RunStatus) -> str:
    return {"running": "green", "finished": "bold green", "failed": "bold red"}.get(status.state, "yellow")
