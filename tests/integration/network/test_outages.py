"""Turns through gateway, dispatch and a worker process, when the way between them breaks or the server restarts."""

import asyncio
import time

from chaos.proxy import Proxy
from nats_server import NatsServer

from .conftest import COMPLETION, QUICK, Coordinator, Worker, is_there, thorough, until

CALLS = 24


async def ask(coordinator: Coordinator, count: int = CALLS) -> "list[asyncio.Task[tuple[int, object]]]":
    episodes = [coordinator.open(index) for index in range(count)]
    return [coordinator.ask(episode, [3, 4, 5]) for episode in episodes]


async def answered(coordinator: Coordinator, calls: "list[asyncio.Task[tuple[int, object]]]", timeout: float) -> None:
    """All are answered well, and each answer is in the journal once."""
    done, _ = await asyncio.wait(calls, timeout=timeout)
    assert len(done) == len(calls), f"{len(done)} of {len(calls)} calls are answered"
    for call in calls:
        assert await coordinator.answer(call) == COMPLETION  # type: ignore[arg-type]
    await coordinator.ledger.flush()
    records = coordinator.journal().values()
    assert len(records) == len({record.job for record in records}) == len(calls)
    counters = coordinator.counters
    assert counters.turns_failed == 0
    assert counters.replies - counters.replies_duplicate - counters.replies_refused == len(calls)


async def test_a_restart_of_the_server_loses_nothing_and_nothing_counts_twice(
    coordinator: Coordinator, worker: Worker, server: NatsServer
) -> None:
    await worker.start()
    await is_there(coordinator)
    calls = await ask(coordinator)
    await until(lambda: coordinator.counters.replies >= 4)
    again = asyncio.Event()
    coordinator.bus.on_reconnect(again.set)
    await asyncio.to_thread(server.restart)
    await asyncio.wait_for(again.wait(), 20)
    await coordinator.reconcile()
    await answered(coordinator, calls, 40)


async def test_replies_whose_confirmation_is_lost_come_twice_and_count_once(
    coordinator: Coordinator, worker: Worker, proxy: Proxy
) -> None:
    await worker.start()
    await is_there(coordinator)
    calls = await ask(coordinator)
    await until(lambda: coordinator.counters.replies >= 4)
    # What the worker says arrives, what it is told does not: stored replies look unconfirmed to it.
    seen = coordinator.counters.replies
    proxy.silence(to_target=False)
    await until(lambda: coordinator.counters.replies > seen)
    proxy.cut()
    proxy.mend()
    await until(lambda: coordinator.counters.replies_duplicate > 0)
    await answered(coordinator, calls, 40)


async def test_a_black_hole_in_the_middle_of_everything(coordinator: Coordinator, worker: Worker, proxy: Proxy) -> None:
    """60 s with the real waits when there is time for it, else 6 s with shorter ones."""
    long = thorough()
    seconds = 60.0 if long else 6.0
    code = QUICK.replace("bus.PING_INTERVAL_S, client.OPEN_S", "_, _") if long else QUICK
    coordinator.gateway._turn_deadline_s = 300.0
    await worker.start(code=code)
    await is_there(coordinator)
    calls = await ask(coordinator)
    await until(lambda: coordinator.counters.replies >= 4)
    proxy.silence()
    began, connections = time.monotonic(), proxy.accepted
    # Noticed within a minute, or 3 s; then, after 2 s at most and how busy this machine is, others are tried, in vain.
    await until(lambda: proxy.accepted > connections, timeout=65 if long else 8)
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    proxy.mend()
    await answered(coordinator, calls, 60)
