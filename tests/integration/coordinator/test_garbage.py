"""Garbage on every subject that a worker or a bystander can reach: counted, acknowledged, and nobody stops reading."""

import asyncio
import random

import msgpack
from aether_common.wire import Heartbeat, Poll, Reply

from .conftest import until


def garbage(seed: int, valid: bytes) -> list[bytes]:
    """Random bytes, truncated and mutated messages, deep nesting, huge lengths, wrong types and versions."""
    draw = random.Random(seed)
    mutated = []
    for _ in range(20):
        data = bytearray(valid)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        mutated.append(bytes(data[: draw.randint(1, len(data))]))
    body = msgpack.unpackb(valid)
    wrong = [msgpack.packb({**body, key: value}) for key in body for value in (None, [[]], {"v": 1}, -1, float("nan"))]
    return [
        b"",
        b"\x91" * 3000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa1v\x01",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1v\xa2\xff\xfe",
        msgpack.packb([1, 2, 3]),
        msgpack.packb({**body, "v": 99}),
        msgpack.packb({1: 2}),
        *(draw.randbytes(draw.randint(1, 200)) for _ in range(40)),
        *mutated,
        *wrong,
    ]


def decodes(kind: type, data: bytes) -> bool:
    try:
        kind.decode(data)
    except Exception:
        return False
    return True


async def test_garbage_on_the_reply_stream(server, start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    valid = Reply(job="j1", dispatch=0, worker="w1", incarnation="1", kind="ok", key="").encode()
    messages = garbage(1, valid)
    for data in messages:
        await worker.bus.client.request(run.names.reply("w1", "j1"), data, timeout=5)
    # A reply without key for an unknown job, and one whose key names a running episode but is none.
    episode = run.open()
    fields = {"dispatch": 0, "worker": "w1", "incarnation": "1", "kind": "error"}
    for key in ("", "/", f"{episode.record.id}/0/" + "x" * 4000, f"{episode.record.id}/0/{'a' * 64}/0"):
        reply = Reply.model_validate({**fields, "job": "j2", "key": key})
        await worker.bus.client.request(run.names.reply("w1", "j2"), reply.encode(), timeout=5)
    await until(lambda: run.counters.messages_bad + run.counters.replies == len(messages) + 4)
    unreadable = sum(not decodes(Reply, data) for data in messages)
    assert run.counters.messages_bad >= unreadable > 60
    call = run.ask(episode, [5])
    await worker.reply(await worker.next(), [7, 2])
    assert await run.answer(call) == [7, 2]
    run.check()
    await run.ledger.flush()
    assert len(run.journal()) == 1
    async with asyncio.timeout(10):  # everything is acknowledged
        while (await run.streams.js.stream_info(run.names.replies)).state.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_garbage_on_the_fleet_subjects(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    beat = Heartbeat(worker="w1", incarnation="1").encode()
    kinds = {"reg": beat, "hb": beat, "poll": Poll(worker="w1", incarnation="1", revision=0).encode()}
    sent = 0
    for kind, valid in kinds.items():
        for data in garbage(2, valid):
            if kind == "reg" or not decodes(Heartbeat if kind == "hb" else Poll, data):
                await worker.bus.client.publish(run.names.fleet(kind, "w1"), data)
                sent += 1
    # A message in another worker's name.
    await worker.bus.client.publish(run.names.fleet("hb", "w1"), Heartbeat(worker="w2", incarnation="1").encode())
    await worker.bus.client.flush()
    await until(lambda: run.counters.messages_bad == sent + 1)
    run.check()
    assert not (await worker.beat()).unknown
    assert (await worker.register("2")).accepted


async def test_garbage_on_lanes_is_removed_by_the_reconciliation(start_coordinator):
    run = await start_coordinator()
    subjects = [
        run.names.job("w1", "train", 0, "j1"),
        f"aether.{run.names.run}.jobs.w1.train.x.j2",
        f"aether.{run.names.run}.jobs.j3",
    ]
    for subject in subjects:
        await run.streams.js.publish(subject, b"\x91" * 100)
    await run.reconcile()
    await run.pending_until(lambda jobs: not jobs)
    assert run.counters.messages_bad == 3
