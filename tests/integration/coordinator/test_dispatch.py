"""Which worker gets a job, and when it is taken away from one."""

import asyncio

from aether_common.wire import Reason
from aether_coordinator import fleet as fleet_module

from .conftest import ADAPTER, until


async def test_evaluations_go_first_and_the_oldest_turn_next(start_coordinator, start_worker):
    run = await start_coordinator()
    train, evaluation = run.open(0), run.open(0, kind="eval", group=2)
    run.ask(train, [5])
    await until(lambda: run.dispatcher.waiting == 1)
    run.ask(train, [6])
    await until(lambda: run.dispatcher.waiting == 2)
    run.ask(evaluation, [7])
    await until(lambda: run.dispatcher.waiting == 3)
    worker = await start_worker(slots=1)
    order = []
    for _ in range(3):
        job = await worker.next()
        order.append((job.kind, job.prompt[0]))
        await worker.reply(job, [2])
    assert order == [("eval", 7), ("train", 5), ("train", 6)]


async def test_the_window_bounds_what_lies_on_a_lane(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker(slots=2, prefetch=1)
    episode = run.open()
    calls = [run.ask(episode, [5 + number]) for number in range(5)]
    await until(lambda: (run.dispatcher.running, run.dispatcher.waiting) == (3, 2))
    assert len(await run.pending_until(lambda pending: len(pending) == 3)) == 3
    for _ in calls:
        job = await worker.next()
        assert run.dispatcher.running <= 3
        await worker.reply(job, [2])
    assert [await run.answer(call) for call in calls] == [[2]] * 5


async def test_a_session_stays_where_its_prefix_is(start_coordinator, start_worker):
    run = await start_coordinator()
    workers = {name: await start_worker(name) for name in ("w1", "w2")}
    holders: dict[str, set[str]] = {"one": set(), "two": set()}
    groups = {"one": run.open(0, group=1), "two": run.open(0, group=2)}
    for turn in range(3):
        calls = {session: run.ask(groups[session], [5 + turn], session=session) for session in groups}
        await until(lambda: sum(worker.jobs.qsize() for worker in workers.values()) == 2)
        for worker in workers.values():
            while not worker.jobs.empty():
                job = worker.jobs.get_nowait()
                holders[job.session].add(worker.name)
                await worker.reply(job, [2])
        for call in calls.values():
            await run.answer(call)
    assert sorted(holder for names in holders.values() for holder in names) == ["w1", "w2"]


async def test_a_worker_with_the_adapter_is_preferred(start_coordinator, start_worker):
    run = await start_coordinator()
    await start_worker("w1")
    loaded = await start_worker("w2")
    loaded.adapters = [ADAPTER]
    await loaded.beat()
    run.ask(run.open(), [5])
    assert (await loaded.next()).adapter == ADAPTER


async def test_a_poison_job_fails_after_three_workers(start_coordinator, start_worker):
    run = await start_coordinator()
    workers = [await start_worker(name) for name in ("w1", "w2", "w3")]
    episode = run.open()
    call = run.ask(episode, [5])
    seen: list[tuple[str, int]] = []
    # Who cannot read a job cannot echo its dispatch number: that counts as well.
    for kind, reason in (("returned", Reason.ENGINE), ("error", Reason.UNREADABLE), ("returned", Reason.ADAPTER)):
        await until(lambda: any(not worker.jobs.empty() for worker in workers))
        (worker,) = [worker for worker in workers if not worker.jobs.empty()]
        job = worker.jobs.get_nowait()
        seen.append((worker.name, job.dispatch))
        await worker.reply(job, kind=kind, reason=reason, dispatch=0 if kind == "error" else job.dispatch)
    status, body = await call
    assert status == 503 and "3 attempts failed" in body["error"]["message"]
    assert sorted(name for name, _ in seen) == ["w1", "w2", "w3"]
    assert [dispatch for _, dispatch in seen] == [0, 1, 2]
    assert (run.counters.turns_failed, run.counters.jobs_returned, run.counters.jobs_reassigned) == (1, 3, 3)
    await run.ledger.flush()
    await run.pending_until(lambda jobs: not jobs)
    assert run.journal() == {}


async def test_drain_and_cancellation_do_not_count(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    call = run.ask(run.open(), [5])
    for dispatch, reason in enumerate([Reason.DRAIN, Reason.CANCELLED, Reason.SUPERSEDED] * 2):
        job = await worker.next()
        assert job.dispatch == dispatch
        await worker.give_back(job, reason)
    await worker.reply(await worker.next(), [7, 2])
    assert await run.answer(call) == [7, 2]
    assert (run.counters.turns_failed, run.counters.jobs_returned) == (0, 6)


async def test_the_jobs_of_a_predecessor_are_dispatched_anew(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    call = run.ask(run.open(), [5])
    job = await worker.next()
    worker.held.clear()
    await worker.register(incarnation="2")
    again = await worker.next()
    assert (again.job, again.dispatch) == (job.job, 1)
    assert run.dispatcher.turns[job.job].failures == [], "supersession does not count against the job"
    await worker.reply(job, [6, 2], incarnation="1")
    await until(lambda: run.counters.replies_refused == 1)
    await worker.reply(again, [7, 2])
    assert await run.answer(call) == [7, 2]
    worker.incarnation = "1"
    assert (await worker.beat()).superseded


async def test_the_jobs_of_a_lost_worker_go_to_others(start_coordinator, start_worker, monkeypatch):
    monkeypatch.setattr(fleet_module, "DEAD_S", 1.0)
    run = await start_coordinator()
    silent, other = await start_worker("w1"), await start_worker("w2")
    call = run.ask(run.open(), [5])
    job = await silent.next()
    silent.silent = True
    moved = await other.next()
    assert (moved.job, moved.dispatch) == (job.job, 1)
    assert run.fleet.workers["w1"].lost and run.dispatcher.turns[job.job].failures == ["w1"]
    # What it publishes when it comes back does not count any more.
    await silent.reply(job, [6, 2])
    await until(lambda: run.counters.replies_refused == 1)
    assert not call.done()
    await other.reply(moved, [7, 2])
    assert await run.answer(call) == [7, 2]
    assert (await silent.beat()).unknown


async def test_a_stalled_job_goes_to_another_worker_and_a_slow_one_stays(start_coordinator, start_worker, monkeypatch):
    run = await start_coordinator()
    monkeypatch.setattr(run.fleet, "_stall_s", 1.5)
    first = await start_worker("w1")
    calls = [run.ask(run.open(index), [5 + index]) for index in range(2)]
    dead, slow = await first.next(), await first.next()
    other = await start_worker("w2")
    first.tokens = {dead.job: 3, slow.job: 0}

    async def generate() -> None:
        while True:
            first.tokens[slow.job] += 1
            await asyncio.sleep(0.3)

    generating = asyncio.create_task(generate())
    moved = await other.next()
    assert (moved.job, moved.dispatch) == (dead.job, 1)
    assert run.dispatcher.turns[dead.job].failures == ["w1"]
    # The worker is told to stop it; the other job is still its own.
    await until(lambda: first.state.cancel == [dead.job])
    assert run.dispatcher.turns[slow.job].worker == "w1"
    generating.cancel()
    await first.reply(slow, [6, 2])
    await other.reply(moved, [7, 2])
    assert sorted([await run.answer(call) for call in calls]) == [[6, 2], [7, 2]]


async def test_a_refused_publish_is_held_and_tried_again(start_coordinator, start_worker, monkeypatch):
    monkeypatch.setattr("aether_coordinator.dispatch.PUBLISH_RETRY_S", 0.05)
    run = await start_coordinator()
    worker = await start_worker()
    info = await run.streams.js.stream_info(run.names.jobs)
    await run.streams.js.publish(run.names.job("nobody", "train", 0, "full"), b"x" * 2000)
    await run.streams.js.update_stream(info.config.evolve(max_bytes=2100))
    call = run.ask(run.open(), [5])
    await until(lambda: run.dispatcher.running == 1)
    await asyncio.sleep(0.3)
    assert worker.jobs.empty() and not call.done()
    await run.streams.purge_job("full")
    await worker.reply(await worker.next(), [7, 2])
    assert await run.answer(call) == [7, 2]


async def test_a_reply_that_cannot_be_right_counts_against_the_job(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    call = run.ask(run.open(), [5])
    nan = b"\x00\x00\xc0\x7f"
    for wrong in ({"adapter": "b" * 64}, {"logprobs": nan + nan}):
        await worker.reply(await worker.next(), [7, 2], **wrong)
    await until(lambda: run.counters.replies_refused == 2)
    await worker.reply(await worker.next(), [7, 2])
    assert await run.answer(call) == [7, 2]


async def test_a_deadline_fails_the_turn_as_infrastructure(start_coordinator):
    run = await start_coordinator()
    episode = run.open()
    call = run.ask(episode, [5])
    await until(lambda: run.dispatcher.turns)
    next(iter(run.dispatcher.turns.values())).deadline = 0.0
    status, body = await asyncio.wait_for(call, 10)
    assert status == 503 and "waiting for a worker" in body["error"]["message"]


async def test_a_turn_waits_for_its_worker_unless_a_slot_would_idle(start_coordinator, start_worker):
    run = await start_coordinator()
    workers = {name: await start_worker(name, slots=1, prefetch=1) for name in ("w1", "w2")}
    episodes = {name: run.open(group=number + 1) for number, name in enumerate(workers)}
    homes = {}
    for name in workers:  # One after the other: the second finds the first one's slot taken.
        run.ask(episodes[name], [5], session=name)
        await until(lambda: any(not worker.jobs.empty() for worker in workers.values()))
        (home,) = [worker for worker in workers.values() if not worker.jobs.empty()]
        homes[name] = (home, await home.next())
    (one, first), (two, second) = homes.values()
    assert one is not two
    # All slots are taken: the places beyond them are kept for those who are at home there.
    for number in range(3):
        run.ask(episodes["w1"], [6 + number], session="w1")
    await until(lambda: run.dispatcher.waiting == 2)
    assert (await one.next()).prompt[0] == 6
    assert two.jobs.empty()
    # A slot that is free takes the oldest that waits.
    await two.reply(second, [2])
    assert (await two.next()).prompt[0] == 7
    await one.reply(first, [2])
    assert run.counters.turns_failed == 0
