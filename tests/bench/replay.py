"""An episode of 20 recorded turns after a restart: coordinator time until it asks for turn 21.

    uv run python tests/bench/replay.py [--rounds 7]

verifiers' own train client plays a multi-turn episode through the real gateway and ledger. The first 20 turns are
in the journal; the clock runs from the start of the attempt until the dispatcher is asked for the 21st. Judged is the
processor time of this process, which is coordinator, verifiers and train client; the elapsed time on a machine with
other work is shown beside it, and the same number of HTTP requests to an empty handler as the floor.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parent)
sys.path[:] = [str(Path(_FOLDER).parent), *(path for path in sys.path if str(Path(path).resolve()) != _FOLDER)]

import aiohttp  # noqa: E402
from aether_common.arrays import pack_floats, pack_tokens  # noqa: E402
from aether_coordinator.gateway import SECRET_VARIABLE, Gateway, OpenEpisode  # noqa: E402
from aether_coordinator.journal import Claims  # noqa: E402
from aether_coordinator.ledger import Ledger, Write  # noqa: E402
from aether_coordinator.loopback import serve_http  # noqa: E402
from aether_coordinator.records import EpisodeRecord, GroupRecord, TurnRecord  # noqa: E402
from aether_coordinator.rollout import client_config, run_attempt  # noqa: E402
from aether_coordinator.settings import TrainSource  # noqa: E402
from aether_coordinator.sources import load_source, serve  # noqa: E402
from aether_coordinator.status import Counters  # noqa: E402
from aether_coordinator.turn import Turn, TurnFailed  # noqa: E402
from aiohttp import web  # noqa: E402
from bench._bench import finish, print_table  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

TURNS = 20
GOAL_S = 0.5
STOP = 2
ANSWER = [100, 101, 102, 103, 104, 105, 106, STOP]


class Answers:
    """In place of the dispatcher: answers `left` turns and journals them; notes the time of the next, which fails."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.left = 0
        self.asked = self.asked_cpu = 0.0

    async def generate(self, turn: Turn) -> TurnRecord:
        if not self.left:
            self.asked, self.asked_cpu = time.perf_counter(), time.process_time()
            raise TurnFailed("the 21st turn")
        self.left -= 1
        record = TurnRecord(
            job=turn.job,
            worker="w1",
            dispatch=0,
            reply="a" * 64,
            version=turn.version,
            adapter=turn.adapter,
            tokens=pack_tokens(ANSWER),
            logprobs=pack_floats([-0.5] * len(ANSWER)),
            finish_reason="stop",
        )
        await self._ledger.commit(Write("journal", turn.key.journal, record.encode()))
        return record

    def abort(self, job: str) -> None:
        """Nothing is in flight here."""

    def forget_prefixes(self, names: object) -> None:
        """None are kept here."""


async def empty_handler(count: int) -> float:
    """Seconds for `count` requests in a row that do nothing."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"{}")

    app, port, ready = web.Application(), 0, asyncio.Event()
    app.router.add_post("/", answer)

    def listening(actual: int) -> None:
        nonlocal port
        port = actual
        ready.set()

    server = asyncio.create_task(serve_http(app, 0, "port", listening))
    await ready.wait()
    async with aiohttp.ClientSession() as session:
        started = time.perf_counter()
        for _ in range(count):
            async with session.post(f"http://127.0.0.1:{port}/", data=b"x" * 4096) as response:
                await response.read()
        seconds = time.perf_counter() - started
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)
    return seconds


async def measure(directory: Path, rounds: int) -> tuple[list[float], list[float], list[float]]:
    ledger = Ledger(directory / "state")
    writer = asyncio.create_task(ledger.run())
    model = make_tiny_model(directory / "model")
    answers, counters = Answers(ledger), Counters()
    gateway = Gateway(
        ledger,
        answers,  # type: ignore[arg-type]
        counters,
        run="bench",
        seed=0,
        max_model_len=8192,
        turn_deadline_s=60,
        stop_token_ids=frozenset({STOP}),
        vocab_size=259,
    )
    os.environ[SECRET_VARIABLE] = gateway.secret
    settings = TrainSource.model_validate({"name": "s", "taskset": "aether_talk", "sampling": {"max_tokens": 16}})
    source = load_source(settings)
    ready = asyncio.Event()
    server = asyncio.create_task(gateway.serve(0, ready.set))
    await ready.wait()
    client = client_config(gateway, str(model), {"name": "default"})
    seconds, cpu, floor = [], [], []
    async with AsyncExitStack() as stack:
        await serve([source], stack)
        for number in range(1, rounds + 2):
            group = GroupRecord(id=number, kind="train", source="s", task=0, version=0, size=1)
            record = EpisodeRecord(group=number, index=0)
            for recorded in (False, True):
                answers.left = 0 if recorded else TURNS
                replayed = counters.turns_replayed
                episode = OpenEpisode(
                    record=record, group=group, adapter="a" * 64, source=settings, claims=Claims(record.id, 0)
                )
                started, started_cpu = time.perf_counter(), time.process_time()
                outcome = await run_attempt(episode, source, gateway, client, timeout_s=60)
                if answers.left:
                    raise RuntimeError(f"{answers.left} of {TURNS} turns were not asked for: {outcome}")
            if counters.turns_replayed - replayed != TURNS:
                raise RuntimeError(f"{counters.turns_replayed - replayed} of {TURNS} turns were replayed")
            seconds.append(answers.asked - started)
            cpu.append(answers.asked_cpu - started_cpu)
            floor.append(await empty_handler(TURNS + 1))
    for task in (server, writer):
        task.cancel()
    await asyncio.gather(server, writer, return_exceptions=True)
    return seconds[1:], cpu[1:], floor[1:]  # the first one loads the tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir=os.environ.get("AETHER_BENCH_DIR")) as directory:
        seconds, cpu, floor = asyncio.run(measure(Path(directory), rounds))
    median, used, empty = statistics.median(seconds), statistics.median(cpu), statistics.median(floor)
    print_table(
        ["", "median s", "worst s"],
        [
            ["processor time of the coordinator until turn 21", round(used, 3), round(max(cpu), 3)],
            ["elapsed", round(median, 3), round(max(seconds), 3)],
            ["the same requests to an empty handler", round(empty, 3), round(max(floor), 3)],
        ],
    )
    finish(
        "replay",
        ratio=used / GOAL_S,
        goal=1.0,
        ok=used < GOAL_S,
        cpu_seconds=round(used, 4),
        seconds=round(median, 4),
        seconds_worst=round(max(seconds), 4),
        seconds_empty_handler=round(empty, 4),
    )


if __name__ == "__main__":
    main()
