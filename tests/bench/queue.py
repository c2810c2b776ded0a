"""Turns through gateway, JetStream and a worker with the null engine, against the bare queue loop.

    uv run python tests/bench/queue.py [--rounds 5]

Gateway side, four processes: load generator (HTTP, keep-alive) → this process with the coordinator's own parts
(gateway, dispatch, ledger, reply intake) → nats-server → `aether-worker` with engine "null" over ws://, and back.
Bare side, three processes: this process publishes and consumes replies → nats-server → a worker that pulls, replies
and acknowledges over ws://, and back. Both use the same server, streams, accounts, window, file storage, publish
confirmations and explicit acknowledgements; the bare loop neither encodes nor records anything, and nobody is
asked over HTTP. On few cores the load generator's share of the processor counts against the gateway side, and what
limits both is processor time per job over all processes, which is reported by process.

The goal is set against the bare loop as nats-py's documentation writes it (`js.publish`, `fetch(32)`, `msg.ack()`),
which is what a queue costs that nobody has worked on. The two lean loops speak the protocol with our own pulls,
confirmations and joined frames: their ratio says what all that the coordinator does costs beside the transport.
The goal for one in flight is set against the lean loop, the stricter one. A fetch can stall: then run it again.
"""

import sys
from pathlib import Path

# This folder would hide the standard library's `queue` behind this script.
if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import asyncio
import math
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from aether_common.bus import Bus
from aether_common.names import Names
from aether_coordinator.pauses import freeze_heap
from aiohttp import web
from bench import _load
from bench._bench import child, finish, interleaved, median, print_table
from bench._loops import (
    BARE,
    CALLBACKS,
    IN_FLIGHT,
    NATS_PY,
    PROMPT_TOKENS,
    Bare,
    Callbacks,
    NatsPy,
    figures_of,
    work,
)
from bench._product import COMPLETION, Product
from nats_server import NatsServer
from tiny_run import toml

TURNS = 2000
"""Per round."""
BARE_JOBS = 4000
NATS_PY_JOBS = 1000
"""Jobs per round, and seconds after which the loop counts as stalled."""
UNLOADED = 300
"""One in flight, per round."""
WORKER = "w1"
GOAL, LATENCY_GOAL = 0.4, 3.0


async def bare_worker(name: str, directory: Path, url: str) -> None:
    names = Names("test")
    bus = Bus(url, (directory / f"{name}.seed").read_text(), names.inbox(name), name)
    await bus.connect()
    await work(bus, names, name)


# ---- the benchmark -------------------------------------------------------------------------------


