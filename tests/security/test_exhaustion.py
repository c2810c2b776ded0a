"""What one hostile worker can use up, and that it is no more than docs/security.md says.

Each flood is bounded, and goes on while an honest worker answers a turn: that must come within `BOUND_S`.
"""

import asyncio
import itertools
import json
import time
from pathlib import Path

import pytest
from aether_common.wire import Heartbeat, Job
from security.raw import Raw, line
from security.world import HOSTILE, VICTIMS, World, registration, reply_for, world

BOUND_S = 20.0
HONEST = VICTIMS[0]


async def honest_turn(target: World) -> float:
    """Seconds in which the honest worker answers the job that it holds; a refused reply is tried again."""
    began = time.monotonic()
    job = Job.decode(target.held[HONEST].data)
    turn = target.coordinator.dispatcher.turns[job.job]
    reply = reply_for(job, worker=HONEST).encode()
    victim, inbox = target.victims[HONEST], target.inbox(HONEST)
    async with asyncio.timeout(BOUND_S):
        while not turn.answer.done():
            stored = await victim.request(target.names.reply(HONEST, job.job), reply, inbox=f"{inbox}.stored")
            # A refusal names a sequence as well: 0.
            if stored is not None and b'"error"' not in stored.data:
                await asyncio.shield(turn.answer)
            else:
                await asyncio.sleep(0.1)
        done = await victim.request(target.held[HONEST].reply, b"+ACK", inbox=f"{inbox}.acked")
        assert done is not None
    return time.monotonic() - began


async def answered_beat(target: World, worker: str) -> None:
    """The worker's heartbeat is answered, and says nothing bad."""
    beat = Heartbeat(worker=worker, incarnation="1", clock=time.time())
    inbox = f"{target.inbox(worker)}.beat"
    answer = await target.victims[worker].request(
        target.names.fleet("hb", worker), beat.encode(), inbox=inbox, timeout_s=BOUND_S
    )
    assert answer is not None and b"superseded\xc2\xa7unknown\xc2" in answer.data


async def flood(client: Raw, lines: list[bytes], at_once: int = 200) -> None:
    """Send without waiting for any answer."""
    for block in itertools.batched(lines, at_once):
        await client.send(b"".join(block))
        await asyncio.sleep(0)


