"""A whole run whose worker serves with real vLLM."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from requirements import VLLM_PYTHON
from tiny_run import TinyRun
from vllm_reference import processes

VLLM = {"python": str(VLLM_PYTHON), "extra_args": ["--enforce-eager"], "max_lora_rank": 8}


@pytest.fixture
def run(tmp_path: Path, vllm_model: Path) -> Iterator[TinyRun]:
    run = TinyRun(tmp_path, vllm_model, steps=3)
    try:
        yield run
    finally:
        run.close()


def test_killed_in_the_middle(run: TinyRun) -> None:
    """vLLM dies under load: its jobs go back, it is started again, the run finishes. Then the worker is killed."""
    run.start_coordinator()
    run.start_worker("w1", engine="vllm", slots=16, vllm=VLLM)
    run.wait(lambda status: status["step"] >= 1 and status["workers"][0]["running"] > 0, 240, "the first step")
    before = processes(str(run.model))
    (server,) = (pid for pid, command in before.items() if "guard" not in command and "api_server" in command)
    os.kill(server, signal.SIGKILL)
    status = run.wait(
        lambda status: status["workers"][0]["state"] != "connected" or status["counters"]["jobs_returned"],
        30,
        "jobs handed back",
    )
    assert status["step"] < 3
    run.finish(300)
    verified = run.command("aether-coordinator", "verify", str(run.run_root))
    assert verified.returncode == 0, verified.stdout
    after = processes(str(run.model))
    assert after and not set(before) & set(after)
    run.processes["w1"].kill()
    run.processes["w1"].wait()
    deadline = time.monotonic() + 30
    while left := processes(str(run.model)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
