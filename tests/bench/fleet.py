"""A thousand connected idle workers, each with a key, a lane, an outstanding pull and a held poll.

    uv run python tests/bench/fleet.py [--workers 1000]

One process holds the workers: websocket connections of bare protocol that register, beat every 5 s, pull and poll like
real ones. nats-server is the embedded one, this process the coordinator's own parts (registrations, heartbeats and
polls are answered by its fleet). Timed: the start of the server and the declaration of all lanes; `worker add` by the
command; everybody's return after nats-server was killed. Stated: memory and CPU of server and coordinator while idle.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = str(Path(__file__).resolve().parent)
sys.path[:] = [str(Path(_FOLDER).parent), *(path for path in sys.path if str(Path(path).resolve()) != _FOLDER)]

import aiohttp  # noqa: E402
from aether_common.bus import Bus  # noqa: E402
from aether_common.names import Names  # noqa: E402
from aether_common.wire import DesiredState, Heartbeat, Poll, RegistrationAnswer  # noqa: E402
from aether_coordinator.accounts import make_key  # noqa: E402
from aether_coordinator.embedded import EmbeddedServer  # noqa: E402
from aether_coordinator.settings import ServerSettings  # noqa: E402
from aether_coordinator.workers_conf import WorkerKey, write_workers  # noqa: E402
from bench._bench import finish, print_table  # noqa: E402
from integration.coordinator.conftest import IDENTITY, Coordinator  # noqa: E402
from loguru import logger  # noqa: E402
from security.raw import Raw, Received  # noqa: E402
from security.world import registration  # noqa: E402
from tiny_run import toml  # noqa: E402

RUN = "bench"
START_S, ADD_S, BACK_S = 10.0, 1.0, 60.0
IDLE_S = 20.0
"""How long memory and CPU are looked at."""
HEARTBEAT_S, PULL_S = 5.0, 25.0
RECONNECT_S = (0.5, 2.0)
"""Each waits its own time between two tries to connect."""
AT_ONCE = 50
"""Workers that begin at the same time at first; after the restart all do."""
BIN = Path(sys.executable).parent / "aether-coordinator"


# ---- the workers ---------------------------------------------------------------------------------


class Idle:
    """A worker that has nothing to do, for ever."""

    def __init__(self, url: str, names: Names, name: str, seed: str) -> None:
        self.url, self.names, self.name, self.seed = url, names, name, seed
        self.incarnation = os.urandom(8).hex()
        self.wait = random.uniform(*RECONNECT_S)
        self.connections = 0
        self.ready = False
        """Registered, and the server read the pull."""

    async def run(self) -> None:
        while True:
            raw = Raw(self.url, self.seed, self.name)
            with suppress(OSError, aiohttp.ClientError, TimeoutError):
                await asyncio.wait_for(raw.open(), 10)
                if not raw.closed:
                    self.connections += 1
                    await self._work(raw)
            self.ready = False
            await raw.close()
            await asyncio.sleep(self.wait)

    async def _work(self, raw: Raw) -> None:
        """Until the connection is lost."""
        names, inbox = self.names, f"{self.names.inbox(self.name)}.{os.urandom(6).hex()}"
        await raw.subscribe(f"{inbox}.*")
        request = registration(self.name, incarnation=self.incarnation, slots=8, window=16).encode()
        revision, registered, polled, beaten, pulled = 0, 0.0, 0.0, 0.0, 0.0
        while not raw.closed:
            now = time.monotonic()
            if not revision and now - registered > 5:
                registered = now
                await raw.publish(names.fleet("reg", self.name), request, reply=f"{inbox}.reg")
            if revision and now - beaten > HEARTBEAT_S:
                beaten = now
                beat = Heartbeat(worker=self.name, incarnation=self.incarnation, clock=time.time())
                await raw.publish(names.fleet("hb", self.name), beat.encode(), reply=f"{inbox}.hb")
            if revision and now - polled > 35:
                polled = now
                poll = Poll(worker=self.name, incarnation=self.incarnation, revision=revision)
                await raw.publish(names.fleet("poll", self.name), poll.encode(), reply=f"{inbox}.poll")
            if revision and now - pulled > PULL_S:
                pulled = now
                body = {"batch": 16, "expires": int(PULL_S * 1e9), "idle_heartbeat": int(HEARTBEAT_S * 1e9)}
                await raw.publish(names.next(self.name), json.dumps(body).encode(), reply=f"{inbox}.next")
                # The server read it; that it holds it, its own count of waiting pulls says at the end.
                self.ready = await raw.ping()
            await raw.until(lambda: raw.messages or raw.closed, HEARTBEAT_S / 5)
            for message in raw.messages:
                if (answered := self._answer(message)) is not None:
                    revision, polled = answered, 0.0
                elif message.status and message.status != "100 Idle Heartbeat" and message.subject.endswith(".next"):
                    pulled = 0.0
            raw.messages.clear()

    def _answer(self, message: Received) -> int | None:
        """The revision in the answer to a registration or a poll."""
        kind = message.subject.rsplit(".", 1)[-1]
        if message.status or kind not in ("reg", "poll"):
            return None
        if kind == "poll":
            return DesiredState.decode(message.data).revision
        answer = RegistrationAnswer.decode(message.data)
        assert answer.accepted and answer.state, answer.reason
        return answer.state.revision


async def hold_workers(url: str, seeds: Path) -> None:
    """The other process: all workers; a line of figures whenever they change."""
    names = Names(RUN)
    workers = [Idle(url, names, name, seed) for name, seed in json.loads(seeds.read_text()).items()]
    last = None
    async with asyncio.TaskGroup() as tasks:
        for number, worker in enumerate(workers):
            tasks.create_task(worker.run())
            if number % AT_ONCE == 0:
                await asyncio.sleep(0.05)
        while True:
            figures = (sum(worker.ready for worker in workers), sum(worker.connections for worker in workers))
            if figures != last:
                last = figures
                print(*figures, flush=True)
            await asyncio.sleep(0.1)


class Workers:
    """This process's view of the other one."""

    def __init__(self) -> None:
        self.ready = self.connections = 0
        self.changed = asyncio.Event()

    async def follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while data := await process.stdout.readline():
            self.ready, self.connections = map(int, data.split())
            self.changed.set()
        raise RuntimeError("the workers' process ended")

    async def until(self, ready: int, connections: int, timeout_s: float) -> float:
        """Seconds until so many are ready, on at least so many connections since the start."""
        began = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while self.ready < ready or self.connections < connections:
                self.changed.clear()
                await self.changed.wait()
        return time.monotonic() - began


