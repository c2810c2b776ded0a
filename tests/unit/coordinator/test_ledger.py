"""The ordered writer on a real LMDB environment."""

import asyncio
import threading
import time

import pytest
from aether_common.errors import RunDirectoryError
from aether_common.files import FileLock
from aether_coordinator.ledger import Ledger, Write


async def test_writes_become_durable_in_order_and_survive(tmp_path):
    ledger = Ledger(tmp_path)
    writer = asyncio.create_task(ledger.run())
    futures = [await ledger.enqueue(Write("groups", b"g", b"%d" % i)) for i in range(100)]
    await futures[-1]
    assert all(future.done() for future in futures)
    await ledger.commit(Write("groups", b"h", b"1"), Write("groups", b"g", None))
    writer.cancel()
    ledger.close()
    again = Ledger(tmp_path)
    assert list(again.scan("groups")) == [(b"h", b"1")]
    assert again.get("groups", b"g") is None
    again.close()


async def test_puts_and_deletes_of_one_transaction_keep_their_order(tmp_path):
    ledger = Ledger(tmp_path)
    changes = [("g", b"1"), ("h", b"1"), ("g", None), ("g", b"2"), ("h", None), ("i", b"1"), ("i", b"2")]
    ledger.commit_now(*(Write("groups", key.encode(), value) for key, value in changes), Write("journal", b"g", b"3"))
    assert list(ledger.scan("groups")) == [(b"g", b"2"), (b"i", b"2")]
    assert list(ledger.scan("journal")) == [(b"g", b"3")]
    ledger.close()


async def test_scan_by_prefix(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.commit_now(*(Write("journal", key, b"") for key in (b"a/1", b"a/2", b"b/1")))
    assert [key for key, _ in ledger.scan("journal", b"a/")] == [b"a/1", b"a/2"]
    assert [key for key, _ in ledger.scan("journal", b"c")] == []
    ledger.close()


async def test_totals_are_written_with_every_commit(tmp_path):
    ledger = Ledger(tmp_path)
    total = 0
    ledger.with_every_commit = lambda: [Write("run", b"total", b"%d" % total)]
    writer = asyncio.create_task(ledger.run())
    total = 7
    await ledger.commit(Write("groups", b"g", b""))
    assert ledger.get("run", b"total") == b"7"
    writer.cancel()
    ledger.close()


def test_a_lock_names_its_holder(tmp_path):
    lock = FileLock(tmp_path / "lock", "in use")
    with pytest.raises(RunDirectoryError, match=r"in use .*pid \d+"):
        FileLock(tmp_path / "lock", "in use")
    lock.release()
    FileLock(tmp_path / "lock", "in use").release()


async def test_a_cancelled_writer_ends_after_the_commit_under_way(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path)
    write, began = ledger._write, threading.Event()

    def slow(writes: list[Write]) -> None:
        began.set()
        time.sleep(0.2)
        write(writes)

    monkeypatch.setattr(ledger, "_write", slow)
    writer = asyncio.create_task(ledger.run())
    await ledger.enqueue(Write("groups", b"g", b"1"))
    await asyncio.to_thread(began.wait)
    writer.cancel()
    await asyncio.wait([writer])
    assert ledger.get("groups", b"g") == b"1"
    ledger.close()
