"""How busy the slots of a worker are that stands far away: turns always wait, the engine has a fixed token rate.

    uv run python tests/bench/wan.py [--seconds 15] [--slots 16] [--round-trips 0.06 0.2]

This process is the coordinator (gateway, dispatch, ledger, reply intake, as in `queue`), the load a process with 64
calls at any time. The worker is `aether-worker` in a process of its own with the null engine (turns of one second) and
the default prefetch, behind a proxy in a process of its own that delays by half of the round trip in each direction.
Measured in the engine: the time between the start and the end of every generation, as a share of slots × time.
"""

import sys
from pathlib import Path

# This folder would hide the standard library's `queue`.
if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from typing import Any

from bench import _load
from bench._bench import child, finish, print_table
from bench._product import coordinator
from bench.adapter import server_process
from nats_server import NatsServer
from tiny_run import toml

WORKER = "w1"
SLOTS, WAITING = 16, 64
TOKENS, TOKENS_PER_S = 40, 40.0
"""Of a turn: one second."""
WARM_UP_S = 4.0
GOAL = 0.97


# ---- the worker, a process -----------------------------------------------------------------------


def record_generations(path: Path) -> None:
    """From now on every generation of a null engine in this process adds a line to `path`: start, end, job."""
    from aether_worker.engine.null_engine import NullEngine

    generate = NullEngine.generate
    file = path.open("a", buffering=1)

    async def recorded(self: NullEngine, request: Any, on_progress: Any) -> Any:
        started = time.monotonic()
        try:
            return await generate(self, request, on_progress)
        finally:
            file.write(f"{started} {time.monotonic()} {request.job}\n")

    NullEngine.generate = recorded  # type: ignore[method-assign]


def busy_seconds(path: Path, start: float, end: float) -> float:
    """Of all slots together, between two times of the monotonic clock, which all processes share."""
    generations = (line.split() for line in path.read_text().splitlines())
    return sum(max(0.0, min(float(last), end) - max(float(first), start)) for first, last, _ in generations)


def work(settings: Path, intervals: Path) -> None:
    from aether_worker.cli import main

    record_generations(intervals)
    sys.argv = ["aether-worker", "run", str(settings)]
    main()


# ---- the benchmark -------------------------------------------------------------------------------


def worker_settings(directory: Path, server: NatsServer, model: Path, port: int, slots: int) -> Path:
    settings = {
        "name": WORKER,
        "run": server.names.run,
        "url": f"ws://127.0.0.1:{port}",
        "key_file": str(server.directory / f"{WORKER}.seed"),
        "model": str(model),
        "dtype": "float32",
        "engine": "null",
        "slots": slots,
        "state_dir": str(directory / "worker"),
        "null": {"tokens": [5] * TOKENS, "tokens_per_s": TOKENS_PER_S},
    }
    file = directory / "worker.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
    return file


async def busy_share(directory: Path, model: Path, slots: int, round_trip_s: float, seconds: float) -> dict[str, float]:
    directory.mkdir()
    intervals = directory / "intervals"
    proxy = [sys.executable, str(Path(__file__).parents[1] / "chaos" / "proxy.py"), "--delay", str(round_trip_s / 2)]
    async with AsyncExitStack() as stack:
        server, product = await stack.enter_async_context(coordinator(directory, model, [WORKER]))
        models = await stack.enter_async_context(product.episodes(WAITING))
        port = await stack.enter_async_context(server_process(*proxy, str(server.websocket_port)))
        settings = worker_settings(directory, server, model, port, slots)
        command = [sys.executable, __file__, "--worker", str(settings), str(intervals)]
        process = await stack.enter_async_context(child(*command, log=directory / "worker.log"))
        async with asyncio.timeout(60):
            while not any(worker.adapters for worker in product.fleet.workers.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        loading = await stack.enter_async_context(child(sys.executable, _load.__file__, log=directory / "load.log"))
        url = f"http://127.0.0.1:{product.gateway.port}/inference/v1/generate"
        count = int(4 * slots * (WARM_UP_S + seconds))
        generator = _load.LoadGenerator(loading)
        await generator.send(url, product.gateway.secret, models, 2 * slots, slots)  # Until it is there.
        load = asyncio.create_task(generator.send(url, product.gateway.secret, models, count, WAITING))
        await asyncio.sleep(WARM_UP_S)
        start, cpu = time.monotonic(), os.times()
        least = WAITING
        while time.monotonic() < start + seconds:
            least = min(least, product.dispatcher.waiting)
            await asyncio.sleep(0.05)
        end = time.monotonic()
        used = os.times()
        await asyncio.sleep(2 * TOKENS / TOKENS_PER_S)  # What runs at the end is written when it ends.
        if load.done():
            raise RuntimeError(f"the load ended early: {load.exception() or load.result()}")
        loading.kill()
        process.kill()
        await asyncio.gather(load, return_exceptions=True)
    share = busy_seconds(intervals, start, end) / (slots * (end - start))
    return {"busy": share, "least_waiting": least, "cpu": (used.user + used.system - cpu.user - cpu.system) / seconds}


async def benchmark(directory: Path, slots: int, round_trips: list[float], seconds: float) -> None:
    from tiny_model import make_tiny_model

    model = directory / "model"
    make_tiny_model(model)
    figures = {trip: await busy_share(directory / f"trip-{trip}", model, slots, trip, seconds) for trip in round_trips}
    print(f"{slots} slots, turns of {TOKENS / TOKENS_PER_S:.1f} s, {WAITING} calls at once, {seconds:.0f} s each")
    print_table(
        ("round trip", "slots busy", "fewest turns waiting"),
        [(f"{trip * 1000:.0f} ms", f"{one['busy']:.4f}", int(one["least_waiting"])) for trip, one in figures.items()],
    )
    worst = min(one["busy"] for one in figures.values())
    finish(
        "wan",
        slots=slots,
        **{f"busy_{trip * 1000:.0f}_ms": round(one["busy"], 4) for trip, one in figures.items()},
        ratio=worst,
        goal=GOAL,
        ok=worst >= GOAL and all(one["least_waiting"] > 0 for one in figures.values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--round-trips", type=float, nargs="+", default=[0.06, 0.2])
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.worker:
        work(*options.worker)
    else:
        with tempfile.TemporaryDirectory(prefix="aether-bench-") as directory:
            asyncio.run(benchmark(Path(directory), options.slots, options.round_trips, options.seconds))


if __name__ == "__main__":
    main()
