"""The run's ledger: LMDB with one ordered writer that commits groups of writes with one fsync.

Whatever `enqueue` accepted first is durable no later than what it accepted next. A full disk stops
the writer until there is space; nothing is lost meanwhile, and producers wait (bounded queue).
"""

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import lmdb
from aether_common.errors import DiskError, RunDirectoryError
from aether_common.files import disk_error
from loguru import logger

DATABASES = (
    "run",
    "sources",
    "groups",
    "episodes",
    "journal",
    "dispatches",
    "traces",
    "batches",
    "policies",
    "workers",
)
MAP_SIZE = 1 << 40
"""Sparse: address space, not disk."""
QUEUE = 4096
PACE_S = 0.02
"""Commits begin so far apart while nobody waits for one: each costs an fsync and a page for every place it touches."""
RETRY_S = 5.0
END_S = 10.0
"""How long the end of the writer waits for the commit under way."""


class Write(NamedTuple):
    """Put `value` under `key`, or delete the key when `value` is None."""

    database: str
    key: bytes
    value: bytes | None


class Ledger:
    """Opened once per process; `run` must be running for anything to become durable."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._environment = lmdb.open(
                str(directory), map_size=MAP_SIZE, max_dbs=len(DATABASES), sync=True, writemap=False, max_readers=64
            )
            self._databases = {name: self._environment.open_db(name.encode()) for name in DATABASES}
        except OSError as error:
            raise disk_error(error, directory) from error
        except lmdb.Error as error:
            raise RunDirectoryError(f"the state in {directory} cannot be opened: {error}") from error
        self._waiting: list[Write] = []
        """Accepted, not taken by the writer yet; about `QUEUE` at most."""
        self._next_commit: asyncio.Future[None] | None = None
        """Done when what waits is durable."""
        self._accepted, self._room = asyncio.Event(), asyncio.Event()
        self._failing = False
        self._awaited = asyncio.Event()
        self.with_every_commit: Callable[[], list[Write]] = list
        """Writes added to each commit, for totals that change with almost every write."""

    @property
    def failing(self) -> bool:
        """Whether the last commit failed and is tried again."""
        return self._failing

    def get(self, database: str, key: bytes) -> bytes | None:
        with self._environment.begin(db=self._databases[database], buffers=False) as transaction:
            return transaction.get(key)

    def scan(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Key and value of every record whose key starts with `prefix`, in order of the keys."""
        with self._environment.begin(db=self._databases[database]) as transaction:
            cursor = transaction.cursor()
            found = cursor.set_range(prefix) if prefix else cursor.first()
            while found and cursor.key().startswith(prefix):
                yield cursor.key(), cursor.value()
                found = cursor.next()

    async def enqueue(self, *writes: Write) -> asyncio.Future[None]:
        """Hand writes to the writer as one transaction; the future is done once they are durable.

        The writes of one commit share it: await it shielded.
        """
        while len(self._waiting) >= QUEUE:
            await self._room.wait()
        return self._accept(writes)

    async def commit(self, *writes: Write) -> None:
        """Hand writes to the writer and wait until they are durable."""
        while len(self._waiting) >= QUEUE:
            await self._room.wait()
        self._awaited.set()
        await asyncio.shield(self._accept(writes))

    def _accept(self, writes: tuple[Write, ...]) -> asyncio.Future[None]:
        if self._next_commit is None:
            self._next_commit = asyncio.get_running_loop().create_future()
            self._accepted.set()
        self._waiting += writes
        if len(self._waiting) >= QUEUE:
            self._room.clear()
        return self._next_commit

    def commit_now(self, *writes: Write) -> None:
        """Write and fsync in the calling thread; only before `run` and after it ended. Raises `DiskError`."""
        try:
            self._write(list(writes))
        except (lmdb.Error, OSError) as error:
            raise self._refused(error) from error

    async def run(self) -> None:
        """The writer; ends when cancelled, after what it took is durable."""
        began = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + PACE_S):
                    await self._awaited.wait()
            await self._accepted.wait()
            self._accepted.clear()
            self._awaited.clear()
            began = asyncio.get_running_loop().time()
            writes, self._waiting = self._waiting, []
            committed, self._next_commit = self._next_commit, None
            self._room.set()
            persisting = asyncio.ensure_future(self._persist(writes))
            try:
                await asyncio.shield(persisting)
            except asyncio.CancelledError:
                # A thread must not write to what is closed next; a disk that takes nothing is not waited for.
                await asyncio.wait([persisting], timeout=0 if self._failing else END_S)
                persisting.cancel()
                raise
            if committed is not None and not committed.done():
                committed.set_result(None)

    async def flush(self) -> None:
        """Everything accepted so far is durable on return."""
        await self.commit()

    async def write_file(self, write: Callable[[], None]) -> None:
        """Run `write`, which raises `DiskError` where the disk refuses it, in a thread until it succeeds."""
        while True:
            try:
                await asyncio.to_thread(write)
                self._failing = False
                return
            except DiskError as error:
                await self._wait_for_space(error)

    async def _wait_for_space(self, error: DiskError) -> None:
        logger.error("{}; trying again every {:.0f} s", error, RETRY_S)
        self._failing = True
        await asyncio.sleep(RETRY_S)

    async def _persist(self, writes: list[Write]) -> None:
        while True:
            try:
                await asyncio.to_thread(self._write, writes + self.with_every_commit())
                if self._failing:
                    logger.info("the state is written again")
                self._failing = False
                return
            except (lmdb.Error, OSError) as error:
                await self._wait_for_space(self._refused(error))

    def _refused(self, error: Exception) -> DiskError:
        number = getattr(error, "errno", None) or errno.ENOSPC
        return disk_error(OSError(number, str(error)), Path(self._environment.path()))

    def _write(self, writes: list[Write]) -> None:
        databases = self._databases
        puts: dict[str, list[tuple[bytes, bytes]]] = {name: [] for name in databases}
        with self._environment.begin(write=True) as transaction:
            for database, key, value in writes:
                if value is not None:
                    puts[database].append((key, value))
                    continue
                # In order within a database, where a key may be put and deleted in turn.
                if items := puts[database]:
                    transaction.cursor(databases[database]).putmulti(items)
                    items.clear()
                transaction.delete(key, db=databases[database])
            for database, items in puts.items():
                if items:
                    transaction.cursor(databases[database]).putmulti(items)

    def close(self) -> None:
        self._environment.close()
