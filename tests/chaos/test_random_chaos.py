"""Random chaos: for a bounded time anything may die, hang, fill up or vanish; then everything must be right."""

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

from aether_coordinator.records import TurnRecord
from aether_coordinator.verify import RunDirectory, verify
from chaos.faults import Attacked

SECONDS = {"sample": 20, "all": 120}
SETTLE_S = 150.0
SLOW = {
    "name": "train",
    "taskset": "aether_lowercase",
    "taskset_args": {"slow_every": 4, "slow_s": 2.0},
    "sampling": {"temperature": 1.0, "max_tokens": 12},
}
"""A quarter of the tasks is slow, so there is always an episode that runs."""


def test_random_chaos(tmp_path, tiny_model, chaos_scope, capsys):
    seconds = float(os.environ.get("AETHER_CHAOS_SECONDS", SECONDS[chaos_scope]))
    seed = int(os.environ.get("AETHER_CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
    with capsys.disabled():

        def say(text: str) -> None:
            print(f"  {text}", flush=True)

        print(f"\nrandom chaos for {seconds:.0f} s; again with AETHER_CHAOS_SEED={seed}", flush=True)
        run_chaos(tmp_path, tiny_model, seconds, seed, say)


def run_chaos(root: Path, model: Path, seconds: float, seed: int, say) -> None:
    with Attacked(
        root,
        model,
        seed=seed,
        say=say,
        longest_s=35.0 if seconds >= 100 else 4.0,
        steps=100_000,
        batch={"groups": 2, "group_size": 4},
        train=[SLOW],
        retention={"keep_steps": "none" if seed % 2 else 20},
        trainer={"config": str(root / "trainer.toml"), "stall_s": 120},
        episodes={"drain_s": 3},
    ) as attacked:
        attacked.wait_for(lambda status: status["step"] >= 1, 180, "the first step")
        ends = time.monotonic() + seconds
        before = attacked.step()
        try:
            while time.monotonic() < ends:
                attacked.strike()
                if attacked.random.random() < 0.35:
                    attacked.wait_for_steps(1, SETTLE_S)
            settled = attacked.wait_for_steps(3, SETTLE_S)
        except AssertionError:
            say(f"seed {seed}: failed at step {attacked.step()} after {dict(attacked.done)}")
            raise
        assert settled >= before + 3
        took = attacked.stop(60)
        say(f"stopped in {took:.1f} s")
        report(attacked, seed, say)
        check(attacked.run_root)


def report(attacked: Attacked, seed: int, say) -> None:
    status = json.loads((attacked.run_root / "status.json").read_text())
    counters = status["counters"]
    kills = ", ".join(f"{kind} {count}" for kind, count in sorted(attacked.done.items()))
    dropped = counters["tokens_dropped"] / max(1, counters["tokens_generated"])
    say(f"seed {seed}: {status['step']} steps; {sum(attacked.done.values())} faults: {kills}")
    say(
        f"replies {counters['replies']}, duplicate {counters['replies_duplicate']}, "
        f"refused {counters['replies_refused']}, turns replayed {counters['turns_replayed']}, "
        f"jobs reassigned {counters['jobs_reassigned']}"
    )
    say(
        f"tokens generated {counters['tokens_generated']}, trained {counters['tokens_trained']}, "
        f"dropped {counters['tokens_dropped']} ({dropped:.1%})"
    )


def check(run_root: Path) -> None:
    """The invariants of the run directory, steps without a gap, and no reply taken twice."""
    wrong = [finding for finding in verify(run_root) if finding.violations]
    assert not wrong, wrong
    lines = (run_root / "metrics" / "steps.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1))
    directory = RunDirectory(run_root)
    try:
        answers = [TurnRecord.decode(value) for _, value in directory.ledger.scan("journal")]
    finally:
        directory.close()
    twice = [reply for reply, count in Counter(answer.reply for answer in answers).items() if count > 1]
    assert not twice
