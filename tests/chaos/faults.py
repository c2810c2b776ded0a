"""A run under attack: the tiny run, and everything that can be done to it while it works.

Which faults come, how long each lasts and what it hits are drawn from one seeded generator, so a
seed gives the same sequence again; the moment within the run that a fault hits differs each time.
"""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos.proxy import Proxy
from tiny_run import TinyRun

BALLAST = "ballast"
APPEARS_S = 20.0
"""How long a fault waits for what it hits, when that is just starting."""
SHORT_S = (0.5, 1.0, 2.0, 4.0, 8.0)
LONG_S = (35.0,)
"""Longer than the 30 s after which a silent worker counts as dead."""
WEIGHTS = {
    "kill coordinator": 3,
    "kill trainer": 3,
    "kill nats-server": 3,
    "kill worker": 4,
    "kill everything": 1,
    "stop coordinator (SIGTERM)": 1,
    "pause coordinator": 1,
    "pause trainer": 1,
    "pause nats-server": 1,
    "pause worker": 2,
    "cut connection": 3,
    "delay connection": 2,
    "silence connection": 1,
    "delete store, server killed": 2,
    "delete store, server running": 1,
    "corrupt adapter": 1,
    "fill run disk": 1,
    "fill store disk": 1,
}


class MountRefused(Exception):
    """This machine does not let us mount a small tmpfs."""


