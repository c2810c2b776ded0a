"""One run, and what happens to it: stores deleted, disks full, a hung trainer, a rival, pause and resume, SIGTERM.

The tests share the run and go on from where the one before left it; each ends with further steps. A quarter
of the tasks is slow, so there is always something running.
"""

import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from aether_common.checkpoint import complete_steps
from aether_coordinator.verify import RunDirectory
from chaos.faults import BALLAST, Attacked, empty_directory, fill_disk
from chaos.test_random_chaos import SLOW, check
from tiny_run import TinyRun, toml

STALL_S = 30
STEPS_S = 120.0
"""How long two further steps may take on a busy machine."""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, chaos_scope: str) -> Iterator[Attacked]:
    if chaos_scope != "all":
        pytest.skip("a part of the whole chaos suite: pytest tests/chaos")
    root = tmp_path_factory.mktemp("supervised")
    with Attacked(
        root,
        tiny_model,
        workers=1,
        steps=100_000,
        train=[SLOW],
        batch={"groups": 2, "group_size": 4},
        retention={"keep_steps": "none"},
        trainer={"config": str(root / "trainer.toml"), "stall_s": STALL_S},
        episodes={"drain_s": 1},
        watchdog={"after_s": 10},
    ) as run:
        run.wait_for(lambda status: status["step"] >= 1, 180, "the first step")
        yield run


def log_since(run: Attacked, position: int) -> str:
    with (run.run.root / "coordinator.log").open() as file:
        file.seek(position)
        return file.read()


def position(run: Attacked) -> int:
    return (run.run.root / "coordinator.log").stat().st_size


@pytest.mark.parametrize("running", [False, True], ids=["server-killed", "server-running"])
def test_the_store_is_deleted(attacked: Attacked, running: bool) -> None:
    before = attacked.pid("nats-server")
    assert attacked.delete_store(running=running)
    attacked.wait_for(lambda _: attacked.pid("nats-server") not in (None, before), 60, "another nats-server")
    attacked.wait_for_steps(2, STEPS_S)


def test_the_disk_of_the_run_is_full(attacked: Attacked) -> None:
    if attacked.no_disks:
        pytest.skip(attacked.no_disks)
    since = position(attacked)
    file = attacked.run_root / BALLAST
    try:
        fill_disk(file)
        attacked.wait_for(lambda _: "the disk is full" in log_since(attacked, since), 30, "a message")
        # A server that dies meanwhile comes back, though not even its pid can be written.
        assert attacked.kill("nats-server")
        attacked.rest(6)
        stopped = attacked.step()
        told = attacked.wait_for(lambda status: status["waits_for"], 30, "the watchdog")["waits_for"]
        assert told[0].startswith("disk: ")
        assert attacked.step() <= stopped + 1
    finally:
        file.unlink()
    attacked.wait_for_steps(2, STEPS_S)


def test_the_disk_of_the_store_is_full(attacked: Attacked) -> None:
    """Longer than until the server is looked at and restarted, in vain; it is looked at again."""
    if attacked.no_disks:
        pytest.skip(attacked.no_disks)
    attacked.fill(attacked.store, 15)
    attacked.wait_for_steps(2, STEPS_S)


def test_a_trainer_that_hangs(attacked: Attacked) -> None:
    since, pid = position(attacked), attacked.pid("trainer")
    assert attacked.signal("trainer", signal.SIGSTOP)
    attacked.wait_for(lambda _: attacked.pid("trainer") not in (None, pid), STALL_S + 60, "another trainer")
    assert f"the trainer hangs (no progress for {STALL_S} s)" in log_since(attacked, since)
    attacked.wait_for_steps(2, STEPS_S)


def test_pause_and_resume(attacked: Attacked) -> None:
    run = attacked.run
    assert run.command("aether-coordinator", "pause", str(attacked.run_root)).returncode == 0
    idle = attacked.wait_for(
        lambda status: status["state"] == "paused" and not status["episodes_running"], 30, "a paused run"
    )
    assert idle["groups_open"] == 0
    attacked.rest(5)
    status = run.status()
    assert status is not None
    assert status["counters"]["episodes_accepted"] == idle["counters"]["episodes_accepted"]
    # A restart does not forget it.
    attacked.kill("coordinator")
    attacked.wait_for(lambda status: status["state"] == "paused", 60, "a paused run again")
    assert run.command("aether-coordinator", "resume", str(attacked.run_root)).returncode == 0
    attacked.wait_for_steps(2, STEPS_S)


def test_a_second_coordinator_is_refused(attacked: Attacked, tmp_path: Path) -> None:
    """By the lock on the same directory, by the bus on a copy of it."""
    second = attacked.run.command("aether-coordinator", "run", str(attacked.run.root / "server.toml"))
    assert second.returncode == 4
    assert f"another coordinator runs on {attacked.run_root}: stop it first" in second.stderr

    copy = tmp_path / "run"
    copy_run(attacked.run_root, copy)
    ports = json.loads((attacked.run_root / "nats" / "ports.json").read_text())
    key = attacked.run_root / "nats" / "coordinator.nk"
    text = (attacked.run.root / "server.toml").read_text().replace(toml(str(attacked.run_root)), toml(str(copy)))
    nats = {"url": f"nats://127.0.0.1:{ports['port']}", "key_file": str(key)}
    (tmp_path / "server.toml").write_text(text + f"nats = {toml(nats)}\n")
    second = attacked.run.command("aether-coordinator", "run", str(tmp_path / "server.toml"))
    assert second.returncode == 4
    pid = attacked.run.processes["coordinator"].pid
    assert f"another coordinator of run 'tiny' (pid {pid}) answers on the bus" in second.stderr
    attacked.wait_for_steps(1, STEPS_S)