@asynccontextmanager
async def empty_handler() -> AsyncGenerator[str]:
    """The URL of an aiohttp server whose handler does nothing."""

    async def nothing(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/", nothing)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


def worker_settings(directory: Path, server: NatsServer, model: Path) -> Path:
    settings = {
        "name": WORKER,
        "run": server.names.run,
        "url": server.worker_url,
        "key_file": str(directory / "nats" / f"{WORKER}.seed"),
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "engine": "null",
        "slots": IN_FLIGHT,
        "prefetch": 0,
        "state_dir": str(directory / WORKER),
        "null": {"tokens": COMPLETION},
    }
    file = directory / "worker.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
    return file


async def benchmark(directory: Path, rounds: int) -> None:
    model = directory / "model"
    script = [sys.executable, __file__]
    async with child(*script, "--make-model", str(model), log=directory / "model.log") as making:
        await making.wait()
    server = NatsServer(directory / "nats")
    server.directory.mkdir()
    for worker in (WORKER, BARE, CALLBACKS, NATS_PY):
        server.add_worker(worker)
    with server:
        bus, bare_bus = server.coordinator_bus(), server.coordinator_bus()
        await bus.connect()
        await bare_bus.connect()
        product = Product(directory, bus, server.names, model)
        await product.streams.declare()
        for worker in (BARE, CALLBACKS, NATS_PY):
            await product.streams.declare_lane(worker, IN_FLIGHT)
        await product.put_adapter(directory / "adapter")
        worker = [str(Path(sys.executable).parent / "aether-worker"), "run"]
        bare = [*script, "--bare-worker", str(server.directory), server.worker_url]
        async with (
            product.serving(),
            child(*worker, str(worker_settings(directory, server, model)), log=directory / "worker.log") as w1,
            child(*bare, BARE, log=directory / "bare.log") as tasks,
            child(*bare, CALLBACKS, log=directory / "callbacks.log") as callbacks,
            child(*bare, NATS_PY, log=directory / "nats-py.log") as nats_py,
            child(sys.executable, _load.__file__, log=directory / "load.log") as load,
            empty_handler() as empty,
        ):
            for process in (tasks, callbacks, nats_py):
                assert process.stdout is not None
                await process.stdout.readline()
            async with asyncio.timeout(60):
                while not any(product.adapter in worker.adapters for worker in product.fleet.workers.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            freeze_heap()
            workers = [process.pid for process in (w1, tasks, callbacks, nats_py)]
            processes = {"coordinator": [os.getpid()], "worker": workers, "nats-server": [server.pid]}
            await measure(product, bare_bus, _load.LoadGenerator(load), empty, rounds, Processor(processes))
        await bare_bus.close()
        await bus.close()


class Processor:
    """Processor time by process in the loaded part of a round."""

    def __init__(self, processes: dict[str, list[int]]) -> None:
        self._processes = processes

    def read(self) -> dict[str, float]:
        """Seconds so far."""
        return {name: sum(map(processor_s, pids)) for name, pids in self._processes.items()}

    async def of(self, jobs: int, loaded: Awaitable[dict[str, float]]) -> dict[str, float]:
        """The figures of a run of `jobs`, and microseconds per job by process."""
        before = self.read()
        figures = await loaded
        return {**figures, **{name: (now - before[name]) / jobs * 1e6 for name, now in self.read().items()}}


def processor_s(pid: int) -> float:
    """User and system time of a process, from Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    product: Product, bus: Bus, load: _load.LoadGenerator, empty: str, rounds: int, processor: Processor
) -> None:
    url, secret = f"http://127.0.0.1:{product.gateway.port}/inference/v1/generate", product.gateway.secret
    bare, callbacks, nats_py = (loop(bus, product.names) for loop in (Bare, Callbacks, NatsPy))

    async def through_the_gateway() -> dict[str, float]:
        async with product.taking_replies(), product.episodes(IN_FLIGHT) as models:
            unloaded = await load.send(url, secret, models, UNLOADED, 1)
            loaded = await processor.of(TURNS, load.send(url, secret, models, TURNS, IN_FLIGHT))
            return figures_of(unloaded, loaded)

    async def with_tasks() -> dict[str, float]:
        unloaded = await bare.run(UNLOADED, 1)
        return figures_of(unloaded, await processor.of(BARE_JOBS, bare.run(BARE_JOBS, IN_FLIGHT)))

    async def with_callbacks() -> dict[str, float]:
        unloaded = await callbacks.run(UNLOADED, 1)
        return figures_of(unloaded, await processor.of(BARE_JOBS, callbacks.run(BARE_JOBS, IN_FLIGHT)))

    async def as_documented() -> dict[str, float]:
        unloaded = await nats_py.run(UNLOADED, 1)
        return figures_of(unloaded, await processor.of(NATS_PY_JOBS, nats_py.run(NATS_PY_JOBS, IN_FLIGHT)))

    async def over_http() -> dict[str, float]:
        unloaded = await load.send(empty, "", ["none"], UNLOADED, 1)
        loaded = await processor.of(BARE_JOBS, load.send(empty, "", ["none"], BARE_JOBS, IN_FLIGHT))
        return figures_of(unloaded, loaded)

    for side in (through_the_gateway, with_tasks):
        await side()
    rounds_of = await interleaved(
        rounds,
        gateway=through_the_gateway,
        bare=with_tasks,
        callbacks=with_callbacks,
        http=over_http,
        nats_py=as_documented,
    )
    medians = {
        side: {figure: median_of_finite(values, figure) for figure in values[0]} for side, values in rounds_of.items()
    }
    report(medians, rounds_of, rounds, product.counters.replies_duplicate)


def median_of_finite(rounds: list[dict[str, float]], figure: str) -> float:
    finite = [values for values in rounds if math.isfinite(values[figure])]
    return median(finite, figure) if finite else math.nan


def report(
    medians: dict[str, dict[str, float]], rounds_of: dict[str, list[dict[str, float]]], rounds: int, duplicate: int
) -> None:
    labels = {
        "gateway": "gateway → queue → worker",
        "bare": "lean loop, a task per job",
        "callbacks": "lean loop, callbacks only",
        "http": "empty HTTP handler",
        "nats_py": "bare loop, as documented",
    }
    print(f"{IN_FLIGHT} in flight, {4 * PROMPT_TOKENS} B prompts, medians of {rounds} rounds")
    print_table(
        ("", "per s", "p50 ms", "p50 ms, one in flight", "per s by round"),
        [
            (
                labels[side],
                f"{values['per_s']:.0f}",
                f"{values['p50_ms']:.1f}",
                f"{values['unloaded_ms']:.2f}",
                " ".join(f"{one['per_s']:.0f}" for one in rounds_of[side]),
            )
            for side, values in medians.items()
        ],
    )
    processes = ("coordinator", "worker", "nats-server", "load generator")
    processor_us = {
        side: {name: round(values.get(name, 0.0)) for name in processes} for side, values in medians.items()
    }
    print("processor time per job, µs")
    print_table(
        ("", *processes, "total"),
        [(labels[side], *used.values(), sum(used.values())) for side, used in processor_us.items()],
    )
    gateway, bare, callbacks, http, nats_py = (medians[side] for side in labels)
    ratio = gateway["per_s"] / nats_py["per_s"]
    ratio_lean = gateway["per_s"] / bare["per_s"]
    limit_ms = LATENCY_GOAL * bare["unloaded_ms"] + http["unloaded_ms"]
    print(
        f"throughput: {ratio:.2f} of the documented loop (goal {GOAL}), {ratio_lean:.2f} of the lean one, "
        f"{gateway['per_s'] / callbacks['per_s']:.2f} of the lean one with callbacks only"
    )
    print(f"one in flight: {gateway['unloaded_ms']:.2f} ms (goal {limit_ms:.2f} ms: {LATENCY_GOAL:.0f} × bare + HTTP)")
    finish(
        "queue",
        turns_per_s=round(gateway["per_s"], 1),
        lean_jobs_per_s=round(bare["per_s"], 1),
        callbacks_jobs_per_s=round(callbacks["per_s"], 1),
        http_requests_per_s=round(http["per_s"], 1),
        bare_jobs_per_s=round(nats_py["per_s"], 1) if math.isfinite(ratio) else None,
        ratio_lean=round(ratio_lean, 4),
        processor_us=processor_us,
        unloaded_ms=round(gateway["unloaded_ms"], 3),
        unloaded_lean_ms=round(bare["unloaded_ms"], 3),
        unloaded_callbacks_ms=round(callbacks["unloaded_ms"], 3),
        unloaded_http_ms=round(http["unloaded_ms"], 3),
        unloaded_goal_ms=round(limit_ms, 3),
        rounds=rounds,
        replies_duplicate=duplicate,
        ratio=ratio if math.isfinite(ratio) else 0.0,
        goal=GOAL,
        ok=ratio >= GOAL and gateway["unloaded_ms"] <= limit_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare-worker", nargs=3, metavar=("DIRECTORY", "URL", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--make-model", type=Path, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.bare_worker:
        directory, url, name = options.bare_worker
        asyncio.run(bare_worker(name, Path(directory), url))
    elif options.make_model:
        # In a process of its own: what torch and transformers leave on the heap does not belong to the coordinator.
        from tiny_model import make_tiny_model

        make_tiny_model(options.make_model)
    else:
        with tempfile.TemporaryDirectory(prefix="aether-bench-") as directory:
            asyncio.run(benchmark(Path(directory), options.rounds))


if __name__ == "__main__":
    main()
