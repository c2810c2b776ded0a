"""The demo: one command that trains a real LoRA policy through the real queue.

It owns its run directory's configuration and its child processes, and nothing else: what trains is
`aether-coordinator run` and `aether-worker run`, as a user would start them by hand. Whatever ends the
demo ends its children; the run directory stays, and can be resumed.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from aether_common.checkpoint import checkpoint_path
from aether_common.child import tail
from aether_common.errors import ConfigError, RunDirectoryError
from aether_common.files import disk_error, write_durably
from aether_common.identity import compute_identity, is_local, resolve_model
from rich.console import Console

from aether_coordinator import smollm
from aether_coordinator.chart import draw_rewards
from aether_coordinator.demo_children import Child, ChildError, Children, program
from aether_coordinator.demo_recipe import (
    HELD_OUT,
    HELD_OUT_GREEDY,
    RENDERER,
    Recipe,
    changed_keys,
    recorded_ports,
)
from aether_coordinator.embedded import free_port
from aether_coordinator.loopback import OPENER
from aether_coordinator.progress import Progress
from aether_coordinator.status import RunStatus, evaluation_path
from aether_coordinator.summary import (
    Summary,
    as_json,
    compare,
    first_completions,
    print_summary,
    read_evaluation,
    read_steps,
)

ENGINES = ("transformers", "vllm")
POLL_S = 0.5
CONVERSION_S = 900.0
KEY_S = 60.0
STALL_S = 900.0
"""Without any change in the run for this long the demo gives up."""
INTERRUPTED = 130


def run_demo(
    *,
    steps: int = 14,
    workers: int = 2,
    run_root: Path | None = None,
    seed: int = 0,
    json_output: bool = False,
    model: str | None = None,
    revision: str | None = None,
    engine: str = "transformers",
    worker_python: Path | None = None,
    tls: bool = False,
) -> int:
    """Run (or resume) the demo and print its summary. Returns the exit status.

    stdout carries the summary, or with `json_output` one JSON object and nothing else; all else goes to
    stderr. Raises `AetherError` for everything that a user can understand and cure.
    """
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: choose one of {', '.join(ENGINES)}")
    for option, value, least in (("--steps", steps, 1), ("--workers", workers, 1), ("--seed", seed, 0)):
        if value < least:
            raise ConfigError(f"{option} {value}: must be at least {least}")
    root = (run_root or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).expanduser().resolve()
    options = Options(steps, workers, root, seed, model, revision, engine, worker_python, tls)
    console = Console(highlight=False, stderr=json_output)
    with Progress() as progress:
        summary = asyncio.run(_interruptible(lambda: _Demo(options, progress).run()))
    if summary is None:
        progress.say(
            "\nStopped; nothing that was finished is lost. "
            f"Go on with the same command and --run-root {root}, or with\n"
            f"  aether-coordinator run {root / 'server.toml'}\n"
            + "".join(f"  aether-worker run {root / f'worker-{n}.toml'}\n" for n in range(1, workers + 1))
        )
        return INTERRUPTED
    print_summary(console, summary)
    if json_output:
        print(as_json(summary), flush=True)
    return 0


@dataclass(frozen=True, slots=True)
class Options:
    steps: int
    workers: int
    run_root: Path
    seed: int
    model: str | None
    revision: str | None
    engine: str
    worker_python: Path | None
    tls: bool


async def _interruptible[ResultT](work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT | None:
    """Let SIGINT, SIGTERM and SIGHUP cancel `work`, a second one its cleaning up too; None when that happened."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work())
    asked = False

    def interrupt() -> None:
        nonlocal asked
        asked = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        if not asked:
            raise
        return None


