"""What a finished demo says: figures, intervals, completions, and one JSON object.

Pure functions over the status of the run and the evaluation files that the coordinator wrote. Training
reward and held-out accuracy are different things and are never mixed in one figure.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from aether_common.errors import RunDirectoryError
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aether_coordinator.status import RunStatus, StepStatus

WINDOW = 3
"""Steps in `reward_first`, `reward_last` and the moving average: single steps are jagged."""
SHOWN_TASKS = 3

_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


class EvaluatedEpisode(BaseModel):
    """One line of `evals/<source>/policy_<version>.jsonl`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    task: int
    task_name: str
    index: int
    """Which of the task's episodes."""
    reward: float
    prompt: str
    completion: str
    tokens: int


class Estimate(BaseModel):
    """A mean over tasks with its 95 % interval."""

    model_config = ConfigDict(frozen=True)

    mean: float
    low: float
    high: float
    tasks: int


class HeldOut(BaseModel):
    """The same held-out tasks before and after training."""

    model_config = ConfigDict(frozen=True)

    before: Estimate
    after: Estimate
    difference: Estimate


class Completion(BaseModel):
    """What the policy answered to one held-out task, greedily."""

    prompt: str
    before: str
    after: str
    reward_before: float
    reward_after: float


def t_quantile_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution.

    Exact (tabulated) below 10 degrees of freedom; above, the expansion around the normal quantile
    (Abramowitz and Stegun 26.7.5), which is right to 1e-4 there. Raises `ValueError` below 1.
    """
    if degrees < 1:
        raise ValueError("an interval needs at least two tasks")
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t interval of one value per task; with a single task the interval is unbounded."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean=mean, low=-math.inf, high=math.inf, tasks=len(values))
    half = t_quantile_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean=mean, low=mean - half, high=mean + half, tasks=len(values))


def task_means(episodes: Iterable[EvaluatedEpisode]) -> dict[int, float]:
    """Mean reward of each task: episodes of one task are no independent observations, tasks are."""
    rewards: dict[int, list[float]] = {}
    for episode in episodes:
        rewards.setdefault(episode.task, []).append(episode.reward)
    return {task: fmean(values) for task, values in sorted(rewards.items())}


def compare(before: Iterable[EvaluatedEpisode], after: Iterable[EvaluatedEpisode]) -> HeldOut | None:
    """Accuracy before and after, and the paired difference clustered by task.

    Only tasks that both evaluations have count; None when there is no such task.
    """
    first, second = task_means(before), task_means(after)
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    return HeldOut(
        before=estimate([first[task] for task in common]),
        after=estimate([second[task] for task in common]),
        difference=estimate([second[task] - first[task] for task in common]),
    )


def first_completions(
    before: Iterable[EvaluatedEpisode], after: Iterable[EvaluatedEpisode], count: int = SHOWN_TASKS
) -> list[Completion]:
    """The first tasks' first episodes, before and after."""
    first = {episode.task: episode for episode in before if episode.index == 0}
    second = {episode.task: episode for episode in after if episode.index == 0}
    return [
        Completion(
            prompt=first[task].prompt,
            before=first[task].completion,
            after=second[task].completion,
            reward_before=first[task].reward,
            reward_after=second[task].reward,
        )
        for task in sorted(first.keys() & second.keys())[:count]
    ]