class Attacked:
    """A tiny run with `workers` behind proxies. Use it as a context manager; `say` gets one line per fault."""

    def __init__(
        self,
        root: Path,
        model: Path,
        *,
        workers: int = 2,
        seed: int = 0,
        small_disks: bool = True,
        longest_s: float = LONG_S[0],
        say: Callable[[str], None] = print,
        worker: dict[str, Any] | None = None,
        **server: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.say = say
        self.longest_s = longest_s
        """No fault lasts longer."""
        self.done: Counter[str] = Counter()
        self.workers = [f"w{number + 1}" for number in range(workers)]
        self._mounts: list[Path] = []
        self._proxies: dict[str, Proxy] = {}
        self._stopped: set[int] = set()
        self._worker_settings = worker or {}
        self.run = TinyRun(root, model, **server)
        self.run_root = self.run.run_root
        self.store = self.run_root / "nats" / "jetstream"
        self.no_disks = ""
        """Why no disk can be filled, empty if they can."""
        if small_disks:
            try:
                self._mount(self.run_root, 192)
                self._mount(self.store, 64)
            except MountRefused as refused:
                self.no_disks = str(refused)
                say(f"no small disks: {refused}")

    # ---- the run -----------------------------------------------------------------------------------

    def __enter__(self) -> "Attacked":
        try:
            for name in self.workers:
                file = self.run.add_worker(name, slots=8, **self._worker_settings)
                websocket = json.loads((self.run_root / "nats" / "ports.json").read_text())["websocket_port"]
                proxy = self._proxies[name] = Proxy(websocket)
                file.write_text(file.read_text().replace(f":{websocket}", f":{proxy.port}"))
            self.run.start_coordinator()
            for name in self.workers:
                self.run.start_worker(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.run.close()
        for proxy in self._proxies.values():
            proxy.close()
        for path in reversed(self._mounts):
            subprocess.run(["umount", "-l", str(path)], check=False)

    def keep_alive(self, *, ends: bool = False) -> None:
        """Start again what was killed. Nothing may end by itself, except the coordinator when it `ends`."""
        for name, process in list(self.run.processes.items()):
            status = process.poll()
            if status is None or (name == "coordinator" and ends):
                continue
            assert status == -signal.SIGKILL, f"{name} ended with {status}: {self.run.log(name)}"
            if name == "coordinator":
                self.run.start_coordinator()
            else:
                self.run.start_worker(name)

    def rest(self, seconds: float) -> None:
        """Let the run go on, restarting what is dead."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.keep_alive()
            time.sleep(min(0.2, left))

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float, what: str) -> dict[str, Any]:
        """Poll the status, restarting what is dead, until `condition(status)` holds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.keep_alive()
            status = self.run.status()
            if status is not None and condition(status):
                return status
            time.sleep(0.3)
        raise AssertionError(f"waited {timeout_s:.0f} s for {what}: {self.run.status()}\n{self.run.log('coordinator')}")

    def wait_for_steps(self, more: int, timeout_s: float) -> int:
        """Wait until so many more steps are trained. Returns the newest step."""
        goal = self.step() + more
        return self.wait_for(lambda status: status["step"] >= goal, timeout_s, f"step {goal}")["step"]

    def step(self) -> int:
        """The newest step that the metrics know."""
        file = self.run_root / "metrics" / "steps.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def stop(self, timeout_s: float) -> float:
        """SIGTERM the coordinator, which must end well, then the workers. Returns the seconds it took."""
        process = self.run.processes["coordinator"]
        began = time.monotonic()
        process.terminate()
        status = process.wait(timeout_s)
        took = time.monotonic() - began
        assert status == 0, f"coordinator ended with {status}: {self.run.log('coordinator')}"
        for name in self.workers:
            self.run.processes[name].terminate()
        for name in self.workers:
            status = self.run.processes[name].wait(60)
            assert status == 0, f"{name} ended with {status}: {self.run.log(name)}"
        return took

    # ---- what can be hit ---------------------------------------------------------------------------

    def pid(self, part: str) -> int | None:
        """Process id of "coordinator", "nats-server", "trainer" or a worker; None while it is not there."""
        if part == "nats-server":
            with suppress(OSError, ValueError):
                pid = int((self.run_root / "nats" / "nats-server.pid").read_text())
                return pid if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes() else None
            return None
        if part == "trainer":
            parent = self.run.processes["coordinator"].pid
            with suppress(OSError):
                for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                    if b"aether_trainer" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
            return None
        process = self.run.processes[part]
        return process.pid if process.poll() is None else None

    def kill(self, part: str) -> bool:
        """kill -9. False when there is nothing to kill."""
        return self.signal(part, signal.SIGKILL)

    def signal(self, part: str, number: signal.Signals) -> bool:
        pid = self._appeared(part)
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _appeared(self, part: str) -> int | None:
        """Process id of a part that may just be starting."""
        deadline = time.monotonic() + APPEARS_S
        while (pid := self.pid(part)) is None and time.monotonic() < deadline:
            self.rest(0.3)
        return pid

    def pause(self, part: str, seconds: float) -> bool:
        pid = self._appeared(part)
        if pid is None or not self.signal(part, signal.SIGSTOP):
            return False
        self._stopped.add(pid)
        self.rest(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._stopped.discard(pid)
        return True

    def delete_store(self, *, running: bool) -> bool:
        """Delete everything that JetStream stored, under a running server or under one just killed."""
        if not running and not self.kill("nats-server"):
            return False
        empty_directory(self.store)
        return True

    def fill(self, directory: Path, seconds: float) -> None:
        """Leave no byte free on the disk of `directory`, then free it again."""
        file = directory / BALLAST
        try:
            fill_disk(file)
            self.rest(seconds)
        finally:
            file.unlink(missing_ok=True)

    def corrupt_adapter(self, worker: str) -> bool:
        """Flip one byte of every adapter in a worker's cache and kill the worker, which loads them again."""
        files = list((self.run.root / worker / "adapters").glob("v*-*/adapter_model.safetensors"))
        for file in files:
            with suppress(FileNotFoundError), file.open("r+b") as content:
                content.seek(-1, os.SEEK_END)
                last = content.read(1)
                content.seek(-1, os.SEEK_END)
                content.write(bytes([last[0] ^ 1]))
        return bool(files) and self.kill(worker)

    def _mount(self, directory: Path, mib: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0700", "tmpfs", str(directory)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MountRefused(done.stderr.strip() or "mount failed")
        self._mounts.append(directory)

    # ---- random faults -----------------------------------------------------------------------------

    def strike(self) -> None:
        """One fault, drawn at random, to its end."""
        kinds = [kind for kind in WEIGHTS if not (self.no_disks and kind.startswith("fill"))]
        kind = self.random.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        worker = self.random.choice(self.workers)
        seconds = min(self.longest_s, self.random.choice(SHORT_S if self.random.random() < 0.9 else LONG_S))
        pause = round(self.random.uniform(0.2, 6.0), 1)
        hit = self._hit(kind, worker, seconds)
        self.say(f"{time.strftime('%H:%M:%S')} {kind} ({worker}, {seconds} s){'' if hit else ': nothing to hit'}")
        self.done[kind] += bool(hit)
        self.rest(pause)

    def _hit(self, kind: str, worker: str, seconds: float) -> bool:
        verb, _, part = kind.partition(" ")
        match verb:
            case "kill" if part == "everything":
                for process in self.run.processes.values():
                    process.kill()
            case "kill":
                return self.kill(worker if part == "worker" else part)
            case "pause":
                return self.pause(worker if part == "worker" else part, seconds)
            case "stop":
                return self._stop_and_start()
            case "cut" | "delay" | "silence":
                proxy = self._proxies[worker]
                {"cut": proxy.cut, "delay": lambda: proxy.delay(0.3), "silence": proxy.silence}[verb]()
                self.rest(seconds)
                proxy.mend()
            case "delete":
                return self.delete_store(running=kind.endswith("running"))
            case "corrupt":
                return self.corrupt_adapter(worker)
            case "fill":
                if self.run.status() is None:
                    return False  # A start on a full disk is refused, and that is right.
                self.fill(self.run_root if part == "run disk" else self.store, min(seconds, 8.0))
        return True

    def _stop_and_start(self) -> bool:
        process = self.run.processes["coordinator"]
        if self.run.status() is None or process.poll() is not None:
            return False
        process.terminate()
        status = process.wait(90)
        assert status == 0, f"coordinator ended with {status} after SIGTERM: {self.run.log('coordinator')}"
        self.run.start_coordinator()
        return True


def empty_directory(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def fill_disk(file: Path) -> None:
    """Write to `file` until the disk takes not one more page."""
    with file.open("wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    ballast.write(b"\0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
