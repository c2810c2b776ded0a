import io
import json
import math
from pathlib import Path

import pytest
from aether_common.errors import RunDirectoryError
from aether_coordinator.status import Counters, RunStatus, StepStatus, evaluation_path
from aether_coordinator.summary import (
    EvaluatedEpisode,
    Summary,
    as_json,
    compare,
    estimate,
    first_completions,
    moving_average,
    print_summary,
    read_evaluation,
    read_steps,
    reward_first,
    reward_last,
    t_quantile_975,
)
from rich.console import Console


def episode(task: int, reward: float, index: int = 0, completion: str = "") -> EvaluatedEpisode:
    return EvaluatedEpisode(
        task=task,
        task_name=f"t{task}",
        index=index,
        reward=reward,
        prompt=f"last: {task}",
        completion=completion,
        tokens=2,
    )


def steps(*rewards: float) -> list[StepStatus]:
    return [StepStatus(step=n, reward=reward, finished_s=1000 + 10 * n) for n, reward in enumerate(rewards, start=1)]


# Printed tables of Student's t distribution, two-sided 5 %.
@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.706), (3, 3.182), (9, 2.262), (10, 2.228), (15, 2.131), (30, 2.042), (63, 1.998), (120, 1.980)],
)
def test_t_quantiles_are_those_of_printed_tables(degrees: int, value: float) -> None:
    assert t_quantile_975(degrees) == pytest.approx(value, abs=6e-4)


def test_interval_worked_out_by_hand() -> None:
    # Values 1, 0, 1, 1: mean 3/4, sample variance (3/16 + 9/16)/3 = 1/4, standard error 0.5/2 = 0.25.
    found = estimate([1.0, 0.0, 1.0, 1.0])
    assert (found.mean, found.tasks) == (0.75, 4)
    assert found.low == pytest.approx(0.75 - 3.1824 * 0.25)
    assert found.high == pytest.approx(0.75 + 3.1824 * 0.25)


def test_the_difference_is_paired_and_clustered_by_task() -> None:
    before = [episode(0, 0), episode(0, 1, 1), episode(1, 0), episode(1, 0, 1), episode(2, 1), episode(2, 1, 1)]
    after = [episode(0, 1), episode(0, 1, 1), episode(1, 1), episode(1, 0, 1), episode(2, 1), episode(2, 1, 1)]
    found = compare(before, after)
    assert found is not None
    # Task means 1/2, 0, 1 before and 1, 1/2, 1 after: differences 1/2, 1/2, 0 with mean 1/3,
    # variance (1/36 + 1/36 + 1/9)/2 = 1/12, standard error sqrt(1/36) = 1/6, t(2) = 4.3027.
    assert found.before.mean == pytest.approx(0.5)
    assert found.after.mean == pytest.approx(2.5 / 3)
    assert found.difference.mean == pytest.approx(1 / 3)
    assert found.difference.low == pytest.approx(1 / 3 - 4.3027 / 6)
    assert found.difference.high == pytest.approx(1 / 3 + 4.3027 / 6)


def test_only_tasks_of_both_evaluations_count() -> None:
    found = compare([episode(0, 0), episode(1, 1)], [episode(1, 0), episode(2, 1)])
    assert found is not None
    assert (found.before.mean, found.after.mean, found.difference.tasks) == (1.0, 0.0, 1)
    assert math.isinf(found.difference.low)
    assert compare([episode(0, 0)], [episode(1, 0)]) is None


def test_means_of_three_steps_and_moving_average() -> None:
    rewards = [0.1, 0.2, 0.6, 0.7, 0.8]
    assert reward_first(steps(*rewards)) == pytest.approx(0.3)
    assert reward_last(steps(*rewards)) == pytest.approx(0.7)
    assert reward_first(steps(0.25)) == 0.25
    assert reward_last([]) is None
    assert moving_average(rewards, 3) == pytest.approx([0.1, 0.15, 0.3, 0.5, 0.7])


