"""Where the turns of an episode go, and whether a slot idles while turns wait.

    uv run python tests/bench/affinity.py [--seconds 20] [--workers 8]

This process is the coordinator (gateway, dispatch, ledger, reply intake, as in `queue`) and the episodes: more than
the slots, in groups of eight, each of eight turns over HTTP; a turn's prompt is the one before, its answer and a
little more. When an episode is over the next begins. The workers (null engine, four slots, turns of 0.4 s, 8 jobs of
prefetch) run four in a process. First with all slots taken and turns waiting, then with room (half as many episodes
as slots).

Measured: of the later turns, the share that was answered by the worker of the episode's first turn; and, while the
ready queue holds a turn, how long the coordinator leaves a worker with fewer jobs than slots, as a share of all slots'
time (sampled every 5 ms: one sample may fall between a reply and the dispatch that follows it).
"""

import sys
from pathlib import Path

# This folder would hide the standard library's `queue`.
if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aether_coordinator.gateway import OpenEpisode
from bench._bench import child, finish, print_table
from bench._product import COMPLETION, Product, coordinator
from nats_server import NatsServer
from tiny_run import toml

SLOTS, PER_PROCESS = 4, 4
TOKENS_PER_S = len(COMPLETION) / 0.4
TURNS, GROUP = 8, 8
GOAL, IDLE_GOAL = 0.95, 0.01
SAMPLE_S = 0.005


# ---- workers, some in each process ---------------------------------------------------------------


async def work(files: list[Path]) -> None:
    from aether_worker.node import run_worker
    from aether_worker.settings import WorkerSettings

    async with asyncio.TaskGroup() as tasks:
        for file in files:
            tasks.create_task(run_worker(WorkerSettings.load(file, None)))


def worker_settings(directory: Path, server: NatsServer, model: Path, name: str) -> Path:
    settings = {
        "name": name,
        "run": server.names.run,
        "url": server.worker_url,
        "key_file": str(server.directory / f"{name}.seed"),
        "model": str(model),
        "dtype": "float32",
        "engine": "null",
        "slots": SLOTS,
        "state_dir": str(directory / name),
        "null": {"tokens": COMPLETION, "tokens_per_s": TOKENS_PER_S},
    }
    file = directory / f"{name}.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
    return file


# ---- episodes ------------------------------------------------------------------------------------


class Episodes:
    """Runs episodes one after the other in so many lanes, and remembers who answered their turns."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self.later, self.at_home = 0, 0
        self.answered = 0
        dispatcher = product.dispatcher
        self._worker_of: dict[str, str] = {}
        accept = dispatcher.answered

        def answered(record: Any) -> None:
            self._worker_of[self._episode_of(record.job)] = record.worker
            accept(record)

        dispatcher.answered = answered  # type: ignore[method-assign]

    def _episode_of(self, job: str) -> str:
        turn = self._product.dispatcher.turns.get(job)
        return turn.key.episode if turn is not None else ""

    async def run(self, lanes: int) -> None:
        """Until cancelled."""
        connector = aiohttp.TCPConnector(limit=0)
        async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession(connector=connector) as session:
            for _ in range(0, lanes, GROUP):
                tasks.create_task(self._groups(session))
            await asyncio.Event().wait()

    async def _groups(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with self._product.episodes(GROUP) as models, asyncio.TaskGroup() as tasks:
                for model in models:
                    tasks.create_task(self._episode(session, model))

    async def _episode(self, session: aiohttp.ClientSession, model: str) -> None:
        prompt = [3 + number % 200 for number in model.encode()][:40]
        first = ""
        opened: OpenEpisode = self._product.gateway._episodes[model]
        episode = opened.record.id
        for number in range(TURNS):
            answer = await self._call(session, model, prompt)
            worker = self._worker_of[episode]
            self.answered += 1
            if number == 0:
                first = worker
            else:
                self.later += 1
                self.at_home += worker == first
            prompt = [*prompt, *answer, 9, 9]

    async def _call(self, session: aiohttp.ClientSession, model: str, prompt: list[int]) -> list[int]:
        gateway = self._product.gateway
        body = {
            "model": model,
            "token_ids": prompt,
            "sampling_params": {
                "temperature": 1.0,
                "max_tokens": 16,
                "stop_token_ids": [2],
                "logprobs": 1,
                "skip_special_tokens": False,
            },
        }
        headers = {"Authorization": f"Bearer {gateway.secret}", "X-Session-ID": model}
        url = f"http://127.0.0.1:{gateway.port}/inference/v1/generate"
        async with session.post(url, data=json.dumps(body), headers=headers) as response:
            result = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {result}")
            return result["choices"][0]["token_ids"]


async def watch(product: Product, seconds: float) -> dict[str, float]:
    """Shares of the slots' time: free while a turn waits, and free at all."""
    idle = free = total = waiting = 0.0
    last = time.monotonic()
    end = last + seconds
    samples = 0
    while last < end:
        await asyncio.sleep(SAMPLE_S)
        now = time.monotonic()
        workers = product.fleet.workers.values()
        unused = sum(max(0, worker.slots - len(worker.jobs)) for worker in workers) * (now - last)
        samples += 1
        total += sum(worker.slots for worker in workers) * (now - last)
        free += unused
        if (turns := product.dispatcher.waiting) > 0:
            idle += unused
        waiting += turns
        last = now
    return {"idle": idle / total, "free": free / total, "waiting": waiting / samples}


