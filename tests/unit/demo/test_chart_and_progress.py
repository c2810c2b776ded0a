import io
import struct
from pathlib import Path

from aether_coordinator.chart import DPI, SIZE_INCHES, draw_rewards
from aether_coordinator.progress import Progress, line, render_status, sparkline
from aether_coordinator.status import EvaluationStatus, RunStatus, StepStatus, WorkerStatus
from aether_coordinator.summary import Estimate
from rich.console import Console


def status(**changes: object) -> RunStatus:
    base = RunStatus(
        run="demo",
        run_uuid="u",
        state="running",
        step=1,
        steps=14,
        policy_version=1,
        step_share=0.25,
        groups_ready=2,
        groups_per_batch=8,
        turns_waiting=3,
        turns_running=61,
        tokens_per_s=83.4,
        steps_done=[StepStatus(step=1, reward=0.25, lag=1.0)],
        evaluations=[EvaluationStatus(source="held_out", version=0, done=1, total=4, reward=0.5)],
        workers=[WorkerStatus(name="worker-1", state="connected"), WorkerStatus(name="worker-2", state="lost")],
    )
    return base.model_copy(update=changes)


def test_chart_is_a_png_of_the_stated_size(tmp_path: Path) -> None:
    path = tmp_path / "rewards.png"
    held_out = {0: Estimate(mean=0.2, low=0.1, high=0.3, tasks=64), 2: Estimate(mean=1.0, low=1.0, high=1.0, tasks=64)}
    draw_rewards(path, [StepStatus(step=1, reward=0.2), StepStatus(step=2, reward=0.4)], held_out, "title")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (SIZE_INCHES[0] * DPI, SIZE_INCHES[1] * DPI)
    assert len(data) > 10_000


def test_chart_of_a_run_without_results(tmp_path: Path) -> None:
    draw_rewards(tmp_path / "rewards.png", [], {}, "nothing yet")
    assert (tmp_path / "rewards.png").stat().st_size > 1000


def test_without_a_terminal_lines_appear_only_for_news() -> None:
    output = io.StringIO()
    with Progress(Console(file=output, width=300)) as progress:
        progress.waiting("starting")
        progress.waiting("starting")
        progress.update(status())
        progress.update(status(turns_running=7, tokens_per_s=1.0))
        progress.update(status(step=2, policy_version=2))
    lines = output.getvalue().splitlines()
    assert lines[0] == "starting"
    assert lines[1] == (
        "running: step 1/14, reward 0.250, lag 1.0, policy 1 | 25% of the next step | 83 tokens/s | "
        "turns 3 waiting, 61 running | workers 1 | held_out@0 1/4"
    )
    assert lines[2].startswith("running: step 2/14")
    assert len(lines) == 3


def test_a_terminal_shows_every_figure() -> None:
    text = render_status(status(waits_for=["worker: worker-2"]))
    for part in (
        "1/14",
        "0.250",
        "waits for worker: worker-2",
        "worker-2",
        "lost",
        "held_out@0",
        "1/4",
        "25%",
        "61",
        "83",
    ):
        assert part in text


def test_line_before_the_first_policy() -> None:
    empty = RunStatus(run="demo", run_uuid="u", state="starting", steps=14, waits_for=["slot: 3"])
    assert line(empty).startswith("starting: step 0/14 | ")
    assert line(empty).endswith("waits for slot: 3")


def test_sparkline_clips() -> None:
    assert sparkline([-1.0, 0.0, 0.5, 1.0, 2.0]) == "▁▁▅██"
