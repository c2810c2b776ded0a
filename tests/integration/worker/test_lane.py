"""Jobs from delivery to acknowledgement, over a real nats-server with a worker's permissions."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aether_common.arrays import unpack_floats, unpack_tokens
from aether_common.bus import Bus
from aether_common.wire import PolicyRef, Reason, ReplyKind, Sampling
from aether_worker import artifacts as artifacts_module
from aether_worker.adapters import AdapterCache
from aether_worker.artifacts import Artifacts
from aether_worker.engine.base import EngineError, Generation, Progress, Request
from aether_worker.engine.null_engine import NullEngine
from aether_worker.lane import Lane
from aether_worker.loaded import LoadedAdapters
from aether_worker.settings import NullSettings
from nats_server import NatsServer

from .conftest import LEASE_S, WORKER, Coordinator, until


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts_module, "RETRY_S", (0.05, 0.2))


class Counting(NullEngine):
    """The null engine, with what was asked of it."""

    def __init__(self, max_model_len: int = 16, **settings: Any) -> None:
        super().__init__(NullSettings(**settings), max_model_len)
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.fail: Exception | None = None

    async def generate(self, request: Request, on_progress: Progress) -> Generation:
        self.asked.append(request.job)
        if self.fail:
            raise self.fail
        try:
            return await super().generate(request, on_progress)
        except asyncio.CancelledError:
            self.aborted.append(request.job)
            raise


class Setup:
    """A lane of two slots and two waiting jobs."""

    def __init__(self, coordinator: Coordinator, bus: Bus, directory: Path, policy: PolicyRef) -> None:
        self.coordinator, self.bus, self.directory, self.policy = coordinator, bus, directory, policy
        self.tasks: list[asyncio.Task[None]] = []

    def lane(self, engine: NullEngine, slots: int = 2, prefetch: int = 2) -> Lane:
        cache = AdapterCache(self.directory / "cache", 1 << 30, Artifacts(self.bus, self.coordinator.names))
        lane = Lane(
            self.bus,
            self.coordinator.names,
            WORKER,
            "incarnation",
            slots=slots,
            prefetch=prefetch,
            engine=engine,
            adapters=LoadedAdapters(engine, cache),
        )
        self.tasks.append(asyncio.create_task(lane.run(LEASE_S)))
        return lane

    async def publish(self, count: int = 1, **changes: Any) -> list[str]:
        jobs = [self.coordinator.job(self.policy, **changes) for _ in range(count)]
        for job in jobs:
            await self.coordinator.publish(job)
        return [job.job for job in jobs]

    async def acknowledged(self) -> None:
        async with asyncio.timeout(10):
            while (await self.coordinator.pending())[0]:  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.02)


@pytest.fixture
async def setup(coordinator: Coordinator, worker_bus: Bus, tmp_path: Path, adapter: Path) -> AsyncIterator[Setup]:
    await coordinator.start(window=4)
    setup = Setup(coordinator, worker_bus, tmp_path, await coordinator.put_adapter(adapter, 3))
    yield setup
    for task in setup.tasks:
        task.cancel()
    await asyncio.wait(setup.tasks, timeout=5)


async def test_jobs_are_answered_then_acknowledged(setup: Setup) -> None:
    lane = setup.lane(Counting(tokens=[9, 8, 7]))
    jobs = await setup.publish(10)
    replies = await setup.coordinator.next_replies(10)
    assert sorted(reply.job for reply in replies) == sorted(jobs)
    reply = replies[0]
    assert (reply.kind, reply.finish_reason, reply.worker) == (ReplyKind.OK, "stop", WORKER)
    assert unpack_tokens(reply.tokens) == [9, 8, 7]
    assert unpack_floats(reply.logprobs) == [-1.0, -1.0, -1.0]
    assert (reply.version, reply.adapter) == (3, setup.policy.adapter)
    assert (reply.key, reply.seed) == (f"{int(reply.job[4:]):064x}", int(reply.job[4:]))
    await setup.acknowledged()
    assert lane.running == {}
    assert lane.tokens_total == 30


async def test_a_redelivery_attaches_and_the_lease_is_extended(setup: Setup) -> None:
    # The job takes longer than two leases.
    engine = Counting(tokens=[1] * 10, tokens_per_s=10 / (2.5 * LEASE_S))
    lane = setup.lane(engine)
    (job,) = await setup.publish(sampling=Sampling(max_tokens=10))
    await until(lambda: lane.running.get(job, 0) > 0)
    # The coordinator publishes it again, as after a store that was lost, and then with the next dispatch.
    await setup.coordinator.js.purge_stream(setup.coordinator.names.jobs)
    again = setup.coordinator.job(setup.policy, job=job, dispatch=1, sampling=Sampling(max_tokens=10))
    await setup.coordinator.publish(again)
    (reply,) = await setup.coordinator.next_replies(1)
    assert (reply.job, reply.dispatch, reply.kind) == (job, 1, ReplyKind.OK)
    await setup.acknowledged()
    assert engine.asked == [job]
    info = await setup.coordinator.js.consumer_info(setup.coordinator.names.jobs, f"w-{WORKER}")
    assert info.num_redelivered == 0


async def test_an_answered_job_that_is_published_again_gets_the_same_reply(setup: Setup) -> None:
    engine = Counting()
    setup.lane(engine)
    job = setup.coordinator.job(setup.policy)
    await setup.coordinator.publish(job)
    (first,) = await setup.coordinator.next_replies(1)
    await setup.acknowledged()
    await setup.coordinator.publish(job)
    (second,) = await setup.coordinator.next_replies(1)
    assert second == first
    await setup.acknowledged()
    assert engine.asked == [job.job]


async def test_unreadable_jobs_are_answered_and_terminated(setup: Setup) -> None:
    setup.lane(Counting())
    names, js = setup.coordinator.names, setup.coordinator.js
    other = setup.coordinator.job(setup.policy)
    newer = other.model_copy(update={"v": 99, "job": "newer"})
    empty = other.model_copy(update={"prompt": b"", "job": "empty"})
    for job, payload, message in (
        ("garbage", b"\xff\xff", "not msgpack"),
        ("mismatch", other.encode(), "the subject says"),
        ("newer", newer.encode(), "protocol version 99"),
        ("empty", empty.encode(), "the prompt is empty"),
    ):
        await js.publish(names.job(WORKER, "train", 0, job), payload)
        (reply,) = await setup.coordinator.next_replies(1)
        assert (reply.job, reply.dispatch, reply.kind, reply.reason) == (job, 0, ReplyKind.ERROR, Reason.UNREADABLE)
        assert message in reply.message
    await js.publish(names.lane(WORKER).replace(">", "odd"), b"x")
    await setup.acknowledged()
    # The credit of all of them is free again.
    assert len(await setup.publish(6)) == len(await setup.coordinator.next_replies(6))


async def test_a_reply_that_the_stream_refuses_is_held_and_tried_again(setup: Setup) -> None:
    names, js = setup.coordinator.names, setup.coordinator.js
    config = (await js.stream_info(names.replies)).config
    config.max_msgs = 1
    await js.update_stream(config)
    engine = Counting()
    lane = setup.lane(engine)
    jobs = await setup.publish(3)
    await until(lambda: len(engine.asked) == 3)
    await asyncio.sleep(0.3)
    assert (await setup.coordinator.pending()) == (2, 1)
    assert len(lane.running) == 2
    replies = await setup.coordinator.next_replies(3)
    assert sorted(reply.job for reply in replies) == sorted(jobs)
    await setup.acknowledged()
    assert len(engine.asked) == 3


async def test_a_reply_survives_a_server_restart(setup: Setup, server: NatsServer) -> None:
    lane = setup.lane(Counting(tokens=[1] * 4, tokens_per_s=8))
    (job,) = await setup.publish()
    await until(lambda: lane.running.get(job, 0) > 0)
    await asyncio.to_thread(server.kill)
    await until(lambda: lane.running.get(job, 0) == 4)
    await asyncio.to_thread(server.start)
    await setup.coordinator.bus.connected.wait()
    (reply,) = await setup.coordinator.next_replies(1)
    assert (reply.job, len(unpack_tokens(reply.tokens))) == (job, 4)
    await setup.acknowledged()


async def test_a_reply_that_no_server_takes_becomes_an_error(setup: Setup) -> None:
    names, js = setup.coordinator.names, setup.coordinator.js
    config = (await js.stream_info(names.replies)).config
    config.max_msg_size = 1024
    await js.update_stream(config)
    setup.lane(Counting(max_model_len=1000, tokens=[1] * 400))
    await setup.publish(sampling=Sampling(max_tokens=400))
    (reply,) = await setup.coordinator.next_replies(1)
    assert (reply.kind, reply.reason) == (ReplyKind.ERROR, Reason.ENGINE)
    assert "more than the server takes" in reply.message


async def test_cancelled_jobs_are_aborted_and_handed_back(setup: Setup) -> None:
    engine = Counting(tokens_per_s=0.1)
    lane = setup.lane(engine)
    jobs = await setup.publish(4)
    await until(lambda: len(engine.asked) == 2 and len(lane.running) == 4)
    lane.cancel([*jobs, "unknown"])
    replies = await setup.coordinator.next_replies(4)
    assert {(reply.kind, reply.reason) for reply in replies} == {(ReplyKind.RETURNED, Reason.CANCELLED)}
    assert sorted(engine.aborted) == sorted(engine.asked)
    await setup.acknowledged()
    assert lane.running == {}


async def test_drain_hands_back_what_waits_and_finishes_what_runs(setup: Setup) -> None:
    engine = Counting(tokens_per_s=8)
    lane = setup.lane(engine)
    await setup.publish(6)
    await until(lambda: len(engine.asked) == 2 and len(lane.running) == 4)
    await lane.drain(Reason.DRAIN, 10)
    replies = await setup.coordinator.next_replies(4)
    kinds = sorted((reply.kind, reply.reason or "") for reply in replies)
    assert kinds == [(ReplyKind.OK, ""), (ReplyKind.OK, ""), *[(ReplyKind.RETURNED, Reason.DRAIN)] * 2]
    assert len(engine.asked) == 2
    # The two that were never delivered are still there for others.
    await asyncio.sleep(0.2)
    assert (await setup.coordinator.pending())[0] == 2


async def test_drain_hands_back_what_takes_too_long(setup: Setup) -> None:
    engine = Counting(tokens_per_s=0.1)
    lane = setup.lane(engine)
    await setup.publish(2)
    await until(lambda: len(engine.asked) == 2)
    await lane.drain(Reason.SUPERSEDED, 0)
    replies = await setup.coordinator.next_replies(2)
    assert {(reply.kind, reply.reason) for reply in replies} == {(ReplyKind.RETURNED, Reason.SUPERSEDED)}


async def test_typed_failures(setup: Setup) -> None:
    engine = Counting()
    lane = setup.lane(engine)
    absent = PolicyRef(version=9, adapter="f" * 64)
    await setup.coordinator.publish(setup.coordinator.job(absent))
    (reply,) = await setup.coordinator.next_replies(1)
    assert (reply.kind, reply.reason) == (ReplyKind.RETURNED, Reason.ADAPTER)
    assert "is not in the run's object store" in reply.message

    await setup.publish(prompt=b"\1\0\0\0" * 16)
    (reply,) = await setup.coordinator.next_replies(1)
    assert (reply.kind, reply.reason) == (ReplyKind.ERROR, Reason.PROMPT_TOO_LONG)
    assert "16 tokens" in reply.message
    assert not lane.engine_failed.is_set()

    for error in (EngineError("gone"), RuntimeError("a bug")):
        engine.fail = error
        await setup.publish()
        (reply,) = await setup.coordinator.next_replies(1)
        assert (reply.kind, reply.reason, reply.message) == (ReplyKind.RETURNED, Reason.ENGINE, str(error))
    assert lane.engine_failed.is_set()


async def test_a_slot_does_not_wait_for_the_confirmation_of_a_reply(setup: Setup) -> None:
    engine = Counting()
    lane = setup.lane(engine, slots=1, prefetch=0)
    publish, stored = lane._replies.publish, asyncio.Event()

    async def far_away(reply: Any) -> None:
        await stored.wait()
        await publish(reply)

    lane._replies.publish = far_away  # type: ignore[method-assign]
    jobs = await setup.publish(3)
    await until(lambda: engine.asked == jobs)
    # Their jobs are held until the replies are stored.
    assert (await setup.coordinator.pending()) == (3, 0)
    assert sorted(lane.running) == sorted(jobs)
    stored.set()
    assert sorted(reply.job for reply in await setup.coordinator.next_replies(3)) == sorted(jobs)
    await setup.acknowledged()
    assert lane.running == {}
