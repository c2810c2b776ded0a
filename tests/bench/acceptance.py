"""Durable records per second through the ledger's ordered writer, against bare LMDB transactions of the same sizes.

    uv run python tests/bench/acceptance.py [--rounds 5]

256 producers each hand a record of 1 KB to the writer and wait until it is durable, again and again. The bare side
puts the same number of records with the batch sizes that the writer had just used, one fsynced transaction each,
into an environment of its own on the same disk.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import lmdb

# This folder would hide the standard library's `queue` behind tests/bench/queue.py.
_FOLDER = str(Path(__file__).resolve().parent)
sys.path[:] = [str(Path(_FOLDER).parent), *(path for path in sys.path if str(Path(path).resolve()) != _FOLDER)]

from aether_coordinator.ledger import MAP_SIZE, Ledger, Write  # noqa: E402
from aether_coordinator.status import Counters  # noqa: E402
from bench._bench import finish, print_table  # noqa: E402

PRODUCERS = 256
RECORDS = 20_000
"""Per round."""
SIZE = 1024
GOAL = 0.5


class Batches(Ledger):
    """Remembers how many records each commit had."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.sizes: list[int] = []

    def _write(self, writes: list[Write]) -> None:
        self.sizes.append(len(writes))
        super()._write(writes)


async def through_writer(ledger: Batches, records: list[Write]) -> float:
    """Seconds until all are durable."""
    ledger.sizes.clear()
    waiting = iter(records)

    async def produce() -> None:
        for record in waiting:
            await ledger.commit(record)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(PRODUCERS):
            tasks.create_task(produce())
    return time.perf_counter() - started


def bare(environment: lmdb.Environment, database: object, records: list[Write], sizes: list[int]) -> float:
    waiting = iter(records)
    started = time.perf_counter()
    for size in sizes:
        with environment.begin(write=True) as transaction:
            for _, key, value in itertools.islice(waiting, size):
                transaction.put(key, value, db=database)
    return time.perf_counter() - started


async def measure(directory: Path, rounds: int) -> tuple[list[float], list[float], float]:
    ledger = Batches(directory / "ledger")
    counters = Counters()
    ledger.with_every_commit = lambda: [Write("run", b"counters", counters.model_dump_json().encode())]
    writer = asyncio.create_task(ledger.run())
    environment = lmdb.open(str(directory / "bare"), map_size=MAP_SIZE, max_dbs=1, sync=True, writemap=False)
    database = environment.open_db(b"journal")
    ours, theirs, sizes = [], [], []
    keys = itertools.count()
    for _ in range(rounds):
        records = [Write("journal", b"%020d" % next(keys), os.urandom(SIZE)) for _ in range(RECORDS)]
        ours.append(RECORDS / await through_writer(ledger, records))
        batches = [size - 1 for size in ledger.sizes]  # without the totals
        theirs.append(RECORDS / await asyncio.to_thread(bare, environment, database, records, batches))
        sizes.append(statistics.mean(batches))
    writer.cancel()
    environment.close()
    return ours, theirs, statistics.mean(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir=os.environ.get("AETHER_BENCH_DIR")) as directory:
        ours, theirs, size = asyncio.run(measure(Path(directory), rounds))
    ratio = statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
    print_table(
        ["", "records/s", "records per commit"],
        [
            ["writer, 256 producers", round(statistics.median(ours)), round(size)],
            ["bare LMDB", round(statistics.median(theirs)), round(size)],
        ],
    )
    finish(
        "acceptance",
        ratio=ratio,
        goal=GOAL,
        ok=ratio >= GOAL,
        records_per_s=round(statistics.median(ours)),
        bare_records_per_s=round(statistics.median(theirs)),
        records_per_commit=round(size, 1),
    )


if __name__ == "__main__":
    main()
