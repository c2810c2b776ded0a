"""The demo as a process, with stand-ins for the two programs that it starts."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aether_common.errors import ConfigError
from aether_coordinator.demo import last_status, read_status, run_demo
from aether_coordinator.status import RunStatus
from tiny_model import make_tiny_model

COORDINATOR = """
import http.server, json, os, pathlib, sys, threading, time, tomllib
if sys.argv[1:3] == ["worker", "add"]:
    name, config = sys.argv[3], pathlib.Path(sys.argv[5])
    key = config.parent / "workers" / f"{name}.nk"
    key.parent.mkdir(exist_ok=True)
    key.write_text("SU")
    sys.exit()
config = pathlib.Path(sys.argv[2])
root, mode = config.parent, os.environ["MODE"]
steps = tomllib.loads(config.read_text())["steps"]
if mode == "broken":
    print("first line")
    print("error: the disk is full", file=sys.stderr)
    sys.exit(4)
status = {"run": "demo", "run_uuid": "u", "state": "running", "steps": steps, "step": 1, "policy_version": 1,
          "started_s": time.time(), "counters": {"tokens_generated": 10, "tokens_trained": 6}}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(status).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
(root / "endpoint.json").write_text(json.dumps(
    {"pid": os.getpid(), "status_url": f"http://127.0.0.1:{server.server_port}/status", "websocket_url": None}))
time.sleep(1.5 if mode == "finish" else 60)
def write(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\\n" for line in lines))
write(root / "metrics" / "steps.jsonl", [
    {"step": n, "reward": n / 10, "finished_s": status["started_s"] + n} for n in range(1, steps + 1)
])
for source in ("held_out", "held_out_greedy"):
    for version in (0, steps):
        write(root / "evals" / source / f"policy_{version:06d}.jsonl", [
            {"task": task, "task_name": "t", "index": 0, "prompt": "last: a b", "tokens": 2,
             "reward": float(version > 0 or task == 0), "completion": "b" if version else "c"} for task in range(4)
        ])
"""
WORKER = """
import os, sys, time
if os.environ["MODE"] == "worker":
    print("error: the key is revoked")
    sys.exit(6)
time.sleep(60)
"""
DEMO = """
import sys
from pathlib import Path
from aether_common.errors import AetherError
from aether_coordinator import demo
demo.program = lambda name: str(Path(sys.argv[1]) / name)
try:
    sys.exit(demo.run_demo(steps=int(sys.argv[3]), run_root=Path(sys.argv[2]), json_output=True, model=sys.argv[4]))
except AetherError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    directory = tmp_path / "programs"
    directory.mkdir()
    for name, text in (("aether-coordinator", COORDINATOR), ("aether-worker", WORKER)):
        (directory / name).write_text(f"#!{sys.executable}\n{text}")
        (directory / name).chmod(stat.S_IRWXU)
    return directory


def start(programs: Path, model: Path, mode: str, steps: int = 4) -> subprocess.Popen[str]:
    arguments = [str(programs), str(programs.parent / "run"), str(steps), str(model)]
    return subprocess.Popen(
        [sys.executable, "-c", DEMO, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MODE": mode},
    )


def started_by(programs: Path) -> list[str]:
    """Command lines of processes that still run one of the programs."""
    lines: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if f"{programs}/aether" in line:
            lines.append(line)
    return lines


def test_stdout_is_one_json_object_and_nothing_is_left(programs: Path, model: Path) -> None:
    out, err = (process := start(programs, model, "finish")).communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count("\n") == 1
    found = json.loads(out)
    assert (found["steps"], found["eval_before"], found["eval_after"]) == (4, 0.25, 1.0)
    assert (found["reward_first"], found["reward_last"]) == (pytest.approx(0.2), pytest.approx(0.3))
    assert found["seconds"] == pytest.approx(4.0)
    assert (found["tokens_generated"], found["tokens_trained"], found["state"]) == (10, 6, "finished")
    assert Path(found["chart"]).read_bytes().startswith(b"\x89PNG")
    assert "running: step 1/4" in err
    assert "held-out accuracy, greedy" in err
    assert started_by(programs) == []


def test_a_finished_run_is_resumed_and_another_configuration_refused(programs: Path, model: Path) -> None:
    assert start(programs, model, "finish").communicate(timeout=60)[0]
    out, err = (process := start(programs, model, "finish", steps=5)).communicate(timeout=60)
    assert (process.returncode, out) == (4, "")
    assert "server.toml: steps = 4, now 5" in err
    out, err = (process := start(programs, model, "broken")).communicate(timeout=60)
    assert "Resuming the run" in err


def test_a_coordinator_that_fails_is_shown_with_its_log(programs: Path, model: Path) -> None:
    out, err = (process := start(programs, model, "broken")).communicate(timeout=60)
    assert (process.returncode, out) == (4, "")
    assert str(programs.parent / "run" / "logs" / "coordinator.log") in err
    assert "error: the disk is full" in err
    assert "Traceback" not in err
    assert started_by(programs) == []


def test_the_demo_ends_when_no_worker_is_left(programs: Path, model: Path) -> None:
    out, err = (process := start(programs, model, "worker")).communicate(timeout=60)
    assert (process.returncode, out) == (6, "")
    assert "error: the key is revoked" in err
    assert started_by(programs) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_every_process_and_says_how_to_go_on(
    programs: Path, model: Path, number: signal.Signals
) -> None:
    process = start(programs, model, "wait")
    deadline = time.monotonic() + 30
    while len(started_by(programs)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(started_by(programs)) == 3
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    run_root = programs.parent / "run"
    assert f"aether-coordinator run {run_root / 'server.toml'}" in err
    assert f"aether-worker run {run_root / 'worker-2.toml'}" in err
    assert started_by(programs) == []


def test_the_children_die_with_a_killed_demo(programs: Path, model: Path) -> None:
    process = start(programs, model, "wait")
    deadline = time.monotonic() + 30
    while len(started_by(programs)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=10)
    deadline = time.monotonic() + 5
    while started_by(programs) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert started_by(programs) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [({"steps": 0}, "--steps 0"), ({"workers": 0}, "--workers 0"), ({"engine": "gpu"}, "--engine gpu")],
)
def test_wrong_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_demo(**options)  # type: ignore[arg-type]


def test_only_the_status_of_the_started_coordinator_counts(tmp_path: Path) -> None:
    assert read_status(tmp_path, 1) is None
    (tmp_path / "endpoint.json").write_text('{"pid": 2, "status_url": "http://127.0.0.1:9/status"}')
    assert read_status(tmp_path, 1) is None
    assert read_status(tmp_path, 2) is None


def test_the_written_status_is_preferred_to_the_last_seen_one(tmp_path: Path) -> None:
    seen = RunStatus(run="demo", run_uuid="u", state="running", step=13)
    assert (last_status(tmp_path, seen).state, last_status(tmp_path, seen).step) == ("finished", 13)
    (tmp_path / "status.json").write_text(seen.model_copy(update={"step": 14}).model_dump_json())
    assert last_status(tmp_path, seen).step == 14