def moving_average(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and up to `window - 1` values before it."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def reward_first(steps: Sequence[StepStatus]) -> float | None:
    return fmean(step.reward for step in steps[:WINDOW]) if steps else None


def reward_last(steps: Sequence[StepStatus]) -> float | None:
    return fmean(step.reward for step in steps[-WINDOW:]) if steps else None


def read_evaluation(path: Path) -> list[EvaluatedEpisode]:
    """The episodes of a finished evaluation. Raises `RunDirectoryError` when the file is missing or damaged."""
    return [_parse(EvaluatedEpisode, line, path) for line in _lines(path)]


def read_steps(run_root: Path) -> list[StepStatus]:
    """The finished steps, each once, oldest first. Raises `RunDirectoryError` as above."""
    path = run_root / "metrics" / "steps.jsonl"
    steps = [_parse(StepStatus, line, path) for line in _lines(path)]
    return sorted({step.step: step for step in steps}.values(), key=lambda step: step.step)


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise RunDirectoryError(f"{path} is missing: the run did not get that far; resume it") from None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error


def _parse[ModelT: BaseModel](kind: type[ModelT], line: str, path: Path) -> ModelT:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        raise RunDirectoryError(f"{path}: a line is damaged: {line[:100]!r}") from error


class Summary(BaseModel):
    """Everything that the end of a demo shows."""

    model: str
    revision: str | None = None
    """Commit of a hub repository."""
    seed: int
    status: RunStatus
    steps: list[StepStatus]
    sampled: HeldOut | None
    greedy: HeldOut | None
    completions: list[Completion]
    seconds_setup: float
    """Start of the demo to the first group, the conversion of the model included."""
    seconds_model: float
    """Conversion of the model alone; next to nothing when it came from the cache."""
    seconds_total: float
    run_root: Path
    adapter: Path
    chart: Path

    @property
    def seconds(self) -> float:
        """First group opened to the last step finished."""
        started = self.status.started_s
        return max(0.0, self.steps[-1].finished_s - started) if self.steps and started else 0.0

    def json_object(self) -> dict[str, Any]:
        """The `--json` object: flat, one name per figure; null where a figure does not exist."""
        sampled, greedy = self.sampled, self.greedy
        interval = sampled.difference if sampled else None
        bounded = interval is not None and math.isfinite(interval.low)
        return {
            "run": self.status.run,
            "model": self.model,
            "seed": self.seed,
            "state": self.status.state,
            "steps": self.steps[-1].step if self.steps else 0,
            "policy_version": self.status.policy_version,
            "reward_first": reward_first(self.steps),
            "reward_last": reward_last(self.steps),
            "eval_before": sampled.before.mean if sampled else None,
            "eval_after": sampled.after.mean if sampled else None,
            "eval_difference": interval.mean if interval else None,
            "eval_interval": [interval.low, interval.high] if interval and bounded else None,
            "eval_tasks": interval.tasks if interval else 0,
            "eval_greedy_before": greedy.before.mean if greedy else None,
            "eval_greedy_after": greedy.after.mean if greedy else None,
            "seconds": round(self.seconds, 2),
            "seconds_setup": round(self.seconds_setup, 2),
            "seconds_model": round(self.seconds_model, 2),
            "seconds_total": round(self.seconds_total, 2),
            "run_root": str(self.run_root),
            "adapter": str(self.adapter),
            "chart": str(self.chart),
            **self.status.counters.model_dump(),
        }


def peft_snippet(summary: Summary) -> str:
    """How to load the trained adapter, ready to paste."""
    pinned = f", revision={summary.revision!r}" if summary.revision else ""
    return f"""\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = {summary.model!r}
tokenizer = AutoTokenizer.from_pretrained(base{pinned})
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base{pinned}, dtype="auto"),
    {str(summary.adapter)!r})
"""


def print_summary(console: Console, summary: Summary) -> None:
    """The summary for a terminal. Paths and code are never wrapped, so that they can be copied."""
    console.print()
    console.rule(f"{summary.status.run}: {len(summary.steps)} steps", align="left")
    console.print(_figures(summary))
    counters, tasks = summary.status.counters, summary.sampled.difference.tasks if summary.sampled else 0
    console.print(
        f"Training reward: means of the first and the last {WINDOW} steps. Held-out accuracy: exact match on {tasks} "
        "tasks of words that are never trained on; the interval is that of the paired difference.\n"
        f"First group to last step {summary.seconds:.0f} s, {summary.seconds_total:.0f} s in all. "
        f"Tokens: {counters.tokens_generated:,} generated, {counters.tokens_trained:,} trained.",
        highlight=False,
    )
    if summary.completions:
        console.print()
        console.print(_completions(summary.completions))
    console.print()
    for label, path in (("adapter", summary.adapter), ("curve", summary.chart), ("run", summary.run_root)):
        console.print(Text.assemble((f"{label:<9}", "bold"), str(path)), soft_wrap=True)
    console.print()
    console.print(Text("Load the adapter:", style="bold"))
    console.print(Text(peft_snippet(summary)), soft_wrap=True)


def _figures(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=True, header_style="bold")
    for heading in ("", "before", "after", "difference", "95 % interval"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    first, last = reward_first(summary.steps), reward_last(summary.steps)
    if first is not None and last is not None:
        table.add_row("training reward", f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}", "")
    for name, held_out in (("sampled", summary.sampled), ("greedy", summary.greedy)):
        if held_out is not None:
            difference = held_out.difference
            table.add_row(
                f"held-out accuracy, {name}",
                f"{held_out.before.mean:.3f}",
                f"{held_out.after.mean:.3f}",
                f"{difference.mean:+.3f}",
                f"{difference.low:+.3f} to {difference.high:+.3f}",
            )
    return table


def _completions(completions: Sequence[Completion]) -> Table:
    table = Table(title="Held-out tasks, greedy completions", title_justify="left", title_style="bold", min_width=60)
    for heading in ("task", "before", "after"):
        table.add_column(heading, overflow="fold")
    for shown in completions:
        table.add_row(
            Text(shown.prompt),
            Text(json.dumps(shown.before, ensure_ascii=False), style=_style(shown.reward_before)),
            Text(json.dumps(shown.after, ensure_ascii=False), style=_style(shown.reward_after)),
        )
    return table


def _style(reward: float) -> str:
    return "green" if reward > 0 else "red"


def as_json(summary: Summary) -> str:
    return json.dumps(summary.json_object(), allow_nan=False)
