"""Workers that are not what they say: refused by name, or found out by what they sample."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import TESTS, TinyRun


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[TinyRun]:
    run = TinyRun(tmp_path, tiny_model, steps=6, batch={"groups": 3, "group_size": 16})
    try:
        yield run
    finally:
        run.close()


def events(run: TinyRun, kind: str) -> list[dict[str, str]]:
    lines = (run.run_root / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.long
def test_other_weights_after_the_check_of_the_identity(run: TinyRun) -> None:
    """Its identity is right, and what it serves is not: quarantined within two steps, and the run goes on."""
    run.start_coordinator()
    for name in ("w1", "w2"):
        run.start_worker(name, slots=8)
    run.add_worker("w3", slots=8)
    command = [sys.executable, str(TESTS / "perturbed_worker.py"), "run", str(run.root / "w3.toml")]
    run.start("w3", *command)
    status = run.wait(lambda status: run.state(status, "w3") == "quarantined", 180, "the quarantine")
    first = run.wait(lambda status: status["step"] >= 1, 60, "the first step")
    assert status["step"] <= 2, first
    (event,) = events(run, "quarantined")
    assert event["worker"] == "w3" and "its logprobs are not the trainer's: k3 " in event["message"]
    run.finish(180)
    assert {event["worker"] for event in events(run, "quarantined")} == {"w3"}
    verified = run.command("aether-coordinator", "verify", str(run.run_root))
    assert verified.returncode == 0, verified.stdout


def test_another_dtype(run: TinyRun) -> None:
    run.start_coordinator()
    worker = run.start_worker("w1", engine="null", dtype="bfloat16")
    assert worker.wait(120) == 3, run.log("w1")
    assert "it serves another model: dtype: the run has 'float32', here it is 'bfloat16'" in run.log("w1")
    (event,) = events(run, "refused")
    assert event["worker"] == "w1" and "dtype" in event["message"]
