"""Who may work, and what a worker with a valid key may claim."""

import asyncio
import json
import time

import pytest
from aether_common.wire import PROTOCOL, Heartbeat, Poll, Reason, Registration, RegistrationAnswer
from aether_coordinator import fleet as fleet_module
from aether_coordinator import requests
from aether_coordinator.events import read_events
from aether_coordinator.standing import ban, lift, read_standing

from .conftest import IDENTITY, Coordinator, Worker, until


def events(run: Coordinator, *names: str) -> list[tuple[str, str]]:
    """(event, worker) of what was logged; only of these kinds, if any are given."""
    entries, _ = read_events(run.root)
    return [(entry["event"], entry.get("worker", "")) for entry in entries if not names or entry["event"] in names]


def shown(run: Coordinator, name: str):
    return next(row for row in run.fleet.status() if row.name == name)


async def request(worker: Worker, kind: str, message) -> bytes:
    return (await worker.bus.request(worker.server.names.fleet(kind, worker.name), message.encode(), 5)).data


def registration(worker: str, **changes: object) -> Registration:
    fields = {
        "worker": worker,
        "incarnation": "1",
        "protocol_min": 1,
        "protocol_max": 1,
        "engine": "none",
        "slots": 4,
        "window": 4,
        "identity": IDENTITY,
        "max_model_len": 256,
    }
    return Registration.model_validate(fields | changes)


async def fail(run: Coordinator, worker: Worker, reason: Reason = Reason.ENGINE) -> None:
    returned = run.counters.jobs_returned
    await worker.give_back(await worker.next(), reason)
    await until(lambda: run.counters.jobs_returned == returned + 1)


# ---- quarantine ----------------------------------------------------------------------------------------


async def test_a_worker_that_fails_eight_times_is_quarantined_until_it_is_released(start_coordinator, start_worker):
    run = await start_coordinator()
    bad = await start_worker("w1", slots=1)
    episode = run.open()
    calls = [run.ask(episode, [5 + number]) for number in range(10)]
    for number in range(7):
        await fail(run, bad, Reason.ADAPTER if number % 2 else Reason.ENGINE)
    assert shown(run, "w1").state == "connected"
    good = await start_worker("w2", slots=1)
    held = await good.next()
    await fail(run, bad)
    assert shown(run, "w1").state == "quarantined"
    reason = "8 failures in a row, the last: engine_error"
    assert reason in shown(run, "w1").reason
    await until(lambda: read_standing(run.root).quarantined)

    # Its job went to others and did not count; it gets none any more, also after it registered anew.
    await bad.register("2")
    await good.reply(held, [2])

    async def serve() -> None:
        while True:
            await good.reply(await good.jobs.get(), [2])

    serving = asyncio.create_task(serve())
    statuses = [status for status, _ in await asyncio.wait_for(asyncio.gather(*calls), 15)]
    serving.cancel()
    # Alone, it made two turns fail, three times each; the others are answered.
    assert sorted(statuses) == [200] * 8 + [503] * 2
    assert bad.jobs.empty() and shown(run, "w1").running == 0

    # A restart does not free it, the operator does.
    await run.kill()
    run = await start_coordinator(opened=[0])
    assert shown(run, "w1").state == "quarantined" and reason in shown(run, "w1").reason
    await good.stop()
    run.fleet.workers.pop("w2")
    waiting = run.ask(run.episodes["g00000001-e000"], [99])
    await bad.beat()
    await asyncio.sleep(0.3)
    assert bad.jobs.empty() and run.dispatcher.waiting == 1
    released: list[str] = []
    run.fleet.on_released = released.append
    lift(run.root, "w1", "quarantined")
    await run.fleet.look()
    assert released == ["w1"]
    await bad.reply(await bad.next(), [2])
    assert await run.answer(waiting) == [2]
    assert shown(run, "w1").state == "connected" and not shown(run, "w1").reason
    assert ("quarantined", "w1") in events(run)


