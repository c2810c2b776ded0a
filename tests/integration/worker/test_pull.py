"""The pull loop against a real nats-server, with a worker's permissions."""

import asyncio

from aether_common.bus import Bus
from aether_common.pull import PullLoop
from aether_common.wire import PolicyRef
from nats.aio.msg import Msg
from nats_server import NatsServer

from .conftest import WORKER, Coordinator, until

POLICY = PolicyRef(version=0, adapter="a" * 64)


async def test_never_more_than_the_window_is_in_hand(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer
) -> None:
    # The consumer would give more: the bound is the loop's.
    await coordinator.start(window=100)
    for _ in range(30):
        await coordinator.publish(coordinator.job(POLICY))
    delivered: list[Msg] = []
    pull = PullLoop(worker_bus, server.names.next(WORKER), 4, delivered.append)
    task = asyncio.create_task(pull.run())
    most = 0
    for finished in range(30):
        await until(lambda finished=finished: len(delivered) > finished)
        most = max(most, pull.in_hand)
        assert len(delivered) - finished <= 4
        await delivered[finished].ack()
        pull.release()
    assert most == 4
    assert len({message.subject for message in delivered}) == 30
    await asyncio.sleep(0.2)
    assert (await coordinator.pending())[0] == 0
    task.cancel()


async def test_pulls_outstanding_across_a_restart_are_renewed(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer
) -> None:
    await coordinator.start(window=8)
    delivered: list[Msg] = []
    pull = PullLoop(worker_bus, server.names.next(WORKER), 8, delivered.append)
    task = asyncio.create_task(pull.run())
    await until(lambda: pull.pulls > 0)
    await asyncio.to_thread(server.restart)
    await coordinator.bus.connected.wait()
    await worker_bus.connected.wait()
    for _ in range(8):
        await coordinator.publish(coordinator.job(POLICY))
    await until(lambda: len(delivered) == 8, timeout=8)
    task.cancel()


async def test_a_paused_loop_asks_for_nothing(coordinator: Coordinator, worker_bus: Bus, server: NatsServer) -> None:
    await coordinator.start(window=8)
    delivered: list[Msg] = []
    pull = PullLoop(worker_bus, server.names.next(WORKER), 1, delivered.append)
    task = asyncio.create_task(pull.run())
    for _ in range(3):
        await coordinator.publish(coordinator.job(POLICY))
    await until(lambda: len(delivered) == 1)
    pull.pause()
    await delivered[0].ack()
    pull.release()
    await asyncio.sleep(0.3)
    assert len(delivered) == 1
    task.cancel()


async def test_a_completed_request_is_renewed_without_a_pause(
    coordinator: Coordinator, worker_bus: Bus, server: NatsServer
) -> None:
    await coordinator.start(window=8)
    for _ in range(200):
        await coordinator.publish(coordinator.job(POLICY))
    queue: asyncio.Queue[Msg] = asyncio.Queue()
    pull = PullLoop(worker_bus, server.names.next(WORKER), 8, queue.put_nowait)
    task = asyncio.create_task(pull.run())
    async with asyncio.timeout(5):  # one pause of RETRY_S per request would take 25 × 0.5 s
        for _ in range(200):
            await (await queue.get()).ack()
            pull.release()
    assert pull.in_hand == 0
    task.cancel()