# ---- the benchmark -------------------------------------------------------------------------------


async def benchmark(directory: Path, count: int, seconds: float) -> None:
    model = directory / "model"
    script = [sys.executable, __file__]
    async with child(*script, "--make-model", str(model), log=directory / "model.log") as making:
        await making.wait()
    names = [f"w{number}" for number in range(count)]
    figures: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        server, product = await stack.enter_async_context(coordinator(directory, model, names))
        files = [str(worker_settings(directory, server, model, name)) for name in names]
        for number, some in enumerate(itertools.batched(files, PER_PROCESS)):
            process = await stack.enter_async_context(
                child(*script, "--workers-of", *some, log=directory / f"workers-{number}.log")
            )
            stack.callback(process.kill)
        async with asyncio.timeout(120):
            while sum(bool(worker.adapters) for worker in product.fleet.workers.values()) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        episodes = Episodes(product)
        window = sum(worker.window for worker in product.fleet.workers.values())
        slots = count * SLOTS
        for load, lanes in (("turns wait", window + 2 * slots), ("half full", slots // 2)):
            running = asyncio.create_task(episodes.run(lanes))
            await asyncio.sleep(3)
            episodes.later = episodes.at_home = episodes.answered = 0
            seen = await watch(product, seconds)
            if running.done():
                running.result()
            figures[load] = {
                "episodes": lanes,
                "home": episodes.at_home / episodes.later,
                "turns_per_s": episodes.answered / seconds,
                **seen,
            }
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await asyncio.sleep(1)
    report(figures, count)


def report(figures: dict[str, dict[str, float]], count: int) -> None:
    print(f"{count} workers of {SLOTS} slots, episodes of {TURNS} turns")
    print_table(
        ("", "episodes", "turns/s", "later turns at home", "slots free", "free while turns wait", "turns waiting"),
        [
            (
                load,
                int(one["episodes"]),
                f"{one['turns_per_s']:.0f}",
                f"{one['home']:.4f}",
                f"{one['free']:.4f}",
                f"{one['idle']:.4f}",
                f"{one['waiting']:.1f}",
            )
            for load, one in figures.items()
        ],
    )
    home = min(one["home"] for one in figures.values())
    idle = max(one["idle"] for one in figures.values())
    finish(
        "affinity",
        workers=count,
        **{f"home_{load.replace(' ', '_')}": round(one["home"], 4) for load, one in figures.items()},
        idle_while_turns_wait=round(idle, 5),
        idle_goal=IDLE_GOAL,
        ratio=home,
        goal=GOAL,
        ok=home >= GOAL and idle <= IDLE_GOAL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--workers-of", type=Path, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--make-model", type=Path, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.workers_of:
        asyncio.run(work(options.workers_of))
    elif options.make_model:
        from tiny_model import make_tiny_model

        make_tiny_model(options.make_model)
    else:
        with tempfile.TemporaryDirectory(prefix="aether-bench-") as directory:
            asyncio.run(benchmark(Path(directory), options.workers, options.seconds))


if __name__ == "__main__":
    main()