# ---- the central host ----------------------------------------------------------------------------


@dataclass
class Host:
    """What the coordinator's parts need to know of the server."""

    server: EmbeddedServer
    names: Names

    def coordinator_bus(self) -> Bus:
        return Bus(self.server.url, self.server.key_file.read_text().strip(), "_INBOX", "coordinator")


def settings_of(root: Path) -> tuple[Path, ServerSettings]:
    values: dict[str, Any] = {
        "run": RUN,
        "run_root": str(root / "run"),
        "steps": 1,
        "model": str(root),
        "max_model_len": 256,
        "base_model": IDENTITY.model_dump(exclude_none=True),
        "train": [{"name": "train", "taskset": "aether_lowercase", "sampling": {"max_tokens": 8}}],
        "batch": {"groups": 1, "group_size": 2},
        "trainer": {"config": str(root / "trainer.toml")},
    }
    file = root / "server.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()))
    return file, ServerSettings.model_validate(values)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def timed(*command: str) -> float:
    """Seconds of a command, which must succeed."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return time.monotonic() - began


async def lanes_with_a_pull(coordinator: Coordinator) -> int:
    """As the server sees it."""
    count, offset = 0, 0
    while True:
        answer = json.loads(
            (
                await coordinator.bus.client.request(
                    f"$JS.API.CONSUMER.LIST.{coordinator.names.jobs}",
                    json.dumps({"offset": offset}).encode(),
                    timeout=10,
                )
            ).data
        )
        count += sum(consumer["num_waiting"] > 0 for consumer in answer["consumers"])
        offset += len(answer["consumers"])
        if not answer["consumers"] or offset >= answer["total"]:
            return count


async def benchmark(root: Path, count: int) -> None:
    file, settings = settings_of(root)
    server, names = EmbeddedServer(settings), Names(RUN)
    server.prepare()
    add_first = await timed(str(BIN), "worker", "add", "first", "--config", str(file))
    keys = {f"w{number:04d}": make_key() for number in range(count)}
    write_workers(server.workers, names, [WorkerKey(name, key.public) for name, key in keys.items()])
    (root / "seeds.json").write_text(json.dumps({name: key.seed for name, key in keys.items()}))

    began = time.monotonic()
    await server.start()
    started = time.monotonic() - began
    supervised = asyncio.create_task(server.supervise())
    coordinator = await Coordinator(Host(server, names), root / "state").start(lease_s=30)  # type: ignore[arg-type]

    async def declare() -> float:
        """As `run` does at a start and after a reconnect."""
        began = time.monotonic()
        await coordinator.streams.declare()
        for name in keys:
            await coordinator.streams.declare_lane(name, 16)
        return time.monotonic() - began

    declared = await declare()
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--hold", server.websocket_url, str(root / "seeds.json"), stdout=subprocess.PIPE
    )
    workers = Workers()
    following = asyncio.create_task(workers.follow(process))
    try:
        await workers.changed.wait()
        joined = await workers.until(count, count, 300)
        await asyncio.sleep(6)
        assert await lanes_with_a_pull(coordinator) == count

        pid = server._process.pid if server._process else 0
        before, began = (cpu_s(pid), time.process_time()), time.monotonic()
        await asyncio.sleep(IDLE_S)
        wall = time.monotonic() - began
        server_cpu, own_cpu = (100 * (now - then) / wall for now, then in zip(
            (cpu_s(pid), time.process_time()), before, strict=True))  # fmt: skip
        server_mib, own_mib = resident_mib(pid), resident_mib(os.getpid())

        help_s = min([await timed(str(BIN), "worker", "add", "--help") for _ in range(3)])
        adds = [await timed(str(BIN), "worker", "add", f"late-{n}", "--config", str(file)) for n in range(3)]
        add_s = sorted(adds)[1]
        await asyncio.sleep(1)
        assert (workers.ready, workers.connections) == (count, count), "an added worker disturbed others"

        reconnected = asyncio.Event()
        coordinator.bus.on_reconnect(reconnected.set)
        before_restart = time.process_time()
        server.restart()

        async def declare_again() -> float:
            await reconnected.wait()
            return await declare()

        declaring = asyncio.create_task(declare_again())
        back = await workers.until(count, 2 * count, 120)
        declared_again = await declaring
        restart_cpu = time.process_time() - before_restart
        await asyncio.sleep(6)
        assert await lanes_with_a_pull(coordinator) == count
        live = sum(worker.state == "connected" for worker in coordinator.fleet.workers.values())
        assert live == count, f"{live} of {count} are connected"
        coordinator.check()
    finally:
        process.terminate()
        following.cancel()
        await process.wait()
        await coordinator.kill()
        supervised.cancel()
        await server.stop()

    goals = {
        "start_s": ((started + declared), START_S),
        "add_s": (add_s - help_s, ADD_S),
        "back_s": (back, BACK_S),
    }
    print_table(
        (f"{count} workers", "figure", "goal"),
        [
            ("nats-server starts with their keys, s", f"{started:.2f}", ""),
            ("all lanes declared, s", f"{declared:.2f}", ""),
            ("both, s", f"{started + declared:.2f}", f"{START_S:.0f}"),
            ("all joined (50 at a time), s", f"{joined:.1f}", ""),
            ("idle: nats-server, MiB", f"{server_mib:.0f}", ""),
            ("idle: nats-server, % of a core", f"{server_cpu:.1f}", ""),
            ("idle: coordinator, MiB", f"{own_mib:.0f}", ""),
            ("idle: coordinator, % of a core", f"{own_cpu:.1f}", ""),
            ("worker add --help (interpreter, imports), s", f"{help_s:.2f}", ""),
            ("worker add, the first, s", f"{add_first:.2f}", ""),
            (f"worker add, at {count}, s", f"{add_s:.2f}", ""),
            (f"worker add, at {count}, beyond --help, s", f"{add_s - help_s:.2f}", f"{ADD_S:.0f}"),
            ("after kill -9 of nats-server: all back, s", f"{back:.1f}", f"{BACK_S:.0f}"),
            ("meanwhile: coordinator, CPU s", f"{restart_cpu:.1f}", ""),
            ("meanwhile: all lanes declared again, s", f"{declared_again:.1f}", ""),
        ],
    )
    worst = max(value / goal for value, goal in goals.values())
    finish(
        "fleet",
        ratio=worst,
        goal=1.0,
        ok=worst <= 1,
        workers=count,
        **{name: round(value, 2) for name, (value, _) in goals.items()},
        help_s=round(help_s, 2),
        joined_s=round(joined, 2),
        server_mib=round(server_mib),
        server_cpu=round(server_cpu, 1),
        coordinator_mib=round(own_mib),
        coordinator_cpu=round(own_cpu, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--hold", nargs=2, metavar=("URL", "SEEDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    if arguments.hold:
        with suppress(KeyboardInterrupt):
            asyncio.run(hold_workers(arguments.hold[0], Path(arguments.hold[1])))
        return
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(benchmark(Path(directory), arguments.workers))


if __name__ == "__main__":
    main()