def test_a_bus_newer_and_a_bus_older_than_the_run_directory(attacked: Attacked, tmp_path: Path) -> None:
    """Restored from a backup: reported, the run goes on from the directory, and nothing of the bus is adopted."""
    root, parts = attacked.run_root, ("state", "batches", "checkpoints", "traces", "metrics", "evals")
    end_coordinator(attacked)
    for part in (*parts, "nats/jetstream"):
        if (root / part).is_dir():
            shutil.copytree(root / part, tmp_path / part)
    older = max(complete_steps(root))
    newer = attacked.wait_for_steps(3, STEPS_S)

    end_coordinator(attacked)
    for part in parts:
        shutil.rmtree(root / part, ignore_errors=True)
        if (tmp_path / part).is_dir():
            shutil.copytree(tmp_path / part, root / part)
    since = position(attacked)
    attacked.wait_for(lambda status: status["step"] > newer, STEPS_S, "further steps")
    # The newest checkpoint may have been complete without its policy being active.
    reported = re.search(r"this run directory ends at (\d+): older than the bus", log_since(attacked, since))
    assert reported and int(reported[1]) in (older - 1, older)

    end_coordinator(attacked)
    empty_directory(attacked.store)
    shutil.copytree(tmp_path / "nats" / "jetstream", attacked.store, dirs_exist_ok=True)
    attacked.wait_for_steps(2, STEPS_S)


def end_coordinator(attacked: Attacked) -> None:
    """kill -9, and wait until its nats-server and trainer are gone, too."""
    children = [pid for part in ("nats-server", "trainer") if (pid := attacked.pid(part)) is not None]
    process = attacked.run.processes["coordinator"]
    process.kill()
    process.wait(10)
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        time.sleep(0.05)


def test_sigterm_while_the_disk_is_full(attacked: Attacked) -> None:
    """Bounded, and not quiet about what could not be written; the next start goes on."""
    if attacked.no_disks:
        pytest.skip(attacked.no_disks)
    process, since = attacked.run.processes["coordinator"], position(attacked)
    file = attacked.run_root / BALLAST
    try:
        fill_disk(file)
        attacked.wait_for(lambda _: "the disk is full" in log_since(attacked, since), 30, "a message")
        process.terminate()
        assert process.wait(60) == 12
    finally:
        file.unlink()
    assert "the disk" in log_since(attacked, since).splitlines()[-1]
    attacked.run.start_coordinator()
    attacked.wait_for_steps(2, STEPS_S)


def test_sigterm_drains(attacked: Attacked) -> None:
    """The last test of the shared run: episodes are running, the stop is bounded, and everything is right."""
    attacked.wait_for(lambda status: status["episodes_running"] > 0, 60, "running episodes")
    assert attacked.stop(40) < 30
    counters = json.loads((attacked.run_root / "status.json").read_text())["counters"]
    assert counters["tokens_dropped"] <= 0.02 * counters["tokens_generated"]
    check(attacked.run_root)
    directory = RunDirectory(attacked.run_root)
    try:
        batched = [group.task for group in directory.groups.values() if group.state == "batched"]
    finally:
        directory.close()
    slow = sum(task % 4 == 0 for task in batched) / len(batched)
    assert 0.15 <= slow <= 0.35, f"{slow:.2f} of {len(batched)} groups are of the slow quarter of the tasks"


def copy_run(source: Path, target: Path) -> None:
    """A consistent copy of a run directory that is in use, without its nats-server and its lock."""
    state = target / "state"
    state.mkdir(parents=True)
    with lmdb.open(str(source / "state"), readonly=True, max_dbs=16) as environment:
        environment.copy(str(state))
    for part in ("checkpoints", "batches", "traces", "metrics", "evals"):
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, ignore=shutil.ignore_patterns(".tmp-*", ".lock"))
    # Files may be newer than the state, never older: those that it does not know are left out.
    with lmdb.open(str(state), readonly=True, max_dbs=16) as environment:
        batches = environment.open_db(b"batches", create=False)
        with environment.begin() as transaction:
            count = transaction.stat(batches)["entries"]
    for path in (target / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > count:
            shutil.rmtree(path)
    for path in (target / "batches").iterdir():
        if int(path.stem.removeprefix("step_")) > count:
            path.unlink()


def test_a_trainer_that_always_dies(tmp_path: Path, tiny_model: Path) -> None:
    """A crash loop is recognised: two restarts with backoff, then a clear stop."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *--check*) exec {sys.executable} "$@";; esac\necho "no GPU today" >&2\nexit 1\n'
    )
    python.chmod(0o755)
    trainer = {"config": str(tmp_path / "trainer.toml"), "python": str(python), "max_restarts": 2}
    run = TinyRun(tmp_path, tiny_model, trainer=trainer)
    began = time.monotonic()
    done = run.command("aether-coordinator", "run", str(tmp_path / "server.toml"))
    assert done.returncode == 7
    assert (
        "the trainer ended 3 times without a new checkpoint, the last time with status 1: no GPU today" in done.stderr
    )
    assert time.monotonic() - began >= 1 + 2