class _Demo:
    """One run of the demo, from set-up to summary."""

    def __init__(self, options: Options, progress: Progress) -> None:
        self._options = options
        self._root = options.run_root
        self._progress = progress
        self._started = time.time()
        self._seconds_model = 0.0
        self._seconds_setup: float | None = None
        self._status: RunStatus | None = None
        environment = {"TOKENIZERS_PARALLELISM": "false"}
        if options.engine == "transformers":
            # More threads than cores make every process crawl.
            environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        if options.model is None or is_local(options.model):
            environment["HF_HUB_OFFLINE"] = "1"
        self._children = Children(self._root / "logs", environment)

    async def run(self) -> Summary:
        try:
            recipe = await self._prepare()
            coordinator = await self._start("coordinator", "aether-coordinator", "server.toml")
            workers = [await self._start(name, "aether-worker", f"{name}.toml") for name in recipe.worker_names]
            await self._follow(coordinator, workers)
            return self._summarise(recipe)
        finally:
            if self._children.alive("coordinator"):
                self._progress.waiting(
                    "stopping: the trainer finishes its step; interrupt once more to kill everything"
                )
            await self._stop()

    async def _start(self, name: str, command: str, configuration: str) -> Child:
        return await self._children.start(name, [program(command), "run", str(self._root / configuration)])

    async def _stop(self) -> None:
        stopping = asyncio.ensure_future(self._children.stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            self._children.kill()
            await stopping
            raise

    async def _prepare(self) -> Recipe:
        """Model, configuration and keys. Everything that is there already is used again."""
        options = self._options
        ports = recorded_ports(self._root)
        try:
            self._children.log_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, self._root) from error
        self._progress.say(f"{'Run' if ports is None else 'Resuming the run'} in {self._root}")
        model = options.model or str(await self._smollm())
        self._progress.waiting("reading the base model")
        path = await asyncio.to_thread(resolve_model, model, options.revision)
        if is_local(model):
            model = str(path)
        dtype = "float32" if options.engine == "transformers" else "bfloat16"
        identity = await asyncio.to_thread(compute_identity, model, options.revision, dtype, RENDERER)
        port, websocket_port = ports or (free_port(), free_port())
        recipe = Recipe(
            steps=options.steps,
            workers=options.workers,
            seed=options.seed,
            model=model,
            revision=options.revision,
            identity=identity,
            engine=options.engine,
            worker_python=options.worker_python.absolute() if options.worker_python else None,
            port=port,
            websocket_port=websocket_port,
            tls=options.tls,
        )
        files = recipe.files()
        if changed := changed_keys(self._root, files):
            raise RunDirectoryError(
                f"{self._root} holds a demo with another configuration: give the same options to resume it, or choose "
                "another --run-root\n" + "\n".join(f"  {line}" for line in changed)
            )
        for name, text in files.items():
            if not (self._root / name).exists():
                write_durably(self._root / name, text.encode())
        for name in recipe.worker_names:
            await self._add_key(name)
        return recipe

    async def _smollm(self) -> Path:
        """The demo's own model, converted in a process of its own, as that takes half a gigabyte of memory."""
        path = smollm.model_directory()
        if smollm.is_complete(path):
            return path
        smollm.gguf_file()
        began = time.monotonic()
        self._progress.waiting("converting SmolLM2-135M-Instruct (once, about a minute)")
        child = await self._children.start("model", [sys.executable, "-m", "aether_coordinator.smollm"])
        await self._children.finish(child, CONVERSION_S)
        self._seconds_model = time.monotonic() - began
        self._progress.say(f"Model converted in {self._seconds_model:.0f} s: {path}")
        return path

    async def _add_key(self, worker: str) -> None:
        if (self._root / "workers" / f"{worker}.nk").exists():
            return
        self._progress.waiting(f"making a key for {worker}")
        command = [program("aether-coordinator"), "worker", "add", worker, "--config", str(self._root / "server.toml")]
        await self._children.finish(await self._children.start(f"add-{worker}", command), KEY_S)

    async def _follow(self, coordinator: Child, workers: list[Child]) -> None:
        """Show the run until the coordinator ends. Raises `ChildError` unless the run is finished then."""
        lost: set[str] = set()
        last, changed_at = None, time.monotonic()
        while coordinator.process.returncode is None or await self._revived(coordinator):
            status = await asyncio.to_thread(read_status, self._root, coordinator.process.pid)
            if status is None and self._status is None:
                self._progress.waiting("starting nats-server, coordinator, trainer and workers")
            elif status is not None:
                self._note(status)
                self._progress.update(status)
            for worker in workers:
                if worker.process.returncode is None or worker.name in lost:
                    continue
                if not await self._revived(worker):
                    lost.add(worker.name)
                    self._progress.say(f"warning: {worker.ended()}", style="yellow")
            if len(lost) == len(workers):
                raise ChildError(f"no worker is left. {workers[-1].ended()}", workers[-1].process.returncode)
            mark = _fingerprint(status)
            if mark != last:
                last, changed_at = mark, time.monotonic()
            elif time.monotonic() - changed_at > STALL_S:
                raise ChildError(
                    f"nothing has changed for {STALL_S:.0f} s: see the logs in {self._root / 'logs'}\n"
                    f"{tail(coordinator.log)}",
                    None,
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await coordinator.process.wait()
        if coordinator.process.returncode != 0:
            raise ChildError(coordinator.ended(), coordinator.process.returncode)
        self._status = last_status(self._root, self._status)

    async def _revived(self, child: Child) -> bool:
        """Whether a child that was killed with -9 runs again."""
        if not await self._children.revive(child):
            return False
        self._progress.say(f"{child.name} was killed; started again", style="yellow")
        return True

    def _note(self, status: RunStatus) -> None:
        self._status = status
        if self._seconds_setup is None and status.started_s:
            # A resumed run opened its first group before this demo began.
            opened = status.started_s if status.started_s >= self._started else time.time()
            self._seconds_setup = opened - self._started

    def _summarise(self, recipe: Recipe) -> Summary:
        assert self._status is not None
        root, version = self._root, recipe.steps
        sampled = [read_evaluation(evaluation_path(root, HELD_OUT, number)) for number in (0, version)]
        greedy = [read_evaluation(evaluation_path(root, HELD_OUT_GREEDY, number)) for number in (0, version)]
        held_out = compare(*sampled)
        summary = Summary(
            model=recipe.model,
            revision=None if is_local(recipe.model) else recipe.revision,
            seed=recipe.seed,
            status=self._status,
            steps=read_steps(root),
            sampled=held_out,
            greedy=compare(*greedy),
            completions=first_completions(greedy[0], greedy[1]),
            seconds_setup=self._seconds_setup or 0.0,
            seconds_model=self._seconds_model,
            seconds_total=time.time() - self._started,
            run_root=root,
            adapter=checkpoint_path(root, version) / "adapter",
            chart=root / "rewards.png",
        )
        accuracies = {0: held_out.before, version: held_out.after} if held_out else {}
        name = recipe.identity.repository.rsplit("/", 1)[-1]
        draw_rewards(summary.chart, summary.steps, accuracies, f"Copy the last word: {name}, seed {recipe.seed}")
        return summary


def _fingerprint(status: RunStatus | None) -> object:
    """What changes as long as a run moves."""
    if status is None:
        return None
    progress = [(evaluation.source, evaluation.version, evaluation.done) for evaluation in status.evaluations]
    return (status.state, status.step, status.step_share, status.counters.replies, progress)


def read_status(run_root: Path, pid: int) -> RunStatus | None:
    """The status of the coordinator with that pid; None while it does not answer."""
    try:
        endpoint = json.loads((run_root / "endpoint.json").read_text())
        if endpoint["pid"] != pid:
            return None
        with OPENER.open(endpoint["status_url"], timeout=5) as response:
            return RunStatus.model_validate_json(response.read())
    except (OSError, ValueError, KeyError, HTTPException):
        return None


def last_status(run_root: Path, seen: RunStatus | None) -> RunStatus:
    """The final status of a run whose coordinator has ended: what it wrote down, else the last one seen."""
    try:
        return RunStatus.model_validate_json((run_root / "status.json").read_bytes())
    except (OSError, ValueError):
        if seen is None:
            raise RunDirectoryError(
                f"{run_root}: the coordinator ended without a status: see {run_root / 'logs'}"
            ) from None
        return seen.model_copy(update={"state": "finished"})
