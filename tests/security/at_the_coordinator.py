"""What a worker may send and the coordinator must refuse."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
from aether_common.errors import ConfigError
from aether_common.names import check_token
from aether_common.wire import Heartbeat, Poll, RegistrationAnswer, pack, unpack
from security.raw import line
from security.trying import (
    ACCEPTED,
    CLOSED,
    IGNORED,
    OWN_LANE,
    OWN_REPLY,
    REFUSED,
    Attempt,
    Try,
    flooding,
    send,
)
from security.world import HOSTILE, VICTIMS, World, registration, reply_for


def replying(
    change: Callable[[World, Any], Awaitable[tuple[str, bytes]]],
    counter: str,
    again: bool = False,
    headers: dict[str, str] | None = None,
) -> Try:
    """Publish a reply; `counter` counts how it was refused. `again`: its job is dispatched anew."""

    async def act(world: World) -> str:
        counters, turns = world.coordinator.counters, world.coordinator.dispatcher.turns
        job = await world.dispatched()
        before, turn = getattr(counters, counter), turns[job.job]
        subject, data = await change(world, job)
        stored = await send(world, subject, data, headers)
        if not stored.startswith(ACCEPTED):
            return stored
        await world.settle()
        if turn.answer.done():
            return ACCEPTED
        if again:
            await world.coordinator.pending_until(lambda pending: turn.worker == HOSTILE and job.job in pending)
            if turn.dispatch == job.dispatch:
                return ACCEPTED
        world.coordinator.dispatcher.abort(job.job)
        await world.coordinator.pending_until(lambda pending: job.job not in pending)
        return f"{REFUSED} ({counter})" if getattr(counters, counter) > before else ACCEPTED

    return act


def changed(subject_job: str | None = None, **fields: Any) -> Callable[[World, Any], Awaitable[tuple[str, bytes]]]:
    """The reply that would count, with other fields."""

    async def change(world: World, job: Any) -> tuple[str, bytes]:
        reply = reply_for(job).model_copy(update=fields)
        return world.names.reply(HOSTILE, subject_job or reply.job), reply.encode()

    return change


async def for_another(world: World, _: Any) -> tuple[str, bytes]:
    """The job is a victim's, all of its fields as they should be."""
    turn = next(turn for turn in world.coordinator.dispatcher.turns.values() if turn.worker == VICTIMS[0])
    fields = {"job": turn.job, "dispatch": turn.dispatch, "key": turn.key.journal.decode(), "seed": turn.seed}
    reply = reply_for(world.own_jobs[0]).model_copy(update=fields)
    return world.names.reply(HOSTILE, turn.job), reply.encode()


async def twice(world: World, _: Any) -> tuple[str, bytes]:
    reply = reply_for(world.own_jobs[0])
    return world.names.reply(HOSTILE, reply.job), reply.encode()


def raw_reply(data: bytes, job: str = "garbage") -> Callable[[World, Any], Awaitable[tuple[str, bytes]]]:
    async def change(world: World, _: Any) -> tuple[str, bytes]:
        return world.names.reply(HOSTILE, job), data

    return change


def asking(kind: str, request: bytes, expected: Callable[[World, bytes], str]) -> Try:
    """A fleet request; `expected` judges the answer."""

    async def act(world: World) -> str:
        counters = world.coordinator.counters
        bad = counters.messages_bad
        inbox = f"{world.names.inbox(HOSTILE)}.ask"
        asked = asyncio.create_task(world.hostile.request(world.names.fleet(kind, HOSTILE), request, inbox=inbox))
        while not asked.done() and counters.messages_bad == bad:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if not asked.done():
            asked.cancel()
            return f"{REFUSED} (messages_bad)"
        answer = asked.result()
        return expected(world, answer.data) if answer is not None else IGNORED

    return act


def not_accepted(_: World, data: bytes) -> str:
    answer = RegistrationAnswer.decode(data)
    return ACCEPTED if answer.accepted else f"{REFUSED}: {answer.reason}"