def test_completions_are_the_first_tasks_of_both() -> None:
    before = [episode(task, 0, completion=f"b{task}") for task in (3, 0, 1, 2)]
    after = [episode(task, 1, completion=f"a{task}") for task in (0, 2, 3, 1)]
    shown = first_completions(before, after)
    assert [(one.prompt, one.before, one.after) for one in shown] == [
        ("last: 0", "b0", "a0"),
        ("last: 1", "b1", "a1"),
        ("last: 2", "b2", "a2"),
    ]


def test_files_are_read_and_damage_is_named(tmp_path: Path) -> None:
    path = evaluation_path(tmp_path, "held_out", 14)
    assert path == tmp_path / "evals" / "held_out" / "policy_000014.jsonl"
    with pytest.raises(RunDirectoryError, match="resume it"):
        read_evaluation(path)
    path.parent.mkdir(parents=True)
    path.write_text(episode(0, 1).model_dump_json() + "\n")
    assert read_evaluation(path) == [episode(0, 1)]
    path.write_text('{"task": 0}\n')
    with pytest.raises(RunDirectoryError, match="damaged"):
        read_evaluation(path)


def test_a_step_recorded_twice_counts_once(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    one, two = steps(0.1, 0.2)
    lines = [two, one, two.model_copy(update={"loss": 1.0})]
    (tmp_path / "metrics" / "steps.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines))
    assert [(step.step, step.loss) for step in read_steps(tmp_path)] == [(1, 0.0), (2, 1.0)]


def summary(tmp_path: Path) -> Summary:
    sampled = compare([episode(0, 0), episode(1, 0.5)], [episode(0, 1), episode(1, 1)])
    counters = Counters(tokens_generated=4321, tokens_trained=1234, replies_duplicate=1)
    return Summary(
        model="/models/tiny",
        seed=3,
        status=RunStatus(
            run="demo", run_uuid="u", state="finished", policy_version=2, started_s=1004.0, counters=counters
        ),
        steps=steps(0.2, 0.4),
        sampled=sampled,
        greedy=sampled,
        completions=first_completions([episode(0, 0, completion="b\n")], [episode(0, 1, completion="a[b]")]),
        seconds_setup=12.345,
        seconds_model=0.0,
        seconds_total=99.0,
        run_root=tmp_path,
        adapter=tmp_path / "checkpoints" / "step_000002" / "adapter",
        chart=tmp_path / "rewards.png",
    )


def test_json_object(tmp_path: Path) -> None:
    found = json.loads(as_json(summary(tmp_path)))
    expected = {
        "steps": 2,
        "policy_version": 2,
        "eval_before": 0.25,
        "eval_after": 1.0,
        "eval_difference": 0.75,
        "eval_tasks": 2,
        "eval_greedy_before": 0.25,
        "seconds": 16.0,
        "seconds_setup": 12.35,
        "tokens_generated": 4321,
        "tokens_trained": 1234,
        "replies_duplicate": 1,
        "turns_replayed": 0,
        "adapter": str(tmp_path / "checkpoints" / "step_000002" / "adapter"),
    }
    assert {key: found[key] for key in expected} == expected
    # Differences 1 and 1/2: standard error 0.25, t(1) = 12.7062.
    assert found["eval_interval"] == pytest.approx([0.75 - 12.7062 / 4, 0.75 + 12.7062 / 4])
    assert found["reward_first"] == found["reward_last"] == pytest.approx(0.3)


def test_json_is_strict_where_a_figure_does_not_exist(tmp_path: Path) -> None:
    one = compare([episode(0, 0)], [episode(0, 1)])
    bare = summary(tmp_path).model_copy(update={"sampled": one, "greedy": None, "steps": []})
    found = json.loads(as_json(bare))
    assert (found["eval_difference"], found["eval_interval"]) == (1.0, None)
    assert (found["reward_first"], found["eval_greedy_after"], found["seconds"]) == (None, None, 0.0)


def test_text_shows_every_figure_and_unbroken_paths(tmp_path: Path) -> None:
    output = io.StringIO()
    print_summary(Console(file=output, width=80), summary(tmp_path))
    text = output.getvalue()
    assert str(tmp_path / "checkpoints" / "step_000002" / "adapter") in text
    assert str(tmp_path / "rewards.png") in text
    assert "+0.750" in text
    assert '"b\\n"' in text and '"a[b]"' in text
    assert "PeftModel.from_pretrained" in text
