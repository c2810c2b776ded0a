"""A whole run on the tiny model, as real processes: coordinator, trainer, nats-server, workers."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from aether_common.identity import compute_identity

TESTS = Path(__file__).parent
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(TESTS),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}


def toml(value: Any) -> str:
    """TOML of a plain value."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps(value)


class TinyRun:
    """Writes the settings of a run below `root` and starts its processes; `close` ends them."""

    def __init__(self, root: Path, model: Path, **server: Any) -> None:
        self.root, self.model = root, model
        self.environment = dict(ENVIRONMENT)
        self.run_root = root / "run"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        root.mkdir(parents=True, exist_ok=True)
        identity = compute_identity(str(model), None, "float32", "default").model_dump()
        sampling = {"temperature": 1.0, "max_tokens": 12}
        settings = {
            "run": "tiny",
            "run_root": str(self.run_root),
            "steps": 4,
            "model": str(model),
            "max_model_len": 256,
            "base_model": identity,
            "train": [{"name": "train", "taskset": "aether_lowercase", "sampling": sampling}],
            "eval": [
                {
                    "name": "held_out",
                    "taskset": "aether_lowercase",
                    "taskset_args": {"count": 4, "first": 100},
                    "sampling": sampling,
                }
            ],
            "batch": {"groups": 2, "group_size": 16},
            "trainer": {"config": str(root / "trainer.toml")},
            **server,
        }
        (root / "server.toml").write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
        (root / "trainer.toml").write_text(
            f"""
            model = {{ path = {toml(str(model))}, dtype = "float32" }}
            [lora]
            target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
            serving_dtype = "float32"
            [optimizer]
            learning_rate = 3e-2
            """
        )

    def command(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment to its end."""
        return subprocess.run(
            [str(BIN / name), *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
        )

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / arguments[0]), *arguments[1:]],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def start_coordinator(self) -> subprocess.Popen[bytes]:
        return self.start("coordinator", "aether-coordinator", "run", str(self.root / "server.toml"))

    def add_worker(self, name: str, **settings: Any) -> Path:
        """Make a worker's key and its settings file, which is returned."""
        added = self.command("aether-coordinator", "worker", "add", name, "--config", str(self.root / "server.toml"))
        assert added.returncode == 0, added.stderr
        values = {
            "model": str(self.model),
            "dtype": "float32",
            "max_model_len": 256,
            "engine": "transformers",
            "slots": 32,
            "state_dir": str(self.root / name),
            **settings,
        }
        file = self.root / f"{name}.toml"
        file.write_text(added.stdout + "".join(f"{key} = {toml(value)}\n" for key, value in values.items()))
        return file

    def start_worker(self, name: str, **settings: Any) -> subprocess.Popen[bytes]:
        file = self.root / f"{name}.toml"
        if not file.exists():
            self.add_worker(name, **settings)
        return self.start(name, "aether-worker", "run", str(file))

    def status(self) -> dict[str, Any] | None:
        """The run's status, None while no coordinator answers."""
        try:
            endpoint = json.loads((self.run_root / "endpoint.json").read_text())
            with urllib.request.urlopen(endpoint["status_url"], timeout=5) as response:
                return json.loads(response.read())
        except (OSError, ValueError):
            return None

    def wait(self, condition: Any, timeout_s: float, what: str) -> dict[str, Any]:
        """Poll the status until `condition(status)` holds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status()
            if status is not None and condition(status):
                return status
            assert self.processes["coordinator"].poll() is None, f"coordinator ended: {self.log('coordinator')}"
            time.sleep(0.2)
        raise AssertionError(f"waited {timeout_s} s for {what}: {self.status()}\n{self.log('coordinator')}")

    @staticmethod
    def state(status: dict[str, Any], worker: str) -> str | None:
        """The state of a worker in a status, None if it is not there."""
        return next((row["state"] for row in status["workers"] if row["name"] == worker), None)

    def finish(self, timeout_s: float) -> None:
        """Wait until the coordinator ends by itself, all steps done."""
        status = self.processes["coordinator"].wait(timeout_s)
        assert status == 0, self.log("coordinator")

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()[-4000:]

    def steps(self) -> list[dict[str, Any]]:
        lines = (self.run_root / "metrics" / "steps.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
