"""What encryption and the two accounts cost: the bare queue loop over wss:// against plain tcp in one account.

    uv run python tests/bench/tls.py [--rounds 5]

Three processes on each side: this one publishes jobs and consumes replies (tcp, as a coordinator) → nats-server → a
worker that pulls, replies and acknowledges, and back; the same loop, window, file storage, publish confirmations and
explicit acknowledgements. Sides: the worker over wss:// in its own account with its least privilege (the product);
the same over ws://; the worker over tcp in the coordinator's account.
"""

import sys
from pathlib import Path

# This folder would hide the standard library's `queue` behind a script of the same name.
sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from typing import Any

from aether_common.bus import Bus
from aether_common.names import Names
from aether_common.tls import Tls
from aether_coordinator.accounts import make_key
from aether_coordinator.pauses import freeze_heap
from aether_coordinator.streams import Streams
from bench._bench import child, finish, interleaved, median, print_table
from bench._loops import CALLBACKS, IN_FLIGHT, PROMPT_TOKENS, Callbacks, figures_of, work
from nats_server import NatsServer

JOBS = 4000
UNLOADED = 300
"""One in flight, per round."""
GOAL = 0.5
LABELS = {"wss": "wss, two accounts", "ws": "ws, two accounts", "tcp": "tcp, one account"}


class OneAccount(NatsServer):
    """Coordinator and worker side by side, without TLS, imports or permissions."""

    def __enter__(self) -> "OneAccount":
        self.directory.mkdir(parents=True)
        worker = make_key()
        (self.directory / f"{CALLBACKS}.seed").write_text(worker.seed)
        (self.directory / "nats-server.conf").write_text(
            f"""
            listen: "127.0.0.1:{self.port}"
            max_payload: 8MB
            jetstream {{ store_dir: "{self.directory / "jetstream"}", max_file: 512MB }}
            websocket {{ listen: "127.0.0.1:{self.websocket_port}", no_tls: true }}
            accounts {{ CORE {{ jetstream: enabled, users: [
                {{ nkey: {self.coordinator.public} }}, {{ nkey: {worker.public} }} ] }} }}
            """
        )
        self.start()
        return self


async def bare_worker(directory: Path, url: str, pull: str) -> None:
    names = Names("test")
    authority = directory / "ca.pem"
    tls = Tls(authority) if authority.is_file() else Tls()
    seed = (directory / f"{CALLBACKS}.seed").read_text()
    bus = Bus(url, seed, names.inbox(CALLBACKS), CALLBACKS, tls)
    await bus.connect()
    await work(bus, names, CALLBACKS, pull)
    await bus.close()


async def benchmark(directory: Path, rounds: int) -> None:
    servers: dict[str, NatsServer] = {
        "wss": NatsServer(directory / "wss", hosts=["localhost"]),
        "ws": NatsServer(directory / "ws"),
        "tcp": OneAccount(directory / "tcp"),
    }
    async with AsyncExitStack() as stack:
        loops: dict[str, Callbacks] = {}
        for side, server in servers.items():
            stack.enter_context(server)
            names = server.names
            url, pull = server.worker_url, names.next(CALLBACKS)
            if side == "tcp":
                url, pull = server.url, f"$JS.API.CONSUMER.MSG.NEXT.{names.jobs}.{names.consumer(CALLBACKS)}"
            else:
                server.add_worker(CALLBACKS)
                await asyncio.sleep(0.2)
            bus = server.coordinator_bus()
            await bus.connect()
            stack.push_async_callback(bus.close)
            streams = Streams(bus, names, "0" * 32, max_age_s=3600, lease_s=30, storage=512 << 20)
            await streams.declare()
            await streams.declare_lane(CALLBACKS, IN_FLIGHT)
            command = [sys.executable, __file__, "--worker", str(server.directory), url, pull]
            worker = await stack.enter_async_context(child(*command, log=directory / f"{side}.log"))
            assert worker.stdout is not None
            if not await worker.stdout.readline():
                raise RuntimeError((directory / f"{side}.log").read_text())
            loops[side] = Callbacks(bus, names)
        freeze_heap()

        def measure(loop: Callbacks) -> Any:
            async def once() -> dict[str, float]:
                return figures_of(await loop.run(UNLOADED, 1), await loop.run(JOBS, IN_FLIGHT))

            return once

        sides = {side: measure(loop) for side, loop in loops.items()}
        for side in sides.values():
            await side()
        report(await interleaved(rounds, **sides), rounds)


def report(rounds_of: dict[str, list[dict[str, float]]], rounds: int) -> None:
    print(f"{IN_FLIGHT} in flight, {4 * PROMPT_TOKENS} B jobs, medians of {rounds} rounds")
    print_table(
        ("", "jobs/s", "p50 ms", "p50 ms, one in flight", "jobs/s by round"),
        [
            (
                LABELS[side],
                f"{median(values, 'per_s'):.0f}",
                f"{median(values, 'p50_ms'):.1f}",
                f"{median(values, 'unloaded_ms'):.2f}",
                " ".join(f"{one['per_s']:.0f}" for one in values),
            )
            for side, values in rounds_of.items()
        ],
    )
    per_s = {side: median(values, "per_s") for side, values in rounds_of.items()}
    ratio = per_s["wss"] / per_s["tcp"]
    print(f"wss with two accounts: {ratio:.2f} of plain tcp in one account (goal {GOAL})")
    finish(
        "tls",
        **{f"{side}_jobs_per_s": round(value, 1) for side, value in per_s.items()},
        **{f"{side}_unloaded_ms": round(median(values, "unloaded_ms"), 3) for side, values in rounds_of.items()},
        rounds=rounds,
        ratio=ratio,
        goal=GOAL,
        ok=ratio >= GOAL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=3, metavar=("DIRECTORY", "URL", "PULL"), help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.worker:
        directory, url, pull = options.worker
        asyncio.run(bare_worker(Path(directory), url, pull))
    else:
        with tempfile.TemporaryDirectory(prefix="aether-bench-") as directory:
            asyncio.run(benchmark(Path(directory), options.rounds))


if __name__ == "__main__":
    main()