def replies(world: World) -> Iterator[Attempt]:
    counted = (*OWN_REPLY, "stream.jobs.state.", *OWN_LANE, "fleet.w1.", "counters.replies")
    other = world.names.reply(VICTIMS[0], "forged").rsplit(".", 1)[-1]

    def attempt(what: str, change: Any, counter: str, again: bool = False) -> Attempt:
        moved = ("counters.jobs_reassigned",) if again else ()
        return Attempt(
            "reply", what, REFUSED, replying(change, counter, again), (*counted, f"counters.{counter}", *moved)
        )

    yield attempt("for a job of another's", for_another, "replies_refused")
    yield attempt("that names another worker", changed(worker=VICTIMS[0]), "messages_bad")
    yield attempt("that names another job than its subject", changed(other), "messages_bad")
    yield attempt("for a job that was never dispatched", changed("never", job="never"), "replies_duplicate")
    yield attempt("the same a second time", twice, "replies_duplicate")
    yield attempt("of a later dispatch", changed(dispatch=1), "replies_refused")
    yield attempt("a hand-back of a later dispatch", changed(dispatch=7, kind="returned"), "replies_refused")
    yield attempt("with another adapter", changed(adapter="b" * 64), "replies_refused", True)
    yield attempt("of another policy version", changed(version=4), "replies_refused", True)
    yield attempt("with another seed", changed(seed=1), "replies_refused", True)
    yield attempt(
        "with more tokens than asked for", changed(tokens=bytes(400), logprobs=bytes(400)), "replies_refused", True
    )
    yield attempt("without tokens", changed(tokens=b"", logprobs=b""), "replies_refused", True)
    yield attempt("with logprobs for half of the tokens", changed(logprobs=bytes(4)), "replies_refused", True)
    yield attempt("with a logprob that is no number", changed(logprobs=b"\0\0\xc0\x7f" * 2), "replies_refused", True)
    yield attempt("garbage", raw_reply(b"\xc1\xff" * 100), "messages_bad")
    yield attempt("empty", raw_reply(b""), "messages_bad")
    yield attempt("of a protocol of the future", raw_reply(b"\x81\xa1v\x63"), "messages_bad")
    yield attempt("with a wildcard as job id", raw_reply(b"x", "*"), "messages_bad")
    yield attempt("as large as the stream takes", raw_reply(bytes((4 << 20) - 200)), "messages_bad")
    yield Attempt(
        "reply", "larger than the account allows", f"{CLOSED}: Maximum Payload",
        flooding(lambda world: [line(world.names.reply(HOSTILE, "x"), bytes((4 << 20) + 1))]),
    )  # fmt: skip


def fleet_requests(world: World) -> Iterator[Attempt]:
    victim = VICTIMS[0]
    bad = ("counters.messages_bad",)

    def beat(**fields: Any) -> bytes:
        return Heartbeat.model_construct(**{"v": 1, "incarnation": "1", "worker": HOSTILE} | fields).encode()

    yield Attempt("fleet", "a heartbeat that names another", REFUSED, asking("hb", beat(worker=victim), accepting), bad)
    yield Attempt(
        "fleet", "a registration that names another", REFUSED,
        asking("reg", registration(victim).encode(), not_accepted), bad,
    )  # fmt: skip
    poll = Poll(worker=victim, incarnation="1", revision=0)
    yield Attempt("fleet", "a poll that names another", REFUSED, asking("poll", poll.encode(), accepting), bad)
    yield Attempt("fleet", "garbage as a heartbeat", REFUSED, asking("hb", b"\xc1", accepting), bad)
    yield Attempt("fleet", "garbage as a registration", REFUSED, asking("reg", b"\xc1", accepting), bad)
    large = pack({**unpack(beat()), "unknown": bytes(1 << 20)})
    yield Attempt("fleet", "a heartbeat of a megabyte", REFUSED, asking("hb", large, accepting), bad)
    many = pack({**unpack(beat()), "running": {f"{n:064x}": 0 for n in range(9000)}})
    yield Attempt("fleet", "a heartbeat with 9,000 jobs", REFUSED, asking("hb", many, accepting), bad)
    for what, fields in (
        ("a window of a billion jobs", {"window": 10**9}),
        ("a billion slots", {"slots": 10**9}),
        ("a window that no machine counts", {"window": 2**63}),
        ("another model", {"identity": registration(HOSTILE).identity.model_copy(update={"weights": "other"})}),
        ("a protocol of the future", {"protocol_min": 99, "protocol_max": 99}),
        ("too short a context", {"max_model_len": 8}),
    ):
        yield Attempt(
            "fleet", f"a registration with {what}", REFUSED,
            asking("reg", registration(HOSTILE, **fields).encode(), not_accepted), ("refused", "fleet.w1."),
        )  # fmt: skip
    for what, fields in (("a window of nothing", {"window": 0}), ("a name with a dot", {"worker": "w1.x"})):
        yield Attempt(
            "fleet", f"a registration with {what}", REFUSED,
            asking("reg", registration(**({"worker": HOSTILE} | fields)).encode(), not_accepted), bad,
        )  # fmt: skip

    async def jobs_of_another(world: World) -> str:
        """A heartbeat that claims another's jobs: they stay where they are, and this worker is told to stop them."""
        theirs = sorted(world.coordinator.fleet.workers[victim].jobs)
        data = beat(running=dict.fromkeys(theirs, 10))
        return await asking("hb", data, lambda _, answer: REFUSED if theirs[0].encode() in answer else ACCEPTED)(world)

    yield Attempt("fleet", "a heartbeat that claims another's jobs", REFUSED, jobs_of_another, ("fleet.w1.",))


