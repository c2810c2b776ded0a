"""An adapter on its way to a worker process, when the way breaks."""

import time
from pathlib import Path

import pytest
from aether_common.digests import list_files
from chaos.proxy import Proxy

from .conftest import Coordinator, Worker, put_adapter, until

MIB = 24


@pytest.fixture
async def downloading(coordinator: Coordinator, worker: Worker, proxy: Proxy, tmp_path: Path) -> Path:
    """A coordinator that wants a policy of 24 MiB; returns what the worker shall have in the end."""
    policy = await put_adapter(coordinator, tmp_path / "large", MIB)
    coordinator.fleet._wanted = lambda: [policy]
    return worker.adapters / f"v{policy.version}-{policy.adapter}"


async def test_a_cut_in_the_middle_is_resumed(
    coordinator: Coordinator, worker: Worker, proxy: Proxy, downloading: Path, tmp_path: Path
) -> None:
    proxy.cut_after(MIB // 2 << 20)
    await worker.start()
    await until(downloading.exists, timeout=40)
    assert proxy.was_cut.is_set()
    assert list_files(downloading) == list_files(tmp_path / "large")
    assert MIB << 20 < proxy.received < 1.75 * (MIB << 20)
    # It went on, and did not begin again.
    assert "cannot be had" not in worker.log()
    await until(lambda: [w.adapters for w in coordinator.fleet.workers.values()] == [{downloading.name[3:]}])


async def test_a_stall_in_the_middle_is_resumed(
    coordinator: Coordinator, worker: Worker, proxy: Proxy, downloading: Path, tmp_path: Path
) -> None:
    proxy.delay(0.02)  # Else it would be over before anybody looks.
    await worker.start()
    await until(lambda: proxy.received > 4 << 20, timeout=40)
    proxy.silence()
    stalled_at, began = proxy.received, time.monotonic()
    # Longer than the worker waits for data, and than its pings may stay unanswered: it opens another connection.
    before = proxy.accepted
    await until(lambda: proxy.accepted > before)
    assert time.monotonic() - began > 2
    assert not downloading.exists()
    proxy.mend()
    await until(downloading.exists, timeout=40)
    assert list_files(downloading) == list_files(tmp_path / "large")
    assert proxy.received - stalled_at < 1.75 * (MIB << 20)
