"""`python -m aether_trainer` as the coordinator runs it: pipe, lock, exit codes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from aether_common.batch import Batch
from aether_common.checkpoint import complete_steps, verify_adapter
from aether_common.pipe import BatchReady, CheckpointWritten, Failed, Progress, Ready, Stop, decode_from_trainer


@pytest.fixture
def start(tmp_path: Path, tiny: Path):
    """Starts trainers on one run directory; kills what is left at the end."""
    (tmp_path / "trainer.toml").write_text(
        f'[model]\npath = "{tiny}"\ndtype = "float32"\n'
        '[lora]\nserving_dtype = "float32"\n[compute]\ndevice = "cpu"\nmicro_batch_tokens = 256\n'
    )
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "aether_trainer", str(tmp_path / "trainer.toml")]
        command += ["--run-root", str(tmp_path / "run"), "--run", "demo", "--renderer", "default", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def read(process: subprocess.Popen[bytes], kind: type) -> object:
    """The next message of a kind; everything on the way must be a message too."""
    assert process.stdout is not None
    for line in process.stdout:
        message = decode_from_trainer(line)
        assert message is not None, line
        if isinstance(message, kind):
            return message
    assert process.stderr is not None
    raise AssertionError(f"no {kind.__name__}: {process.stderr.read().decode()}")


def failure(process: subprocess.Popen[bytes]) -> tuple[Failed, str]:
    """The reason that a trainer gives, and its stderr; stdin stays open until it is gone."""
    message = read(process, Failed)
    assert isinstance(message, Failed) and process.stderr is not None
    process.wait(30)
    return message, process.stderr.read().decode()


def send(process: subprocess.Popen[bytes], message: BatchReady | Stop) -> None:
    assert process.stdin is not None
    process.stdin.write(message.encode())
    process.stdin.flush()


def test_two_batches_a_lost_coordinator_and_a_stop(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]], write_batch: Callable[..., Batch]
):
    run_root = tmp_path / "run"
    write_batch(run_root, 1)
    first = start()
    ready = read(first, Ready)
    assert isinstance(ready, Ready) and ready.step == 0 and ready.identity.renderer == "default"
    done = read(first, CheckpointWritten)
    assert isinstance(done, CheckpointWritten) and done.step == 1 and done.metrics["tokens_sampled"] == 90

    second = start()
    failed, errors = failure(second)
    assert second.returncode == 4
    assert f"held by pid {first.pid}" in failed.message and failed.message in errors
    assert "Traceback" not in errors

    # The coordinator dies in the middle of a step: the trainer leaves, the checkpoint is not written.
    write_batch(run_root, 2, groups=40, size=8, length=40)
    send(first, BatchReady(step=2))
    progress = read(first, Progress)
    assert isinstance(progress, Progress) and progress.step == 2 and progress.share < 0.5
    assert first.stdin is not None
    first.stdin.close()
    assert first.wait(30) == 0
    assert complete_steps(run_root) == [0, 1]

    # The next one trains the same batch, and Stop in the middle of the step lets it finish.
    third = start()
    ready = read(third, Ready)
    assert isinstance(ready, Ready) and ready.step == 1
    read(third, Progress)
    write_batch(run_root, 3)
    send(third, Stop())
    done = read(third, CheckpointWritten)
    assert isinstance(done, CheckpointWritten) and done.step == 2
    assert third.wait(30) == 0
    assert complete_steps(run_root) == [0, 1, 2]
    verify_adapter(run_root, 2)
    assert (run_root / "logs" / "trainer.jsonl").is_file()


def test_settings_errors_are_one_message(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path):
    process = start("--set", "lora.rank=0", "--set", "loss.clip=0.2")
    failed, errors = failure(process)
    assert process.returncode == 2
    assert "--set lora.rank=0: lora.rank = 0: " in failed.message
    assert "--set loss.clip=0.2: unknown key loss.clip: known here are clip_high, clip_low" in failed.message
    assert errors == f"aether-trainer: {failed.message}\n"
    assert not (tmp_path / "run").exists()