def accepting(_: World, data: bytes) -> str:
    return f"{ACCEPTED}: {data[:60]!r}"


def http(world: World) -> Iterator[Attempt]:
    gateway = f"http://127.0.0.1:{world.coordinator.gateway.port}"
    secret = {"Authorization": f"Bearer {world.coordinator.gateway.secret}"}
    generate = {"model": world.episode.model, "token_ids": [8, 8], "sampling_params": {"temperature": 0.7}}

    def calling(url: str, headers: dict[str, str], method: str = "POST") -> Try:
        async def act(world: World) -> str:
            async with aiohttp.ClientSession() as client:
                timeout = aiohttp.ClientTimeout(total=1)
                async with client.request(method, url, json=generate, headers=headers, timeout=timeout) as answer:
                    return f"{REFUSED}: HTTP {answer.status}" if answer.status >= 400 else ACCEPTED

        return act

    endpoint = f"{gateway}/inference/v1/generate"
    for what, status, headers in (
        ("no secret", 401, {}),
        ("a guessed secret", 401, {"Authorization": "Bearer UNSET"}),
        ("an empty secret", 401, {"Authorization": "Bearer "}),
        ("the secret cut short", 401, {"Authorization": secret["Authorization"][:-1]}),
        ("the secret, from another host name", 403, secret | {"Host": "evil.example"}),
        ("the secret, from a host that begins like ours", 403, secret | {"Host": "127.0.0.1.evil.example"}),
        ("the secret, from a web page", 403, secret | {"Origin": "http://evil.example"}),
        ("the secret, from a page of this machine", 403, secret | {"Origin": "http://localhost"}),
    ):
        yield Attempt("gateway", what, f"{REFUSED}: HTTP {status}", calling(endpoint, headers))
    yield Attempt(
        "gateway", "the models, no secret", f"{REFUSED}: HTTP 401", calling(f"{gateway}/v1/models", {}, "GET")
    )
    worker_port = f"http://127.0.0.1:{world.server.websocket_port}/"
    yield Attempt("gateway", "HTTP to the websocket port", f"{REFUSED}: HTTP 400", calling(worker_port, {}, "GET"))


def worker_names(world: World) -> Iterator[Attempt]:
    def adding(name: str) -> Try:
        async def act(world: World) -> str:
            try:
                check_token(name, "worker name")
            except ConfigError:
                return REFUSED
            return ACCEPTED

        return act

    for what, name in (
        ("with a dot", "w1.x"), ("with a wildcard", "w*"), ("the wildcard", "*"), ("of everything", ">"),
        ("with a space", "w 1"), ("empty", ""), ("of 65 letters", "a" * 65), ("in capitals", "W1"),
        ("with a line end", "w1\n"), ("that closes the user's block", 'x" ] } } }'), ("with a quote", 'w"1'),
    ):  # fmt: skip
        yield Attempt("worker add", f"a name {what}", REFUSED, adding(name))


def supersession(world: World) -> Iterator[Attempt]:
    async def second(world: World) -> str:
        """Another process under the same name registers: the first one is told that it is superseded."""
        inbox = f"{world.names.inbox(HOSTILE)}.second"
        async with world.client() as raw:
            request = registration(HOSTILE, incarnation="2", window=200)
            answer = await raw.request(world.names.fleet("reg", HOSTILE), request.encode(), inbox=inbox)
            assert answer is not None and RegistrationAnswer.decode(answer.data).accepted
        carrier, data = world.carriers()["heartbeat"]
        answer = await world.hostile.request(carrier, data, inbox=inbox)
        assert answer is not None
        return f"{REFUSED}: superseded" if b"superseded\xc3" in answer.data else ACCEPTED

    yield Attempt("twice", "the older of two under one name goes on", f"{REFUSED}: superseded", second, ("fleet.w1.",))
