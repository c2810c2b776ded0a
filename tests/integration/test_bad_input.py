"""What a user can get wrong: one clear message, the exit code of its kind, no traceback, and a run that goes on."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aether_common.bus import Bus
from aether_common.files import FileLock, disk_error
from aether_common.names import Names
from aether_common.wire import Reply, ReplyKind
from aether_coordinator.ledger import Ledger
from aether_coordinator.opening import open_run
from aether_coordinator.settings import ServerSettings
from tiny_model import make_tiny_model
from tiny_run import TinyRun

SOURCE = {"name": "train", "taskset": "aether_lowercase", "sampling": {"max_tokens": 12}}

DISK = disk_error(OSError(errno.ENOSPC, ""), Path("file")).exit_code


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[TinyRun]:
    run = TinyRun(tmp_path / "tiny", tiny_model)
    try:
        yield run
    finally:
        run.close()


def refusal(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The message of a command that was refused with `code`: the first thing it says, and no traceback."""
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    message = done.stderr.strip()
    assert message.startswith(("error: ", "aether-worker: ")), message
    return message


def start(run: TinyRun, code: int, *settings: str) -> str:
    """The message of `aether-coordinator run`, which must refuse to start, quickly enough to be tried again."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    return refusal(run.command("aether-coordinator", "run", str(run.root / "server.toml"), *overrides), code)


def settings_of(run: TinyRun) -> ServerSettings:
    return ServerSettings.load(run.root / "server.toml")


def began(run: TinyRun) -> None:
    """Leave the state of a run that began."""
    ledger = Ledger(run.run_root / "state")
    open_run(ledger, settings_of(run))
    ledger.close()


# ---- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stepz=3", "--set stepz=3: unknown key stepz: known here are "),
        ("batch.group_sise=3", "unknown key batch.group_sise: known here are "),
        ("steps=many", "--set steps=many: steps = 'many': "),
        ("steps=0", "--set steps=0: steps = 0: "),
        ("run=My Run", "run = 'My Run': run 'My Run': use 1 to 40 lower-case letters, digits and hyphens"),
        ("nonsense", "--set nonsense: write it as --set key.path=value"),
        ("steps.more=1", "steps is a value or a list, not a table"),
        ("trainer.config=none.toml", "none.toml: no such file"),
        ("nats.url=nats://example.org:4222", "unencrypted connections are accepted to loopback only: use tls"),
        ("base_model.revision=main", "revision 'main' pins nothing: give the full 40-hex commit"),
    ],
)
def test_settings(run: TinyRun, setting: str, message: str) -> None:
    assert message in start(run, 2, setting)


def test_environment_and_file_are_named(run: TinyRun) -> None:
    run.environment["AETHER_SERVER_BATCH__GROUPS"] = "no"
    run.start_coordinator().wait(60)
    assert run.processes["coordinator"].returncode == 2
    assert "environment variable AETHER_SERVER_BATCH__GROUPS: batch.groups = 'no'" in run.log("coordinator")
    for text, message in (("steps =", "not valid TOML"), ('run = "tiny"', "key steps is missing: add it")):
        (run.root / "server.toml").write_text(text)
        assert f"{run.root / 'server.toml'}: {message}" in start(run, 2)
    (run.root / "server.toml").unlink()
    assert "server.toml: no such file: write one with `aether-coordinator init" in start(run, 2)


def test_the_templates_of_init_say_what_to_fill_in(run: TinyRun) -> None:
    directory = run.root / "new"
    assert run.command("aether-coordinator", "init", str(directory)).returncode == 0
    for command in ("check", "run"):
        message = refusal(run.command("aether-coordinator", command, str(directory / "server.toml")), 2)
        assert "base_model: not filled in: replace the table by what `aether-coordinator identity" in message
    checked = run.command("aether-worker", "check", str(directory / "worker.toml"))
    assert checked.returncode != 0 and "give the full 40-hex commit" in checked.stdout
    again = run.command("aether-coordinator", "init", str(directory))
    assert "server.toml exists: choose another directory" in refusal(again, 2)
    in_the_way = run.command("aether-coordinator", "init", str(directory / "server.toml"))
    assert "a file is in the way" in refusal(in_the_way, DISK)


def test_trainer_settings(run: TinyRun) -> None:
    file = run.root / "trainer.toml"
    file.write_text(file.read_text() + "\n[optimiser]\nlearning_rate = 1\n")
    message = start(run, 2)
    assert "the trainer refuses its settings" in message and f"{file}: unknown key optimiser" in message


def test_a_killed_check_of_the_trainer_is_repeated(run: TinyRun) -> None:
    """A start does not take a kill -9 for bad settings (found by the random chaos)."""
    python = run.root / "python"
    kills = run.root / "kills"
    python.write_text(
        f'#!/bin/sh\nkills=$(cat {kills})\necho $((kills - 1)) > {kills}\n[ "$kills" -gt 0 ] && kill -9 $$\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    check = ("aether-coordinator", "check", str(run.root / "server.toml"), "--set", f"trainer.python={python}")
    kills.write_text("2")
    done = run.command(*check)
    assert done.returncode == 0, done.stdout + done.stderr
    kills.write_text("3")
    done = run.command(*check)
    assert done.returncode == 2 and "was killed 3 times while it read its settings (signal 9)" in done.stdout


def test_debug_shows_the_traceback(run: TinyRun) -> None:
    done = run.command("aether-coordinator", "run", str(run.root / "server.toml"), "--set", "steps=0", "--debug")
    assert done.returncode != 0 and "Traceback" in done.stderr and "steps = 0" in done.stderr


# ---- models and tasksets -------------------------------------------------------------------------------


def test_models_that_do_not_exist(run: TinyRun) -> None:
    assert "model '/nowhere': no config.json in /nowhere" in start(run, 3, "model=/nowhere")
    assert "model 'org/none' is no directory here, so it is taken from the hub" in start(run, 3, "model=org/none")
    named = run.command("aether-coordinator", "identity", "/nowhere", "--renderer", "default")
    assert "no config.json" in refusal(named, 3)


def test_tasksets_that_do_not_import(tmp_path: Path, tiny_model: Path) -> None:
    missing = TinyRun(tmp_path / "a", tiny_model, train=[{**SOURCE, "taskset": "no-such-tasks"}])
    assert "source 'train': taskset 'no-such-tasks' cannot be loaded: there is no module" in start(missing, 9)
    # Found, but no taskset: verifiers itself says so.
    wrong = TinyRun(tmp_path / "b", tiny_model, train=[{**SOURCE, "taskset": "tiny_run"}])
    message = start_with_log(wrong, 9)
    assert "source 'train': taskset 'tiny_run' cannot be loaded: AttributeError" in message


def start_with_log(run: TinyRun, code: int) -> str:
    """Like `start`, for a refusal that comes after the first log lines."""
    done = run.command("aether-coordinator", "run", str(run.root / "server.toml"))
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


# ---- run directories, ports, disks ---------------------------------------------------------------------


def test_run_directories(run: TinyRun) -> None:
    began(run)
    assert f"{run.run_root} belongs to run 'tiny', not 'other': choose another run_root" in start(run, 4, "run=other")
    changed = start(run, 2, "seed=7")
    assert "seed was 0 when run 'tiny' began and is 7 now: put it back (these may change on resume: " in changed
    checked = run.command("aether-coordinator", "check", str(run.root / "server.toml"), "--set", "max_model_len=300")
    assert checked.returncode == 2 and "max_model_len was 256 when run 'tiny' began" in checked.stdout
    lock = FileLock(run.run_root / "coordinator.lock", "test")
    message = start(run, 4)
    lock.release()
    assert f"another coordinator runs on {run.run_root}: stop it first" in message
    assert f"held by pid {os.getpid()}" in message


def test_ports_in_use(run: TinyRun) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for setting in ("nats.port", "nats.websocket_port"):
            assert f"port {port} on 127.0.0.1 is in use by another process" in start(run, 5, f"{setting}={port}")
        for setting in ("gateway.port", "control.port"):
            assert f"{setting} = {port}: the port is in use" in start(run, 2, f"{setting}={port}")


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of 8 MB of our own; skips where it cannot be mounted."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_disk(run: TinyRun) -> None:
    with small_disk(run.root / "disk") as disk:
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(4096))
        assert "the disk is full: free space and start again" in start(run, DISK, f"run_root={disk / 'run'}")


def test_a_read_only_disk(run: TinyRun) -> None:
    with small_disk(run.root / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        root = disk / "run"
        assert f"cannot write {root}" in (message := start(run, DISK, f"run_root={root}"))
        assert "the file system is read-only: remount it writable or choose another run_root" in message
        checked = run.command("aether-coordinator", "check", str(run.root / "server.toml"), "--set", f"run_root={root}")
        assert checked.returncode == 4 and "is not writable" in checked.stdout
        added = run.command("aether-coordinator", "init", str(disk / "new"))
        assert "the file system is read-only" in refusal(added, DISK)


# ---- workers -------------------------------------------------------------------------------------------


def worker(run: TinyRun, code: int, *settings: str) -> str:
    overrides = [part for setting in settings for part in ("--set", setting)]
    return refusal(run.command("aether-worker", "run", str(run.root / "w1.toml"), *overrides), code)


def test_workers(run: TinyRun) -> None:
    run.add_worker("w1", engine="null")
    refused = run.command("aether-coordinator", "worker", "add", "w1", "--config", str(run.root / "server.toml"))
    assert "worker 'w1' has a key already" in refusal(refused, 2)
    refused = run.command("aether-coordinator", "worker", "add", "W 2", "--config", str(run.root / "server.toml"))
    assert "worker name 'W 2': use 1 to 64 lower-case letters" in refusal(refused, 2)
    assert "no such key file" in worker(run, 2, "key_file=none.nk")
    seed = (run.run_root / "workers" / "w1.nk").read_text().strip()
    message = worker(run, 2, f"key_file={seed}")
    assert seed not in message and "write the seed to a file" in message
    assert "no config.json in /nowhere" in worker(run, 3, "model=/nowhere")
    assert "state_dir = " in worker(run, 2, f"state_dir={run.root / 'w1.toml'}")


# ---- a run that goes on --------------------------------------------------------------------------------


def test_a_live_run_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    """Messages that are none, a reply for an unknown job, another base model, a second coordinator; no secret told."""
    run = TinyRun(tmp_path / "tiny", tiny_model, steps=1, eval=[], log_level="DEBUG")
    try:
        run.add_worker("w1", engine="null", log_level="DEBUG")
        coordinator = run.start_coordinator()
        before = run.wait(lambda status: status["policy_version"] >= 0, 180, "policy 0")["counters"]
        known = secrets_of(run, coordinator.pid)

        assert "another coordinator runs on" in start(run, 4)

        other = make_tiny_model(tmp_path / "other", seed=1)
        run.add_worker("w2", engine="null", model=str(other))
        foreign = run.command("aether-worker", "run", str(run.root / "w2.toml"))
        assert foreign.returncode == 3 and "Traceback" not in foreign.stderr, foreign.stderr
        assert "the coordinator refuses worker w2: " in foreign.stderr and "weights: the run has" in foreign.stderr
        status = run.wait(lambda status: any(entry["name"] == "w2" for entry in status["workers"]), 30, "the refusal")
        (shown,) = (entry for entry in status["workers"] if entry["name"] == "w2")
        assert shown["state"] == "incompatible" and "weights" in shown["reason"]

        send_nonsense(run)
        counted = run.wait(
            lambda status: (
                status["counters"]["messages_bad"] >= before["messages_bad"] + 2
                and status["counters"]["replies_duplicate"] > before["replies_duplicate"]
            ),
            30,
            "the bad messages in the counters",
        )
        assert counted["state"] == "running"
        outputs = [
            foreign.stderr,
            json.dumps(counted),
            run.command("aether-coordinator", "status", str(run.run_root)).stdout,
        ]

        run.start_worker("w1")
        assert coordinator.wait(180) == 0, run.log("coordinator")
        assert [step["step"] for step in run.steps()] == [1]
        run.close()
        assert known
        for name, secret in known.items():
            assert not any(secret in output for output in outputs), f"{name} is shown"
            assert not (found := files_with(secret, run.root)), f"{name} is in {found}"
    finally:
        run.close()


def send_nonsense(run: TinyRun) -> None:
    """As worker w1: a reply and a heartbeat that are no msgpack, and a reply for a job that nobody knows."""
    import asyncio

    async def send() -> None:
        names = Names("tiny")
        seed = (run.run_root / "workers" / "w1.nk").read_text().strip()
        url = json.loads((run.run_root / "endpoint.json").read_text())["websocket_url"]
        bus = Bus(url, seed, names.inbox("w1"), "w1")
        await bus.connect()
        try:
            await bus.client.publish(names.fleet("hb", "w1"), b"\xc1 no msgpack")
            await bus.request(names.reply("w1", "job-1"), b"\xc1 no msgpack", timeout_s=5)
            reply = Reply(job="job-2", dispatch=0, worker="w1", incarnation="x", kind=ReplyKind.OK)
            await bus.request(names.reply("w1", "job-2"), reply.encode(), timeout_s=5)
        finally:
            await bus.close()

    asyncio.run(send())


def secrets_of(run: TinyRun, coordinator: int) -> dict[str, str]:
    """Every secret of the run by name; the gateway's is in the coordinator's memory alone."""
    found = {path.name: path.read_text().strip() for path in run.run_root.rglob("*.nk")}
    found["control token"] = json.loads((run.run_root / "endpoint.json").read_text())["token"]
    children = Path(f"/proc/{coordinator}/task/{coordinator}/children").read_text().split()
    assert children
    for child in children:
        assert b"AETHER_GATEWAY_API_KEY" not in Path(f"/proc/{child}/environ").read_bytes()
    if match := re.search(rb"AETHER_GATEWAY_API_KEY=([\w-]{43})\0", heap_of(coordinator)):
        found["gateway secret"] = match.group(1).decode()
    assert {"coordinator.nk", "w1.nk", "gateway secret"} <= set(found)
    return found


def heap_of(process: int) -> bytes:
    """Where the C library keeps the variables that a process sets for itself."""
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    start, end = (int(text, 16) for text in next(line for line in maps if "[heap]" in line).split()[0].split("-"))
    with Path(f"/proc/{process}/mem").open("rb") as memory:
        memory.seek(start)
        return memory.read(end - start)


def files_with(secret: str, root: Path) -> list[Path]:
    """Files other than key files (readable by their owner only) that contain the secret."""
    holders = [path for path in root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    for path in holders:
        assert path.suffix != ".nk" or path.stat().st_mode & 0o077 == 0, f"{path} is readable by others"
    return [path for path in holders if path.suffix != ".nk"]