def bounded(figure: str, seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{figure}: an honest turn took {seconds:.2f} s (bound {BOUND_S:.0f} s)")
    assert seconds < BOUND_S


async def test_connections_of_one_key_fill_the_account_until_it_is_revoked(tmp_path: Path) -> None:
    async with world(
        tmp_path, limited=True, configuration=lambda text: text.replace("max_connections: 2000", "max_connections: 8")
    ) as target:
        greedy: list[Raw] = []
        while not (greedy and greedy[-1].closed):
            greedy.append(await target.client().open())
        assert len(greedy) == 8 - 3 + 1
        assert greedy[-1].errors == ["maximum account active connections exceeded"]
        # Whoever is connected works on; who comes back must wait.
        assert await honest_turn(target) < BOUND_S
        for worker in VICTIMS:
            await answered_beat(target, worker)
        async with target.client(VICTIMS[1]) as returning:
            assert returning.closed
        target.server.revoke_worker(HOSTILE)
        for client in greedy:
            assert await client.until(lambda client=client: client.closed, 1.0)
            await client.close()
        async with target.client(VICTIMS[1]) as returning:
            assert not returning.closed
        assert not any(victim.closed for victim in target.victims.values())


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


async def test_who_does_not_read_is_disconnected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with world(tmp_path, limited=True) as target:
        await target.coordinator.streams.artifacts.put("large", bytes(16 << 20))
        assert target.server._process is not None
        pid = target.server._process.pid
        before = resident_mib(pid)
        deaf = await target.client().open()
        assert deaf._reading is not None
        deaf._reading.cancel()
        ask = json.dumps({"seq": 1, "batch": 1000}).encode()
        inbox = f"{target.names.inbox(HOSTILE)}.deaf"
        await deaf.send(f"SUB {inbox} 1\r\n".encode())
        await flood(deaf, [line(target.names.artifact_get, ask, reply=inbox)] * 20)
        seconds = await honest_turn(target)
        log = target.server.directory / "nats-server.log"
        async with asyncio.timeout(15):
            while "Slow Consumer" not in log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        grown = resident_mib(pid) - before
        await deaf.close()
        for worker in VICTIMS:
            await answered_beat(target, worker)
        target.coordinator.check()
        assert not any(victim.closed for victim in target.victims.values())
    with capsys.disabled():
        print(f"\n320 MiB asked for and not read: nats-server grew by {grown:.0f} MiB")
    assert grown < 320
    bounded("320 MiB asked for and not read", seconds, capsys)


async def test_a_flood_of_replies_delays_the_others_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 MiB of garbage into a stream of 16 MiB."""
    async with world(tmp_path, limited=True, storage=64 << 20) as target:
        async with target.client() as raw:
            garbage = bytes(2048)
            lines = [line(target.names.reply(HOSTILE, f"flood-{n}"), garbage) for n in range(20_000)]
            flooding = asyncio.create_task(flood(raw, lines))
            await asyncio.sleep(0.2)
            seconds = await honest_turn(target)
            await flooding
            await raw.ping()
            assert not raw.closed
        await target.settle()
        counters = target.coordinator.counters
        assert counters.messages_bad > 1000
        # Everything is drained, nothing of it is kept.
        assert (await target.coordinator.streams.js.stream_info(target.names.replies)).state.messages == 0
        target.coordinator.check()
    bounded(f"20,000 garbage replies ({counters.messages_bad} stored)", seconds, capsys)


async def test_a_flood_of_heartbeats_delays_the_others_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(tmp_path, limited=True) as target:
        async with target.client() as raw:
            carrier, beat = target.carriers()["heartbeat"]
            flooding = asyncio.create_task(flood(raw, [line(carrier, beat)] * 20_000))
            await asyncio.sleep(0.05)
            seconds = await honest_turn(target)
            began = time.monotonic()
            await answered_beat(target, HONEST)
            waited = time.monotonic() - began
            await flooding
        assert target.coordinator.bus.connected.is_set()
        target.coordinator.check()
    bounded(f"20,000 heartbeats (an honest one answered in {waited:.2f} s)", seconds, capsys)


async def test_a_flood_of_registrations_delays_the_others_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(tmp_path, limited=True) as target:
        held = {worker: len(victim.messages) for worker, victim in target.victims.items()}
        async with target.client() as raw:
            target_subject = target.names.fleet("reg", HOSTILE)
            lines = [
                line(target_subject, registration(HOSTILE, incarnation=str(n), window=200).encode())
                for n in range(1_000)
            ]
            flooding = asyncio.create_task(flood(raw, lines))
            await asyncio.sleep(0.05)
            seconds = await honest_turn(target)
            await flooding
            await answered_beat(target, HONEST)
        # Nobody's held poll was answered because of it.
        assert len(target.victims[VICTIMS[1]].messages) == held[VICTIMS[1]]
        target.coordinator.check()
    bounded("1,000 registrations", seconds, capsys)


async def test_a_lane_full_of_jobs_is_nobody_elses(tmp_path: Path) -> None:
    """A worker that takes jobs and never answers holds no more than its window; they are nobody else's."""
    async with world(tmp_path, limited=True) as target:
        inbox = f"{target.names.inbox(HOSTILE)}.take"
        hostile = target.hostile
        await hostile.subscribe(inbox)
        before = len(hostile.messages)
        take = json.dumps({"batch": 10**6, "expires": 2 * 10**9}).encode()
        for _ in range(8):
            await hostile.publish(target.names.next(HOSTILE), take, reply=inbox)
        await hostile.until(lambda: len(hostile.messages) >= before + 120)
        taken = [message for message in hostile.messages[before:] if message.reply]
        assert {message.subject.split(".")[3] for message in taken} == {HOSTILE}
        assert await honest_turn(target) < BOUND_S