async def test_a_success_between_ends_the_row(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker("w1", slots=1)
    episode = run.open()
    for number in range(20):
        call = run.ask(episode, [5 + number])
        await fail(run, worker)
        await worker.reply(await worker.next(), [2])
        await run.answer(call)
    assert shown(run, "w1").state == "connected"


async def test_jobs_that_die_with_the_engine_are_one_failure(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker("w1", slots=16)
    others = [await start_worker(name, slots=16) for name in ("w2", "w3")]
    for other in others:
        other.draining = True
        await other.beat()
    episode = run.open()
    for number in range(16):
        run.ask(episode, [5 + number])
    jobs = [await worker.next() for _ in range(16)]
    for other in others:
        other.draining = False
        await other.beat()
    for job in jobs:
        await worker.give_back(job, Reason.ENGINE)
    await until(lambda: run.counters.jobs_returned == 16)
    assert shown(run, "w1").state == "connected" and run.fleet.workers["w1"].failures == 1


async def test_answers_that_are_refused_count_as_failures(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker("w1", slots=1)
    episode = run.open()
    for number in range(8):
        run.ask(episode, [5 + number])
        job = await worker.next()
        await worker.reply(job, [2], seed=job.seed + 1)
        await until(lambda count=number + 1: run.counters.replies_refused == count)
    assert shown(run, "w1").state == "quarantined"
    run.fleet.events.close()
    assert events(run).count(("reply_refused", "w1")) == 6  # Five and a count.


# ---- revocation ----------------------------------------------------------------------------------------


async def test_a_revoked_name_is_out_at_once_and_stays_out(start_coordinator, start_worker):
    run = await start_coordinator()
    episode = run.open()
    revoked = await start_worker("w1")
    call = run.ask(episode, [5])
    job = await revoked.next()
    other = await start_worker("w2")
    run.fleet._records["w1"] = run.fleet._records["w1"].with_(seen_s=0.0)
    ban(run.root, "w1", "revoked", "by the operator")
    await run.fleet.look()
    assert shown(run, "w1").last_seen_s < 60
    again = await other.next()
    assert (again.job, again.dispatch) == (job.job, 1)
    (turn,) = run.dispatcher.turns.values()
    assert turn.failures == []
    assert shown(run, "w1").state == "revoked" and "by the operator" in shown(run, "w1").reason

    # Its connection still stands here (a server elsewhere): nothing that it says counts.
    await revoked.reply(job, [7, 2])
    await until(lambda: run.counters.replies_refused == 1)
    assert (await revoked.beat()).unknown
    answer = RegistrationAnswer.decode(await request(revoked, "reg", registration("w1", incarnation="2")))
    assert not answer.accepted and "its key was revoked" in answer.reason and "worker add w1" in answer.reason
    await other.reply(again, [2])
    assert await run.answer(call) == [2]

    await run.kill()
    run = await start_coordinator()
    assert shown(run, "w1").state == "revoked"
    assert not RegistrationAnswer.decode(await request(revoked, "reg", registration("w1"))).accepted
    lift(run.root, "w1", "revoked")
    await run.fleet.look()
    assert RegistrationAnswer.decode(await request(revoked, "reg", registration("w1"))).accepted
    assert [event for event, worker in events(run, "joined", "refused") if worker == "w1"].count("joined") == 2


async def test_a_rerun_turn_does_not_wait_for_a_worker_that_was_revoked_meanwhile(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker("w1")
    episode = run.open()
    run.ask(episode, [5])
    job = await worker.next()
    await run.kill()
    ban(run.root, "w1", "revoked", "by the operator")
    run = await start_coordinator(opened=[0])
    call = run.ask(run.episodes[episode.record.id], [5])
    other = await start_worker("w2")
    again = await other.next()
    assert (again.job, again.dispatch) == (job.job, 1)
    await other.reply(again, [2])
    assert await run.answer(call) == [2]


# ---- coming and going ----------------------------------------------------------------------------------


async def test_the_log_says_who_comes_and_goes(start_coordinator, start_worker, monkeypatch):
    monkeypatch.setattr(fleet_module, "DEAD_S", 1.0)
    run = await start_coordinator()
    worker = await start_worker("w1")
    await worker.register("1")  # Again, as after a restart of the coordinator: nothing new.
    await worker.register("2")
    worker.draining = True
    await until(lambda: shown(run, "w1").state == "left")
    worker.draining = False
    await worker.register("3")
    worker.silent = True
    await until(lambda: shown(run, "w1").state == "lost")
    await worker.register("3")
    told = [event for event, _ in events(run)]
    assert told == ["joined", "superseded", "left", "came_back", "lost", "came_back"]
    await run.ledger.flush()
    await run.kill()
    run = await start_coordinator()
    assert shown(run, "w1").name == "w1" and run.fleet._records["w1"].seen_s > time.time() - 60


async def test_a_worker_that_left_without_handing_back_is_no_failure_of_its_jobs(
    start_coordinator, start_worker, monkeypatch
):
    monkeypatch.setattr(fleet_module, "DEAD_S", 1.0)
    run = await start_coordinator()
    gone = await start_worker("w1")
    run.ask(run.open(), [5])
    job = await gone.next()
    gone.held.clear()
    gone.draining = True
    await until(lambda: shown(run, "w1").state == "left")
    gone.silent = True
    other = await start_worker("w2")
    assert (await other.next()).job == job.job
    assert run.dispatcher.turns[job.job].failures == [] and shown(run, "w1").state == "left"


async def test_who_cannot_hear_declares_nobody_dead(start_coordinator, start_worker, monkeypatch):
    """While nats-server is away, missing heartbeats say nothing about the workers."""
    monkeypatch.setattr(fleet_module, "DEAD_S", 2.5)
    run = await start_coordinator()
    worker = await start_worker("w1")
    worker.silent = True
    run.bus.connected.clear()
    await asyncio.sleep(4)
    run.bus.connected.set()
    worker.silent = False
    await asyncio.sleep(1.5)
    assert shown(run, "w1").state == "connected" and ("lost", "w1") not in events(run)
    worker.silent = True
    await until(lambda: shown(run, "w1").state == "lost")


async def test_a_worker_that_comes_back_has_the_whole_time_again(start_coordinator, start_worker, monkeypatch):
    monkeypatch.setattr(fleet_module, "DEAD_S", 1.0)
    run = await start_coordinator()
    monkeypatch.setattr(run.fleet, "_stall_s", 3.0)
    worker = await start_worker("w1", slots=1)
    worker.silent = True
    await until(lambda: shown(run, "w1").state == "lost")
    await asyncio.sleep(2)
    call = run.ask(run.open(), [5])
    await worker.register("1")
    worker.silent = False
    job = await worker.next()
    await asyncio.sleep(1.5)
    assert ("stalled", "w1") not in events(run)
    await worker.reply(job, [2])
    assert await run.answer(call) == [2]


async def test_what_a_stalled_worker_is_given_next_has_the_whole_time_again(
    start_coordinator, start_worker, monkeypatch
):
    run = await start_coordinator()
    monkeypatch.setattr(run.fleet, "_stall_s", 3.0)
    worker = await start_worker("w1", slots=1)
    episode = run.open()
    for number in range(3):
        run.ask(episode, [5 + number])
    await until(lambda: events(run, "stalled"))
    await asyncio.sleep(2.2)
    assert len(events(run, "stalled")) == 1 and run.fleet.workers["w1"].failures == 1
    assert worker.state is not None


async def test_registrations_count_in_the_order_in_which_they_came(start_coordinator, start_worker, monkeypatch):
    run = await start_coordinator()
    worker = await start_worker("w1")
    declare = run.streams.declare_lane

    async def slow(name: str, window: int) -> None:
        await asyncio.sleep(0.5 if window == 5 else 0)  # The first one.
        await declare(name, window)

    monkeypatch.setattr(run.streams, "declare_lane", slow)
    older = asyncio.create_task(request(worker, "reg", registration("w1", incarnation="older", window=5)))
    await asyncio.sleep(0.1)
    await request(worker, "reg", registration("w1", incarnation="newer"))
    await older
    assert run.fleet.workers["w1"].incarnation == "newer"


async def test_a_worker_may_register_while_the_lanes_are_declared(start_coordinator, start_worker, monkeypatch):
    run = await start_coordinator()
    await start_worker("w1")
    await start_worker("w2")
    declare, came = run.streams.declare_lane, []

    async def declaring(name: str, window: int) -> None:
        monkeypatch.setattr(run.streams, "declare_lane", declare)
        came.append(await start_worker("w3"))
        await declare(name, window)

    monkeypatch.setattr(run.streams, "declare_lane", declaring)
    await run.fleet.declare_lanes()
    assert came and sorted(run.fleet.workers) == ["w1", "w2", "w3"]


async def test_what_a_worker_says_cannot_move_the_cursor(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker("w1")
    message = registration("w1", engine="e\x1b[2J\n", versions={"vllm\x1b": "1\x9b2"})
    assert RegistrationAnswer.decode(await request(worker, "reg", message)).accepted
    row = shown(run, "w1")
    assert (row.engine, row.versions) == ("e [2J ", {"vllm ": "1 2"})


# ---- what is claimed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"window": 5000}, "a window of 5000 jobs: the window must be at least the slots and at most 4096"),
        ({"slots": 1 << 40, "window": 1 << 40}, "at most 4096"),
        ({"slots": 8, "window": 4}, "8 slots and a window of 4 jobs"),
        ({"protocol_min": 9, "protocol_max": 9}, "it speaks protocol 9..9"),
        ({"identity": IDENTITY.model_copy(update={"weights": "x" * 100_000})}, "it serves another model"),
    ],
)
async def test_a_silly_registration_is_refused_and_never_declared(start_coordinator, start_worker, change, reason):
    run = await start_coordinator()
    worker = await start_worker("w1")
    answer = RegistrationAnswer.decode(await request(worker, "reg", registration("w1", **change)))
    assert not answer.accepted and reason in answer.reason and len(answer.reason) <= 1000
    assert ("refused", "w1") in events(run)
    lane = await run.streams.js.consumer_info(run.names.jobs, "w-w1")
    assert lane.config.max_ack_pending == 8
    assert shown(run, "w1").state == "connected"  # The one before goes on.


async def test_a_check_is_answered_and_registers_nothing(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker("w1")

    async def asked(**change: object) -> RegistrationAnswer:
        answer = await request(worker, "reg", registration("w1", check_only=True, incarnation="9", **change))
        return RegistrationAnswer.decode(answer)

    answer = await asked()
    assert answer.accepted and abs(answer.clock - time.time()) < 5
    assert "it speaks protocol 9..9" in (await asked(protocol_min=9, protocol_max=9)).reason
    assert "dtype" in (await asked(identity=IDENTITY.model_copy(update={"dtype": "bfloat16"}))).reason
    assert run.fleet.workers["w1"].incarnation == "1" and ("refused", "w1") not in events(run)


async def test_two_adjacent_protocols_serve_in_one_run(start_coordinator, start_worker, monkeypatch):
    """A coordinator of the next release, which still takes this one's: each worker is told what to speak."""
    monkeypatch.setattr(fleet_module, "PROTOCOL", PROTOCOL + 1)
    run = await start_coordinator()
    old, new = await start_worker("w1"), await start_worker("w2")
    for worker, newest in ((old, PROTOCOL), (new, PROTOCOL + 1)):
        sent = registration(worker.name, protocol_min=PROTOCOL, protocol_max=newest)
        answer = RegistrationAnswer.decode(await request(worker, "reg", sent))
        assert answer.accepted and answer.protocol == newest
    monkeypatch.setattr(fleet_module, "PROTOCOL_MIN", PROTOCOL + 1)
    answer = RegistrationAnswer.decode(await request(old, "reg", registration("w1")))
    assert not answer.accepted and f"it speaks protocol {PROTOCOL}..{PROTOCOL}" in answer.reason
    assert run.fleet.refused.keys() == {"w1"}


async def test_what_is_too_long_is_a_bad_message(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker("w1")
    worker.silent = True
    messages = [
        ("reg", {**registration("w1").model_dump(), "engine": "e" * 65}),
        ("reg", {**registration("w1").model_dump(), "incarnation": "e" * 65}),
        ("reg", {**registration("w1").model_dump(), "versions": {f"p{number}": "1" for number in range(33)}}),
        ("hb", {**Heartbeat(worker="w1", incarnation="1").model_dump(), "adapters": ["x"]}),
        ("hb", {**Heartbeat(worker="w1", incarnation="1").model_dump(), "adapters": ["a" * 64] * 1025}),
        ("hb", {**Heartbeat(worker="w1", incarnation="1").model_dump(), "running": {"J": 1}}),
        ("hb", {**Heartbeat(worker="w1", incarnation="1").model_dump(), "running": {f"j{n}": 1 for n in range(8193)}}),
        ("poll", {**Poll(worker="w1", incarnation="1", revision=0).model_dump(), "incarnation": "e" * 65}),
    ]
    for kind, body in messages:
        from aether_common.wire import pack

        await worker.bus.client.publish(run.names.fleet(kind, "w1"), pack(body))
    await until(lambda: run.counters.messages_bad == len(messages))
    assert run.fleet.workers["w1"].running == {}


async def test_floods_are_dropped_and_tasks_do_not_pile_up(start_coordinator, start_worker, monkeypatch):
    monkeypatch.setitem(requests.RATES, "Registration", (3, 1.0))
    run = await start_coordinator()
    worker, other = await start_worker("w1"), await start_worker("w2")
    registrations = 0
    declare = run.streams.declare_lane

    async def counted(name: str, window: int) -> None:
        nonlocal registrations
        registrations += 1
        await declare(name, window)

    monkeypatch.setattr(run.streams, "declare_lane", counted)
    before = len(asyncio.all_tasks())
    poll = Poll(worker="w1", incarnation="1", revision=run.fleet._revision).encode()
    beat = Heartbeat(worker="w1", incarnation="1", clock=time.time()).encode()
    for number in range(1000):
        await worker.bus.client.publish(run.names.fleet("poll", "w1"), poll)
        await worker.bus.client.publish(run.names.fleet("hb", "w1"), beat)
        await worker.bus.client.publish(
            run.names.fleet("reg", "w1"), registration("w1", incarnation=str(number)).encode()
        )
    await worker.bus.client.flush()
    assert not (await other.beat()).unknown
    await asyncio.sleep(0.5)
    assert registrations <= 5
    assert len(asyncio.all_tasks()) <= before + 5
    run.fleet.events.close()
    entries, _ = read_events(run.root)
    dropped = [entry for entry in entries if entry["event"] == "refused" and entry["worker"] == "w1"]
    assert len(dropped) == 6 and dropped[-1]["repeated"] > 2000
    assert (run.root / "events.jsonl").stat().st_size < 5000


async def test_only_the_newest_poll_is_held(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker("w1")
    poll = Poll(worker="w1", incarnation="1", revision=run.fleet._revision)
    held = [asyncio.create_task(request(worker, "poll", poll)) for _ in range(5)]
    await asyncio.wait(held, timeout=1)
    assert sum(not task.done() for task in held) == 1
    run.fleet.announce()
    await asyncio.wait(held, timeout=5)
    assert all(task.done() for task in held)


async def test_refused_requests_of_the_gateway_are_told(start_coordinator):
    import aiohttp

    run = await start_coordinator()
    url = f"http://127.0.0.1:{run.gateway.port}/inference/v1/generate"
    secret = {"Authorization": f"Bearer {run.gateway.secret}"}
    async with aiohttp.ClientSession() as client:
        for headers, status in (
            ({}, 401),
            ({"Authorization": f"Bearer {'x' * 43}"}, 401),
            ({"Authorization": run.gateway.secret}, 401),
            ({**secret, "Host": "evil.example"}, 403),
            ({**secret, "Host": "127.0.0.1.evil.example"}, 403),
            ({**secret, "Origin": "http://127.0.0.1"}, 403),
            ({**secret, "Host": "localhost:1"}, 404),
        ):
            async with client.post(url, data=json.dumps({"model": "m"}), headers=headers) as response:
                assert response.status == status, headers
    assert len(run.refused) == 6
    assert run.gateway.secret not in " ".join(run.refused)
