"""Whole runs as a user has them: real processes, a tiny model, the real queue."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aether_common.batch import batch_path
from aether_common.checkpoint import checkpoint_path, complete_steps, read_manifest, verify_adapter
from aether_common.digests import sha256_file
from peft import PeftModel
from tiny_run import TinyRun, toml
from transformers import AutoModelForCausalLM

from .conftest import STEPS, FinishedRun


def check_history(run_root: Path, steps: int) -> None:
    """Steps are gapless; checkpoint N names batch N and checkpoint N-1; adapters are what manifests say."""
    assert complete_steps(run_root) == list(range(steps + 1))
    parent = None
    for step in range(steps + 1):
        manifest, digest = read_manifest(run_root, step)
        assert (manifest.step, manifest.parent) == (step, parent)
        assert manifest.batch == (sha256_file(batch_path(run_root, step)) if step else None)
        verify_adapter(run_root, step)
        parent = digest


def evaluation(run_root: Path, version: int) -> list[dict[str, Any]]:
    lines = (run_root / "evals" / "held_out" / f"policy_{version:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_reward_rises(finished_run: FinishedRun) -> None:
    assert finished_run.exit_status == 0
    steps = finished_run.run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["lag"] == 0 for step in steps)
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[:3]) / 3 < 0.4 < sum(rewards[-3:]) / 3, rewards


def test_the_history_is_gapless(finished_run: FinishedRun) -> None:
    check_history(finished_run.run.run_root, STEPS)
    done = finished_run.run.command("aether-coordinator", "verify", str(finished_run.run.run_root))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_held_out_tasks_are_evaluated_before_and_after(finished_run: FinishedRun) -> None:
    versions = range(0, STEPS + 1, STEPS // 3)
    before, *after = (evaluation(finished_run.run.run_root, version) for version in versions)
    for lines in (before, *after):
        assert [line["task"] for line in lines] == [0, 1, 2, 3]
        assert [line["prompt"] for line in lines] == [f"say {number}" for number in range(100, 104)]
        assert all(line["completion"] and not line["error"] for line in lines)
    # At this learning rate a policy that gets every reward may lose itself again within the last steps.
    assert sum(line["reward"] for line in before) < max(sum(line["reward"] for line in lines) for lines in after)


def test_the_adapter_loads_with_plain_peft(finished_run: FinishedRun) -> None:
    run = finished_run.run
    base = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    prompt = torch.tensor([[1, 70, 71, 72, 2]])
    with torch.no_grad():
        plain = base(prompt).logits
        tuned = PeftModel.from_pretrained(base, checkpoint_path(run.run_root, STEPS) / "adapter")
        assert not torch.allclose(tuned(prompt).logits, plain, atol=1e-2)
        with tuned.disable_adapter():
            torch.testing.assert_close(tuned(prompt).logits, plain)


def test_status_of_a_run_that_is_over_says_so(finished_run: FinishedRun) -> None:
    done = finished_run.run.command("aether-coordinator", "status", str(finished_run.run.run_root), "--json")
    assert done.returncode == 1
    assert "no coordinator answers" in done.stderr and "Traceback" not in done.stderr


WAITING = {"running": 0, "state": "", "tokens_per_s": 0.0}
"""What the status shows of a worker that has not registered."""


class ByHand(TinyRun):
    """A run from the files of `init`, changed as a user changes them."""

    def __init__(self, root: Path, model: Path) -> None:
        super().__init__(root / "unused", model)
        self.root = root / "by-hand"
        self.run_root = self.root / "my-run"
        assert self.command("aether-coordinator", "init", str(self.root)).returncode == 0
        identity = self.command(
            "aether-coordinator", "identity", str(model), "--dtype", "float32", "--renderer", "default"
        )
        assert identity.returncode == 0, identity.stderr
        server = (self.root / "server.toml").read_text()
        before, _, rest = server.partition("[base_model]")
        after = rest[rest.index("\n\n") :]
        self.edit("server.toml", before + identity.stdout + after)
        self.replace(
            "server.toml",
            ('model = "org/model"', f"model = {toml(str(model))}"),
            ("max_model_len = 4096", "max_model_len = 256"),
            ('"aether_last_word"', '"aether_lowercase"'),
            ('taskset_args = { split = "train" }', ""),
            ('taskset_args = { split = "held_out" }', "taskset_args = { count = 4, first = 100 }"),
            ("max_tokens = 512", "max_tokens = 12"),
            ("groups = 8 ", "groups = 2 "),
            ("group_size = 8 ", "group_size = 16 "),
        )
        self.replace(
            "trainer.toml",
            ('path = "org/model"', f"path = {toml(str(model))}"),
            ('revision = ""', "# revision"),
            ('dtype = "bfloat16"', 'dtype = "float32"'),
            ("rank = 8", 'rank = 8\ntarget_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]'),
        )

    def edit(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def replace(self, name: str, *changes: tuple[str, str]) -> None:
        text = (self.root / name).read_text()
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        self.edit(name, text)

    def add_worker(self, name: str, **settings: Any) -> Path:
        """worker.toml of `init` with the lines that `worker add` prints."""
        template = (self.root / "worker.toml").read_text().replace('"org/model"', toml(str(self.model)))
        own = template.replace('revision = ""', "# revision").replace('"bfloat16"', '"float32"')
        own = own.replace('engine = "vllm"', 'engine = "transformers"').replace('"w1-state"', f'"{name}-state"')
        own = own.replace("slots = 64", f"slots = {settings.pop('slots', 32)}").replace("= 4096", "= 256")
        added = self.command("aether-coordinator", "worker", "add", name, "--config", str(self.root / "server.toml"))
        assert added.returncode == 0, added.stderr
        lines = [line for line in own.splitlines() if line.split(" ")[0] not in ("name", "run", "url", "key_file")]
        file = self.root / f"{name}.toml"
        file.write_text(added.stdout + "\n".join(lines) + "\n" + settings.pop("more", ""))
        return file

    def worker(self, name: str, status: dict[str, Any]) -> dict[str, Any]:
        return next((worker for worker in status["workers"] if worker["name"] == name), WAITING)


@pytest.fixture
def by_hand(tmp_path: Path, tiny_model: Path) -> Iterator[ByHand]:
    run = ByHand(tmp_path, tiny_model)
    try:
        yield run
    finally:
        run.close()


@pytest.mark.long
def test_by_hand(by_hand: ByHand) -> None:
    """init, identity, check, worker add, run; late worker, drained worker, stopped and resumed coordinator."""
    run = by_hand
    server = str(run.root / "server.toml")
    checked = run.command("aether-coordinator", "check", server)
    assert checked.returncode == 0, checked.stdout + checked.stderr

    # One row at a time and no time to drain, so that it has jobs to hand back when it is stopped.
    run.add_worker("w1", slots=4, more="drain_s = 0\n[transformers]\nbatch_invariant = true\n")
    checked = run.command("aether-worker", "check", str(run.root / "w1.toml"))
    assert "nothing listens at 127.0.0.1:" in checked.stdout and "model         ok" in checked.stdout, checked.stdout
    first = run.start_coordinator()
    run.start_worker("w1")
    run.wait(lambda status: status["step"] >= 1, 180, "the first step")

    # A key that is added while the server runs is good at once; a late worker takes work.
    run.start_worker("w2")
    run.wait(lambda status: run.worker("w2", status)["tokens_per_s"] > 0, 120, "work on the late worker")

    # A stopped worker finishes or hands back what it holds, and says goodbye: no time-out, no lost worker.
    # Frozen with three jobs: they cannot all be finished when the signal arrives. Frozen with fewer it may get no
    # more, for no batch is cut without their group.
    w1 = run.processes["w1"]

    def frozen_at_work(_: dict[str, Any]) -> bool:
        w1.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        if (status := run.status()) and run.worker("w1", status)["running"] >= 3:
            return True
        w1.send_signal(signal.SIGCONT)
        return False

    run.wait(frozen_at_work, 60, "three jobs on the first worker, frozen")
    w1.send_signal(signal.SIGTERM)
    w1.send_signal(signal.SIGCONT)
    assert w1.wait(60) == 0, run.log("w1")
    status = run.wait(lambda status: run.worker("w1", status)["running"] == 0, 20, "no job on the stopped worker")
    assert status["counters"]["jobs_reassigned"] >= 1, status["counters"]
    step = status["step"]
    run.wait(lambda status: status["step"] > step, 120, "a step without the first worker")

    # Stopped in the middle: exit 0, nothing left running but the worker, which waits.
    endpoint = json.loads((run.run_root / "endpoint.json").read_text())
    assert endpoint["pid"] == first.pid
    first.send_signal(signal.SIGINT)
    assert first.wait(90) == 0, run.log("coordinator")
    assert "Traceback" not in run.log("coordinator")
    assert not (run.run_root / "endpoint.json").exists()
    assert not (run.run_root / "nats" / "nats-server.pid").exists()
    assert run.processes["w2"].poll() is None
    asked = run.command("aether-coordinator", "status", server)
    assert asked.returncode == 1 and "no coordinator answers" in asked.stderr

    # Resumed to a nearer end, with the worker that stayed up.
    steps = complete_steps(run.run_root)[-1] + 4
    second = run.start("coordinator", "aether-coordinator", "run", server, "--set", f"steps={steps}")
    run.wait(lambda status: run.worker("w2", status)["state"] == "connected", 120, "the worker that stayed up")
    asked = run.command("aether-coordinator", "status", server, "--json")
    assert asked.returncode == 0, asked.stderr
    shown = json.loads(asked.stdout)
    assert (shown["run"], shown["steps"]) == ("my-run", steps)
    assert second.wait(180) == 0, run.log("coordinator")
    assert run.processes["w2"].poll() is None, run.log("w2")
    assert [step["step"] for step in run.steps()] == list(range(1, steps + 1))
    check_history(run.run_root, steps)
    for version in (0, steps):
        assert [line["task"] for line in evaluation(run.run_root, version)] == [0, 1, 2, 3]
    verified = run.command("aether-coordinator", "verify", str(run.run_root))
    assert verified.returncode == 0, verified.stdout
