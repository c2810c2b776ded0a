"""Every named crash point kills its process once; the run goes on each time, and its invariants hold.

One run is killed at many points in turn. With lag 0, one batch of groups per version, the
batch-invariant engine and fixed threads, the policies are the same as in an undisturbed run.
"""

import json
import time
from pathlib import Path

import pytest
from aether_common import crash
from tiny_model import make_tiny_model
from tiny_run import TinyRun

SYNCHRONOUS = {"groups": 2, "group_size": 4, "max_policy_lag": 0}
STEPS = 6
SAMPLE = (
    "reply.before_ack",
    "batch.before_rename",
    "policy.before_show",
    "checkpoint.before_fsync",
    "worker.before_ack",
)
"""What an ordinary `pytest` tries; tests/chaos alone and CI try all."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def make_run(root: Path, model: Path) -> TinyRun:
    run = TinyRun(root, model, steps=STEPS, batch=SYNCHRONOUS)
    for worker in ("w1", "w2"):
        run.add_worker(worker, transformers={"batch_invariant": True, "threads": 1}, slots=4)
    return run


def keep_alive(run: TinyRun, timeout_s: float) -> int:
    """Restart whatever dies until the coordinator ends well. Returns the number of restarts."""
    restarts = 0
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for name, process in list(run.processes.items()):
            status = process.poll()
            if status is None:
                continue
            if name == "coordinator" and status == 0:
                return restarts
            assert status == -9, f"{name} ended with {status}: {run.log(name)}"
            restarts += 1
            if name == "coordinator":
                run.start_coordinator()
            else:
                run.start_worker(name)
        time.sleep(0.1)
    raise AssertionError(f"not finished in {timeout_s} s: {run.status()}\n{run.log('coordinator')}")


def policy_digests(run: TinyRun) -> list[str]:
    manifests = [run.run_root / "checkpoints" / f"step_{step:06d}" / "manifest.json" for step in range(STEPS + 1)]
    return [json.loads(manifest.read_text())["adapter"] for manifest in manifests]


def finish(run: TinyRun, timeout_s: float) -> int:
    try:
        run.start_coordinator()
        for worker in ("w1", "w2"):
            run.start_worker(worker)
        return keep_alive(run, timeout_s)
    finally:
        run.close()


def test_killed_at_every_point(tmp_path, model, chaos_scope, capsys):
    points = crash.ALL if chaos_scope == "all" else SAMPLE
    undisturbed = make_run(tmp_path / "undisturbed", model)
    assert finish(undisturbed, 180) == 0

    run = make_run(tmp_path / "killed", model)
    reached = tmp_path / "reached"
    reached.mkdir()
    run.environment |= {"AETHER_CRASH_POINTS": ",".join(points), "AETHER_CRASH_DIR": str(reached)}
    finish(run, 120 + 30 * len(points))

    killed = {path.name for path in reached.iterdir()}
    with capsys.disabled():
        print(f"\ncrash points: {', '.join(points)}\nkilled at {len(killed)} of {len(points)}")
    assert killed == set(points), f"never reached: {sorted(set(points) - killed)}"
    verified = run.command("aether-coordinator", "verify", str(run.run_root))
    assert verified.returncode == 0, verified.stdout
    assert policy_digests(run) == policy_digests(undisturbed)
