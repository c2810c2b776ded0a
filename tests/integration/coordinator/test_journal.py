"""The turn journal from the gateway to the worker and back: what is paid for once, and what a restart finds."""

import pytest
from aether_common.arrays import unpack_tokens
from aether_common.wire import Reason
from aether_coordinator.ledger import Write

from .conftest import ADAPTER, until


async def test_parallel_equal_calls_get_an_answer_each(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    episode = run.open()
    calls = [run.ask(episode, [5, 6]) for _ in range(3)]
    jobs = [await worker.next() for _ in calls]
    # The k-th equal request is the k-th job, with a seed of its own.
    assert sorted(job.key[-6:] for job in jobs) == ["000000", "000001", "000002"]
    assert len({job.seed for job in jobs}) == len({job.job for job in jobs}) == 3
    for number, job in enumerate(jobs):
        await worker.reply(job, [10 + number, 2])
    answers = [await run.answer(call) for call in calls]
    assert sorted(answers) == [[10, 2], [11, 2], [12, 2]]
    await run.ledger.flush()
    recorded = run.journal()
    assert sorted(recorded) == sorted(job.key for job in jobs)
    assert {record.worker for record in recorded.values()} == {"w1"}
    assert all(len(record.reply) == 64 and record.adapter == ADAPTER for record in recorded.values())
    assert list(run.ledger.scan("dispatches")) == []


async def test_a_call_repeated_after_an_error_takes_the_same_place(start_coordinator, start_worker, monkeypatch):
    monkeypatch.setattr("aether_coordinator.dispatch.MAX_FAILURES", 1)
    run = await start_coordinator()
    worker = await start_worker()
    episode = run.open()
    call = run.ask(episode, [5])
    job = await worker.next()
    await worker.give_back(job, Reason.ENGINE)
    status, body = await call
    assert (status, body["error"]["type"]) == (503, "aether_infrastructure")
    assert "engine_error" in episode.failure
    # Nothing was journaled; the repeated call is the same turn.
    await run.ledger.flush()
    assert run.journal() == {} and list(run.ledger.scan("dispatches")) == []
    again = run.ask(episode, [5])
    repeated = await worker.next()
    assert (repeated.job, repeated.key, repeated.seed) == (job.job, job.key, job.seed)
    await worker.reply(repeated, [7, 2])
    assert await run.answer(again) == [7, 2]
    # The next equal call is the next one.
    third = run.ask(episode, [5])
    assert (await worker.next()).key.endswith("/000001")
    third.cancel()


async def test_agents_of_one_episode_have_sessions_of_their_own(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    episode = run.open()
    solver, critic = run.ask(episode, [5], session="solver"), run.ask(episode, [6], session="critic")
    for job in [await worker.next(), await worker.next()]:
        await worker.reply(job, [9, 2] if job.session == "solver" else [8, 2])
    assert (await run.answer(solver), await run.answer(critic)) == ([9, 2], [8, 2])
    assert episode.waited() > 0


async def test_a_client_that_disconnects_aborts_its_job_and_a_late_answer_is_journaled(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker(slots=1)
    episode = run.open()
    first = run.ask(episode, [5])
    job = await worker.next()
    second = run.ask(episode, [6])
    await until(lambda: run.dispatcher.waiting == 1)
    first.cancel()
    await until(lambda: job.job not in run.dispatcher.turns)
    await run.pending_until(lambda pending: job.job not in pending)
    # The worker hears that it counts no more, and the next turn gets its room.
    await until(lambda: worker.state is not None and job.job in worker.state.cancel)
    # It had finished already: its answer is journaled, and a repeated call is answered from there.
    await worker.reply(job, [7, 2])
    other = await worker.next()
    assert other.job != job.job
    await worker.reply(other, [8, 2])
    assert await run.answer(second) == [8, 2]
    await until(lambda: job.key in run.journal())
    assert await run.answer(run.ask(episode, [5])) == [7, 2]
    assert run.counters.turns_replayed == 1 and run.counters.replies_duplicate == 0
    await run.ledger.flush()
    assert list(run.ledger.scan("dispatches")) == []


async def test_a_call_repeated_after_a_disconnection_is_published_again(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker(slots=1)
    blocking = run.ask(run.open(1), [4])
    held = await worker.next()
    # On the lane of a worker that has not taken it yet.
    run.fleet.workers["w1"].window = 2
    episode = run.open(0)
    call = run.ask(episode, [5])
    await run.pending_until(lambda pending: len(pending) == 2)
    call.cancel()
    await until(lambda: run.dispatcher.orphans)
    again = run.ask(episode, [5])
    await until(lambda: not run.dispatcher.orphans)
    await worker.reply(held, [3, 2])
    job = await worker.next()
    await worker.reply(job, [7, 2])
    assert (await run.answer(blocking), await run.answer(again)) == ([3, 2], [7, 2])
    assert run.counters.turns_replayed == 0


async def test_what_an_aborted_job_leaves_goes_with_its_episode(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    episode = run.open()
    call = run.ask(episode, [5])
    job = await worker.next()
    call.cancel()
    await until(lambda: job.job in run.dispatcher.orphans)
    run.close(episode)
    await until(lambda: not run.dispatcher.orphans)
    await until(lambda: list(run.ledger.scan("dispatches")) == [])
    await worker.reply(job, [7, 2])
    await until(lambda: run.counters.replies_duplicate == 1)
    assert run.journal() == {}


async def test_a_restart_replays_what_was_answered_and_attaches_to_what_is_in_flight(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    episode = run.open()
    answered = []
    for turn in range(3):
        call = run.ask(episode, [5 + turn])
        job = await worker.next()
        await worker.reply(job, [20 + turn, 2])
        answered.append(await run.answer(call))
    run.ask(episode, [8])
    job = await worker.next()
    await run.ledger.flush()
    await run.kill()

    run = await start_coordinator(opened=[0])
    episode = run.episodes["g00000001-e000"]
    assert list(run.dispatcher.orphans) == [job.job]
    for turn in range(3):
        assert await run.answer(run.ask(episode, [5 + turn])) == answered[turn]
    assert run.counters.turns_replayed == 3
    call = run.ask(episode, [8])
    await until(lambda: job.job in run.dispatcher.turns)
    assert run.dispatcher.turns[job.job].worker == "w1" and run.dispatcher.running == 1
    await worker.reply(job, [23, 2])
    assert await run.answer(call) == [23, 2]
    assert worker.jobs.empty(), "nothing was generated twice"
    await run.pending_until(lambda jobs: not jobs)


async def test_an_answer_that_came_while_nobody_listened_waits_in_the_journal(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    run.ask(run.open(), [5])
    job = await worker.next()
    await run.ledger.flush()
    await run.kill()
    await worker.reply(job, [7, 2])

    run = await start_coordinator(opened=[0])
    episode = run.episodes["g00000001-e000"]
    await run.ledger.flush()
    assert list(run.journal()) == [job.key] and run.dispatcher.orphans == {}
    assert await run.answer(run.ask(episode, [5])) == [7, 2]
    assert run.counters.turns_replayed == 1


async def test_an_answer_that_a_killed_coordinator_had_in_hand_comes_again_at_once(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    run.ask(run.open(), [5])
    job = await worker.next()
    await run.ledger.flush()
    run.writer.cancel()  # Taken, never committed, never acknowledged.
    await worker.reply(job, [7, 2])
    await until(lambda: run.counters.replies == 1)
    await run.kill()

    run = await start_coordinator(opened=[0])
    assert await run.answer(run.ask(run.episodes["g00000001-e000"], [5])) == [7, 2]
    assert worker.jobs.empty(), "nothing was generated twice"


@pytest.mark.parametrize("answered", [False, True])
async def test_a_lost_dispatch_record_is_rebuilt(start_coordinator, start_worker, answered):
    """From the pending job, or from its reply."""
    run = await start_coordinator()
    worker = await start_worker()
    run.ask(run.open(), [5])
    job = await worker.next()
    await run.ledger.flush()
    await run.kill()
    if answered:
        await worker.reply(job, [7, 2])

    # As if the process had died between the publish and the commit of the record.
    run = await start_coordinator(opened=[0], fill=(Write("dispatches", job.job.encode(), None),))
    episode = run.episodes["g00000001-e000"]
    if answered:
        assert run.dispatcher.orphans == {}
        assert await run.answer(run.ask(episode, [5])) == [7, 2]
    else:
        record = run.dispatcher.orphans[job.job]
        assert (record.worker, record.dispatch, record.seed, record.adapter) == ("w1", 0, job.seed, ADAPTER)
        again = run.ask(episode, [5])
        await until(lambda: job.job in run.dispatcher.turns)
        await worker.reply(job, [7, 2])
        assert await run.answer(again) == [7, 2]
    assert worker.jobs.empty()


async def test_jobs_of_attempts_that_are_over_are_removed_at_start(start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    run.ask(run.open(), [5])
    job = await worker.next()
    await run.ledger.flush()
    await run.kill()

    run = await start_coordinator(reconcile=False)
    run.open(attempt=1)
    await run.reconcile()
    await run.ledger.flush()
    assert run.dispatcher.orphans == {}
    await run.pending_until(lambda jobs: not jobs)
    assert list(run.ledger.scan("dispatches")) == []
    # Its worker has the place for others.
    assert [known.jobs for known in run.fleet.workers.values()] == [set()]
    await worker.reply(job, [7, 2])
    await until(lambda: run.counters.replies_duplicate == 1)
    assert run.journal() == {}


async def test_a_job_that_the_server_lost_is_published_again(server, start_coordinator, start_worker):
    run = await start_coordinator()
    worker = await start_worker()
    call = run.ask(run.open(), [5])
    job = await worker.next()
    worker.held.clear()
    await run.streams.js.delete_stream(run.names.jobs)
    await run.reconcile()
    await run.streams.declare_lane("w1", worker.window)
    again = await worker.next()
    assert (again.job, again.dispatch) == (job.job, job.dispatch)
    await worker.reply(again, [7, 2])
    assert await run.answer(call) == [7, 2]


async def test_duplicates_and_superseded_dispatches_are_counted_and_refused(start_coordinator, start_worker):
    run = await start_coordinator()
    first, second = await start_worker("w1"), await start_worker("w2")
    call = run.ask(run.open(), [5])
    holder, other = first, second  # Nothing tells them apart, so the name decides.
    job = await holder.next()
    holder.draining = True
    await holder.beat()
    await holder.give_back(job, Reason.DRAIN)
    moved = await other.next()
    assert (moved.job, moved.dispatch) == (job.job, 1)
    await holder.reply(job, [6, 2])  # late, of the superseded dispatch
    await holder.reply(moved, [6, 2])  # a worker that was never asked
    await until(lambda: run.counters.replies_refused == 2)
    assert not call.done()
    await other.reply(moved, [7, 2])
    assert await run.answer(call) == [7, 2]
    await other.reply(moved, [8, 2])
    await until(lambda: run.counters.replies_duplicate == 1)
    await run.ledger.flush()
    (record,) = run.journal().values()
    assert (record.worker, record.dispatch, unpack_tokens(record.tokens)) == (other.name, 1, [7, 2])
