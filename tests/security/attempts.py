"""What a worker with a valid key tries, and how each attempt must fail."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aether_common.errors import ConfigError
from aether_common.names import check_token
from aether_common.wire import Heartbeat, Poll, RegistrationAnswer, pack, unpack
from aether_coordinator.accounts import make_key
from security.raw import Raw, line, public, sign
from security.world import CARRIED, HOSTILE, VICTIMS, World, changes, registration, reply_for

VIOLATION, NOBODY, REFUSED, IGNORED, CLOSED = (
    "permission violation",
    "no responder",
    "refused",
    "ignored",
    "disconnected",
)
ACCEPTED = "ACCEPTED"
WAIT_S = 0.3
"""For an answer that must not come."""
OWN_REPLY = ("stream.replies.state.", "consumer.replies.coordinator.")
OWN_LANE = ("consumer.jobs.w-w1.",)

Try = Callable[[World], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Attempt:
    group: str
    what: str
    expected: str
    """The beginning of what `act` returns."""
    act: Try
    allowed: tuple[str, ...] = ()
    """Keys of the fingerprint that the attempt may change: the hostile worker's own, and counters of refusals."""
    count: int = 1
    """How many different attempts this one is."""


# ---- ways to try -----------------------------------------------------------------------------------


async def send(world: World, subject: str, data: bytes = b"", headers: dict[str, str] | None = None) -> str:
    """Publish with an own inbox as reply subject, and see what comes."""
    hostile = world.hostile
    hostile.errors.clear()
    sid = await hostile.subscribe(f"{world.names.inbox(HOSTILE)}.try")
    await hostile.publish(subject, data, reply=f"{world.names.inbox(HOSTILE)}.try", headers=headers)
    await hostile.ping()

    def answers() -> list[Any]:
        return [message for message in hostile.messages if message.sid == sid]

    if not hostile.errors:
        await hostile.until(lambda: answers() or hostile.closed, WAIT_S)
    await hostile.send(f"UNSUB {sid}\r\n".encode())
    if hostile.closed:
        return f"{CLOSED}: {hostile.errors}"
    if hostile.errors:
        violated = all("Permissions Violation" in error for error in hostile.errors)
        return VIOLATION if violated else f"{REFUSED}: {hostile.errors[0]}"
    if not answers():
        return IGNORED
    (answer, *_) = answers()
    if answer.status.startswith("503"):
        return NOBODY
    if answer.status[:1] == "4":
        return f"{REFUSED}: {answer.status}"
    if b'"error"' in answer.data:
        return f"{REFUSED}: {json.loads(answer.data)['error'].get('description', '')}"
    return f"{ACCEPTED}: {answer.data[:60]!r}"


def publishing(subject: str, data: bytes = b"x", headers: dict[str, str] | None = None) -> Try:
    return lambda world: send(world, subject, data, headers)


def subscribing(subject: str, queue: str = "") -> Try:
    async def act(world: World) -> str:
        hostile = world.hostile
        hostile.errors.clear()
        sid = await hostile.subscribe(subject, queue)
        await hostile.ping()
        if hostile.errors:
            return VIOLATION if "Permissions Violation for Subscription" in hostile.errors[0] else hostile.errors[0]
        await hostile.send(f"UNSUB {sid}\r\n".encode())
        return ACCEPTED

    return act


def through_replies(target: str | Callable[[World], str]) -> Try:
    """Each permitted request once with `target` as its reply subject."""

    async def act(world: World) -> str:
        subject = target if isinstance(target, str) else target(world)
        hostile = world.hostile
        outcomes: set[str] = set()
        for carrier, data in world.carriers().values():
            hostile.errors.clear()
            await hostile.publish(carrier, data, reply=subject)
            await hostile.ping()
            outcomes.add(IGNORED if not hostile.errors else VIOLATION)
            # The same request is answered after it: whoever answers has dealt with the first.
            answer = await hostile.request(carrier, data, inbox=f"{world.names.inbox(HOSTILE)}.after")
            assert answer is not None, carrier
        return " and ".join(sorted(outcomes))

    return act


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


def connecting(client: Callable[[World], Raw | Awaitable[Raw]], **options: Any) -> Try:
    async def act(world: World) -> str:
        made = client(world)
        raw = made if isinstance(made, Raw) else await made
        try:
            await asyncio.wait_for(raw.open(**options), 5)
            return f"{CLOSED}: {', '.join(raw.errors)}" if raw.closed else ACCEPTED
        except aiohttp.WSServerHandshakeError as error:
            return f"{REFUSED}: HTTP {error.status}"
        finally:
            await raw.close()

    return act


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


# ---- the attempts ----------------------------------------------------------------------------------


def all_attempts(world: World) -> Iterator[Attempt]:
    yield from publishes(world)
    yield from interface(world)
    yield from subscriptions(world)
    yield from acknowledgements(world)
    yield from forgeries(world)
    yield from headers(world)
    yield from replies(world)
    yield from pulls_and_reads(world)
    yield from fleet_requests(world)
    yield from keys(world)
    yield from protocol(world)
    yield from http(world)
    yield from worker_names(world)
    yield from exhaustion(world)
    yield from supersession(world)


def publishes(world: World) -> Iterator[Attempt]:
    names, victim = world.names, VICTIMS[0]
    for what, subject in (
        ("a job on its own lane", names.job(HOSTILE, "train", 3, "forged")),
        ("a job on another's lane", names.job(victim, "train", 3, "forged")),
        ("an evaluation on another's lane", names.job(victim, "eval", 3, "forged")),
        ("a policy", f"$KV.{names.policies}.1"),
        ("the policy of version 0 again", f"$KV.{names.policies}.0"),
        ("the owner key", f"$KV.{names.policies}.owner"),
        ("a chunk of an artefact", names.artifact_chunks("forged")),
        ("the metadata of an artefact", f"$O.{names.artifacts}.M.forged"),
        ("an answer as the owner of the bus", names.owner),
        ("a batch", f"aether.{names.run}.batches.1"),
        ("a reply under another's name", names.reply(victim, "forged")),
        ("a reply under a wildcard name", f"aether.{names.run}.replies.*.forged"),
        ("a reply with a job id of two tokens", names.reply(HOSTILE, "a.b")),
        ("a reply without a job id", f"aether.{names.run}.replies.{HOSTILE}"),
        ("a heartbeat under another's name", names.fleet("hb", victim)),
        ("a registration under another's name", names.fleet("reg", victim)),
        ("a poll under another's name", names.fleet("poll", victim)),
        ("a fleet request of a kind that is none", names.fleet("drain", HOSTILE)),
        ("into another's inbox", f"{names.inbox(victim)}.guess"),
        ("into the coordinator's inbox", "_INBOX.guess"),
        ("into a service's inbox", "_R_.guess"),
        ("to another run", f"aether.other.replies.{HOSTILE}.forged"),
        ("to the flow control of JetStream", "$JS.FC.x"),
        ("to the system", "$SYS.REQ.SERVER.PING"),
        ("to the system, of its account", "$SYS.REQ.ACCOUNT.WORKERS.CONNZ"),
        ("who am I, to the system", "$SYS.REQ.USER.INFO"),
    ):
        yield Attempt("publish", what, VIOLATION, publishing(subject, b"forged"))


def interface(world: World) -> Iterator[Attempt]:
    """JetStream's interface, as it is and as the workers' account maps it."""
    names = world.names
    jobs, replies, bucket, objects = names.jobs, names.replies, f"KV_{names.policies}", names.artifacts_stream
    lane = names.consumer(VICTIMS[0])
    consumer = {"stream_name": jobs, "config": {"ack_policy": "explicit", "filter_subject": names.lane(VICTIMS[0])}}
    durable = {"stream_name": jobs, "config": {**consumer["config"], "durable_name": "thief", "name": "thief"}}
    push = {"stream_name": replies, "config": {"deliver_subject": f"{names.inbox(HOSTILE)}.x", "ack_policy": "none"}}
    stream = {"name": "FORGED", "subjects": [f"aether.{names.run}.>"]}
    calls: list[tuple[str, str, Any]] = [
        ("read the account", "INFO", None),
        ("list the streams", "STREAM.LIST", None),
        ("name the streams", "STREAM.NAMES", None),
        ("create a stream", "STREAM.CREATE.FORGED", stream),
        ("update the job stream", f"STREAM.UPDATE.{jobs}", {"name": jobs, "max_msgs": 1}),
        ("restore a stream", f"STREAM.RESTORE.{jobs}", {}),
        ("take a snapshot", f"STREAM.SNAPSHOT.{jobs}", {"deliver_subject": f"{names.inbox(HOSTILE)}.x"}),
        ("create an ephemeral consumer on another's lane", f"CONSUMER.CREATE.{jobs}", consumer),
        ("create a durable consumer on another's lane", f"CONSUMER.DURABLE.CREATE.{jobs}.thief", durable),
        ("create a consumer by its filter", f"CONSUMER.CREATE.{jobs}.thief.{names.lane(VICTIMS[0])}", durable),
        ("create a consumer that pushes the replies", f"CONSUMER.CREATE.{replies}", push),
        ("move its own lane over another's", f"CONSUMER.CREATE.{jobs}.w-w1.{names.lane(VICTIMS[0])}", durable),
        ("delete another's lane", f"CONSUMER.DELETE.{jobs}.{lane}", None),
        ("delete its own lane", f"CONSUMER.DELETE.{jobs}.{names.consumer(HOSTILE)}", None),
        ("delete the consumer of the replies", f"CONSUMER.DELETE.{replies}.coordinator", None),
        ("pause another's lane", f"CONSUMER.PAUSE.{jobs}.{lane}", {"pause_until": "2099-01-01T00:00:00Z"}),
        ("reset another's lane", f"CONSUMER.RESET.{jobs}.{lane}", {"seq": 1}),
        ("look at another's lane", f"CONSUMER.INFO.{jobs}.{lane}", None),
        ("list the lanes", f"CONSUMER.LIST.{jobs}", None),
        ("pull another's lane by its real name", f"CONSUMER.MSG.NEXT.{jobs}.{lane}", {"batch": 1}),
        ("pull its own lane by its real name", f"CONSUMER.MSG.NEXT.{jobs}.{names.consumer(HOSTILE)}", {"batch": 1}),
        ("pull the replies", f"CONSUMER.MSG.NEXT.{replies}.coordinator", {"batch": 1}),
        ("move the leader", f"STREAM.LEADER.STEPDOWN.{jobs}", None),
        ("move the leader of JetStream", "META.LEADER.STEPDOWN", None),
        ("purge the account", "ACCOUNT.PURGE.CORE", None),
        ("read the metadata by its real name", f"DIRECT.GET.{objects}.$O.{names.artifacts}.M.x", None),
    ]
    for what, name in (("jobs", jobs), ("replies", replies), ("policies", bucket), ("artefacts", objects)):
        calls += [
            (f"look at the stream of {what}", f"STREAM.INFO.{name}", None),
            (f"purge the stream of {what}", f"STREAM.PURGE.{name}", None),
            (f"delete the stream of {what}", f"STREAM.DELETE.{name}", None),
            (f"delete a message of the {what}", f"STREAM.MSG.DELETE.{name}", {"seq": 1}),
            (f"read a message of the {what}", f"STREAM.MSG.GET.{name}", {"seq": 1}),
            (f"read a message of the {what} directly", f"DIRECT.GET.{name}", {"seq": 1}),
        ]
    for what, subject, body in calls:
        data = b"" if body is None else json.dumps(body).encode()
        yield Attempt("JetStream", what, VIOLATION, publishing(f"$JS.API.{subject}", data))
    yield Attempt(
        "JetStream", "purge by the interface of another domain", VIOLATION,
        publishing(f"$JS.hub.API.STREAM.PURGE.{jobs}", b""),
    )  # fmt: skip


def subscriptions(world: World) -> Iterator[Attempt]:
    names, victim = world.names, VICTIMS[0]
    subjects = [
        ">", "*", "*.>", "$JS.>", "$JS.API.>", "$JS.ACK.>", "$JS.EVENT.ADVISORY.>", "$SYS.>", "aether.>",
        f"aether.{names.run}.>", names.all_jobs, names.lane(HOSTILE), names.lane(victim), names.all_replies,
        names.reply(victim, "*"), names.reply(HOSTILE, "*"), names.fleet("hb"), names.fleet("reg"), names.fleet("poll"),
        names.next(), names.next(HOSTILE), names.artifact_get, names.artifact_meta(), names.owner,
        "_INBOX.>", "_INBOX", "_INBOX_*.>", f"{names.inbox(victim)}.>", f"{names.inbox(victim)}.*",
        f"{names.inbox(victim)}", "_INBOX_coordinator.>", "_R_.>", "$KV.>", "$O.>", f"{names.inbox(HOSTILE)}",
        f"{names.inbox(HOSTILE)}x.>",
    ]  # fmt: skip
    for subject in subjects:
        yield Attempt("subscribe", subject, VIOLATION, subscribing(subject))
    for subject in (">", "aether.>", names.fleet("hb"), f"{names.inbox(victim)}.>", names.all_replies, "$JS.>"):
        yield Attempt("subscribe", f"{subject} in a queue group", VIOLATION, subscribing(subject, "workers"))


def acknowledgements(world: World) -> Iterator[Attempt]:
    names = world.names
    verbs = {"acknowledge": b"+ACK", "negative": b"-NAK", "terminate": b"+TERM", "in progress": b"+WPI"}
    verbs["acknowledge and next"] = b"+NXT"

    def guessing(subject: Callable[[int, str], str], verb: bytes) -> Try:
        """Every plausible sequence, with the time of the delivery known."""

        async def act(world: World) -> str:
            hostile, time = world.hostile, world.held[VICTIMS[0]].reply.split(".")[7]
            hostile.errors.clear()
            tries = [subject(sequence, time) for sequence in range(1, 131)]
            await hostile.send(b"".join(line(target, verb) for target in tries))
            await hostile.ping()
            if not hostile.errors:
                return IGNORED
            return VIOLATION if len(hostile.errors) == len(tries) else f"{ACCEPTED}: {len(hostile.errors)} refused"

        return act

    def exact(verb: bytes, of: str) -> Try:
        async def act(world: World) -> str:
            return await send(world, world.held[of].reply, verb)

        return act

    lane, own = names.consumer(VICTIMS[0]), names.consumer(HOSTILE)
    for what, verb in verbs.items():
        yield Attempt("acknowledge", f"{what}: another's job by its exact subject", VIOLATION, exact(verb, VICTIMS[0]))
    yield Attempt("acknowledge", "terminate: the other's job", VIOLATION, exact(b"+TERM", VICTIMS[1]))
    for what, verb in verbs.items():
        yield Attempt(
            "acknowledge", f"{what}: another's lane, 130 guesses", VIOLATION,
            guessing(lambda n, time: f"$JS.ACK.{names.jobs}.{lane}.1.{n}.{n}.{time}.0", verb),
        )  # fmt: skip
        # On the own consumer, where it is permitted, with the sequences of other lanes' jobs.
        yield Attempt(
            "acknowledge", f"{what}: another's sequence on the own lane", IGNORED,
            guessing(lambda n, time: f"$JS.ACK.{names.jobs}.{own}.1.{1 + n % 4}.{1000 + n}.{time}.0", verb),
            OWN_LANE,
        )  # fmt: skip
        yield Attempt(
            "acknowledge", f"{what}: another's lane in the long form", IGNORED,
            guessing(
                lambda n, time: f"$JS.ACK.{names.jobs}.{own}.{names.jobs}.{lane}.1.{n}.{n}.{time}.0.x", verb
            ), OWN_LANE,
        )  # fmt: skip
    yield Attempt(
        "acknowledge", "terminate: the replies, 130 guesses", VIOLATION,
        guessing(lambda n, time: f"$JS.ACK.{names.replies}.coordinator.1.{n}.{n}.{time}.0", b"+TERM"),
    )  # fmt: skip
    yield Attempt(
        "acknowledge", "wildcards as another's lane", VIOLATION,
        guessing(lambda n, time: f"$JS.ACK.{names.jobs}.*.1.{n}.{n}.{time}.0", b"+TERM"),
    )  # fmt: skip


def forgeries(world: World) -> Iterator[Attempt]:
    """The reply subject of a permitted request is not permission-checked: what answers would do there."""
    names, victim = world.names, VICTIMS[0]
    jobs, bucket, objects = names.jobs, f"KV_{names.policies}", names.artifacts_stream
    targets: dict[str, str | Callable[[World], str]] = {
        "purge the jobs": f"$JS.API.STREAM.PURGE.{jobs}",
        "purge the policies": f"$JS.API.STREAM.PURGE.{bucket}",
        "purge the artefacts": f"$JS.API.STREAM.PURGE.{objects}",
        "delete the job stream": f"$JS.API.STREAM.DELETE.{jobs}",
        "delete the replies": f"$JS.API.STREAM.DELETE.{names.replies}",
        "delete the object store": f"$JS.API.STREAM.DELETE.{objects}",
        "delete a message": f"$JS.API.STREAM.MSG.DELETE.{jobs}",
        "create a stream": "$JS.API.STREAM.CREATE.FORGED",
        "update a stream": f"$JS.API.STREAM.UPDATE.{jobs}",
        "delete another's lane": f"$JS.API.CONSUMER.DELETE.{jobs}.{names.consumer(victim)}",
        "create a consumer": f"$JS.API.CONSUMER.CREATE.{jobs}",
        "pull another's lane": f"$JS.API.CONSUMER.MSG.NEXT.{jobs}.{names.consumer(victim)}",
        "pull another's lane, mapped": names.next(victim),
        "acknowledge another's job": lambda world: world.held[victim].reply,
        "a job on another's lane": names.job(victim, "train", 3, "forged"),
        "a reply of another": names.reply(victim, "forged"),
        "a heartbeat of another": names.fleet("hb", victim),
        "a registration of another": names.fleet("reg", victim),
        "a poll of another": names.fleet("poll", victim),
        "a policy": f"$KV.{names.policies}.1",
        "a chunk of an artefact": names.artifact_chunks("forged"),
        "an artefact's metadata": f"$O.{names.artifacts}.M.forged",
        "the owner's answer": names.owner,
        "another's inbox by wildcard": f"{names.inbox(victim)}.*",
        "all of another's inbox": f"{names.inbox(victim)}.>",
        "the coordinator's inbox": "_INBOX.forged",
        "a service's inbox": "_R_.forged",
        "the system": "$SYS.REQ.SERVER.PING",
    }
    carriers = len(world.carriers())
    for what, target in targets.items():
        # Of the reply subjects, the server checks those that lead to acknowledgements and services.
        outcome = VIOLATION if what in ("acknowledge another's job", "a service's inbox") else IGNORED
        yield Attempt("through a reply subject", what, outcome, through_replies(target), CARRIED, carriers)


def headers(world: World) -> Iterator[Attempt]:
    """Headers with which JetStream, or the server, would do more than store a reply."""
    names, subject = world.names, world.names.reply(HOSTILE, "headers")
    for what, expected, given in (
        ("roll the stream up", REFUSED, {"Nats-Rollup": "all"}),
        ("roll its subject up", REFUSED, {"Nats-Rollup": "sub"}),
        ("a schedule that publishes a job", REFUSED, {"Nats-Schedule": "@every 1s",
                                                       "Nats-Schedule-Target": names.job(VICTIMS[0], "train", 3, "f")}),
        ("a life time", REFUSED, {"Nats-TTL": "1s"}),
        ("an atomic batch", REFUSED, {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1"}),
        ("a counter", REFUSED, {"Nats-Incr": "1"}),
        ("the stream of another", REFUSED, {"Nats-Expected-Stream": names.jobs}),
    ):  # fmt: skip
        yield Attempt("headers", what, expected, publishing(subject, b"x", given), OWN_REPLY)
    for what, destination in (
        ("a trace into another's inbox", f"{names.inbox(VICTIMS[0])}.trace"),
        ("a trace as another's reply", names.reply(VICTIMS[0], "trace")),
        ("a trace to the interface", f"$JS.API.STREAM.PURGE.{names.jobs}"),
    ):
        trace = {"Nats-Trace-Dest": destination, "Nats-Trace-Only": "true"}
        yield Attempt("headers", what, VIOLATION, publishing(subject, b"x", trace), OWN_REPLY)


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


def pulls_and_reads(world: World) -> Iterator[Attempt]:
    names, victim = world.names, VICTIMS[0]
    yield Attempt("read", "the next job of another", VIOLATION, publishing(names.next(victim), b'{"batch":1}'))
    yield Attempt("read", "the next job of all", VIOLATION, publishing(names.next(), b'{"batch":1}'))
    yield Attempt(
        "read", "the next reply", VIOLATION, publishing(f"aether.{names.run}.next.coordinator", b'{"batch":1}')
    )
    yield Attempt(
        "read", "metadata in another shape", VIOLATION, publishing(f"aether.{names.run}.art.meta.a.b", b"")
    )  # fmt: skip
    for what, body in (
        ("a lane by the artefacts' reader", {"last_by_subj": names.job(victim, "train", 3, "x")}),
        ("many lanes by the artefacts' reader", {"multi_last": [names.all_jobs], "batch": 100}),
        ("policies by the artefacts' reader", {"next_by_subj": f"$KV.{names.policies}.>", "seq": 1}),
        ("an artefact that is not there", {"seq": 10_000}),
    ):
        yield Attempt("read", what, REFUSED, publishing(names.artifact_get, json.dumps(body).encode()))
    for what, body in (
        ("a pull of another's priority group", {"batch": 1, "group": "x", "no_wait": True, "min_pending": -1}),
        ("a pull that is no JSON", None),
    ):
        data = b"{" if body is None else json.dumps(body).encode()
        yield Attempt("read", what, REFUSED, publishing(names.next(HOSTILE), data), OWN_LANE)


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


def keys(world: World) -> Iterator[Attempt]:
    server = world.server
    stranger = make_key().seed

    wrong = f"{CLOSED}: Authorization Violation"

    async def other_nonce(world: World) -> Raw:
        async with world.client() as first:
            return Raw(server.worker_url, world.seed(HOSTILE), signature=sign(world.seed(HOSTILE), first.nonce))

    async def revoked(world: World) -> Raw:
        server.add_worker("w9")
        seed = world.seed("w9")
        connected = await accepted(server.worker_url, seed)
        server.revoke_worker("w9")
        assert await connected.until(lambda: connected.closed, 1.0), "a revoked worker stays connected"
        await connected.close()
        return Raw(server.worker_url, seed)

    async def rotated(world: World) -> Raw:
        server.add_worker("w8")
        old = world.seed("w8")
        server.revoke_worker("w8")
        server.add_worker("w8")
        await (await accepted(server.worker_url, world.seed("w8"))).close()
        return Raw(server.worker_url, old)

    for what, client in (
        ("no key", lambda world: Raw(server.worker_url)),
        ("an unknown key", lambda world: Raw(server.worker_url, stranger)),
        ("another's name with its own signature", lambda world: Raw(
            server.worker_url, world.seed(HOSTILE), public=public(world.seed(VICTIMS[0])))),
        ("the coordinator's name with its own signature", lambda world: Raw(
            server.worker_url, world.seed(HOSTILE), public=server.coordinator.public)),
        ("a signature of zeros", lambda world: Raw(server.worker_url, world.seed(HOSTILE), signature="A" * 86)),
        ("no signature", lambda world: Raw(server.worker_url, world.seed(HOSTILE), signature=" ")),
        ("the signature of an earlier connection", other_nonce),
        ("a revoked key", revoked),
        ("a rotated-out key", rotated),
        ("a worker's key at the coordinator's port", lambda world: Raw(server.url, world.seed(HOSTILE))),
        ("no key at the coordinator's port", lambda world: Raw(server.url)),
        ("the coordinator's key over the websocket", lambda world: Raw(server.worker_url, server.coordinator.seed)),
    ):  # fmt: skip
        # A rotation leaves the new key in the file.
        yield Attempt("keys", what, wrong, connecting(client), ("workers.conf",))
    for what, options in (
        ("user and password", {"user": "admin", "pass": "admin"}),
        ("a token", {"auth_token": "aether"}),
        ("a self-made JWT", {"jwt": "e30.e30.e30"}),
        ("a new account", {"account": "CORE", "new_account": True}),
    ):
        yield Attempt("keys", what, wrong, connecting(lambda world: Raw(server.worker_url), **options))

    async def again(world: World) -> str:
        """A second CONNECT, as the coordinator, on a connection that is a worker's."""
        async with world.client() as raw:
            body = {"nkey": server.coordinator.public, "sig": sign(world.seed(HOSTILE), raw.nonce), "protocol": 1}
            await raw.send(f"CONNECT {json.dumps(body)}\r\n".encode())
            await raw.ping()
            await raw.publish(f"$JS.API.STREAM.PURGE.{world.names.jobs}")
            await raw.ping()
            return f"{CLOSED}: {', '.join(raw.errors)}" if raw.closed else VIOLATION if raw.errors else ACCEPTED

    yield Attempt("keys", "a second CONNECT as the coordinator", CLOSED, again)


async def accepted(url: str, seed: str) -> Raw:
    """A connection with a key that was just added: the server takes an instant to read it."""
    for _ in range(100):
        raw = await Raw(url, seed).open()
        if not raw.closed:
            return raw
        await raw.close()
        await asyncio.sleep(0.01)
    raise AssertionError("a new key is not accepted")


def flooding(lines: Callable[[World], list[bytes]]) -> Try:
    """Bytes on a connection of its own; what the server says to them."""

    async def act(world: World) -> str:
        async with world.client() as raw:
            for data in lines(world):
                await raw.send(data)
            await raw.ping()
            if raw.closed:
                return f"{CLOSED}: {', '.join(dict.fromkeys(raw.errors))}"
            return f"{REFUSED}: {raw.errors[0]}" if raw.errors else ACCEPTED

    return act


def protocol(world: World) -> Iterator[Attempt]:
    """Operations that are no client's."""
    for what, data in (
        ("a route's subscription", b"RS+ WORKERS aether.>\r\n"),
        ("a route's message", b"RMSG CORE $JS.API.STREAM.PURGE.AETHER_test_JOBS 0\r\n\r\n"),
        ("a leaf's subscription", b"LS+ aether.>\r\n"),
        ("a leaf's message", b"LMSG $JS.API.STREAM.PURGE.AETHER_test_JOBS 0\r\n\r\n"),
        ("a gateway's message", b"A+ CORE\r\n"),
        ("a line without end", b"PUB " + b"a" * 70_000),
        ("a negative size", b"PUB aether.test.replies.w1.x -1\r\n"),
        ("a size beyond all", b"PUB aether.test.replies.w1.x 99999999999999999999\r\n"),
        ("a header longer than its message", b"HPUB aether.test.replies.w1.x 50 10\r\n0123456789\r\n"),
    ):
        yield Attempt("protocol", what, CLOSED, flooding(lambda _, data=data: [data]))
    yield Attempt(
        "protocol", "a subject with a space, as its reply subject", IGNORED,
        flooding_ignored(b"PUB aether.test.fleet.hb.w1 aether.test.replies.w2.x 0\r\n\r\n"), (*CARRIED, "counters."),
    )  # fmt: skip
    yield Attempt(
        "protocol",
        "the websocket as a leaf node",
        CLOSED,
        connecting(lambda w: Raw(f"{w.server.worker_url}/leafnode", w.seed(HOSTILE))),
    )
    yield Attempt(
        "protocol", "the websocket as an MQTT client", f"{REFUSED}: HTTP 404",
        connecting(lambda w: Raw(f"{w.server.worker_url}/mqtt", w.seed(HOSTILE))),
    )  # fmt: skip


def flooding_ignored(data: bytes) -> Try:
    async def act(world: World) -> str:
        async with world.client() as raw:
            await raw.send(data)
            await raw.ping()
            return CLOSED if raw.closed else VIOLATION if raw.errors else IGNORED

    return act


def http(world: World) -> Iterator[Attempt]:
    gateway = f"http://127.0.0.1:{world.coordinator.gateway.port}"
    secret = {"Authorization": f"Bearer {world.coordinator.gateway.secret}"}
    generate = {"model": world.episode.model, "token_ids": [8, 8], "sampling_params": {"temperature": 0.7}}

    def calling(url: str, headers: dict[str, str], method: str = "POST") -> Try:
        async def act(world: World) -> str:
            async with aiohttp.ClientSession() as client:
                timeout = aiohttp.ClientTimeout(total=3)
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


def exhaustion(world: World) -> Iterator[Attempt]:
    names = world.names
    inbox = names.inbox(HOSTILE)
    yield Attempt(
        "exhaust", "60 subscriptions of one connection", f"{REFUSED}: maximum subscriptions",
        flooding(lambda _: [f"SUB {inbox}.{n} {n}\r\n".encode() for n in range(1, 61)]),
    )  # fmt: skip

    async def many_pulls(world: World) -> str:
        async with world.client() as raw:
            await raw.subscribe(f"{inbox}.many.*")
            pull = json.dumps({"batch": 10**9, "expires": 10**18, "max_bytes": 1, "heartbeat": 1}).encode()
            await raw.send(b"".join(line(names.next(HOSTILE), pull, reply=f"{inbox}.many.{n}") for n in range(500)))
            await raw.ping()
            await raw.until(lambda: len(raw.messages) >= 500, 3)
            statuses = [message.status for message in raw.messages]
            assert statuses, "no answer"
            return f"{REFUSED}: {statuses[-1]}" if all(status[:1] == "4" for status in statuses) else ACCEPTED

    yield Attempt("exhaust", "500 pulls of a billion jobs for a life time", f"{REFUSED}: 409", many_pulls, OWN_LANE)

    async def many_polls(world: World) -> str:
        fleet = world.coordinator.fleet
        poll = Poll(worker=HOSTILE, incarnation="1", revision=fleet._revision).encode()
        async with world.client() as raw:
            await raw.subscribe(f"{inbox}.polls.*")
            target = names.fleet("poll", HOSTILE)
            await raw.send(b"".join(line(target, poll, reply=f"{inbox}.polls.{n}") for n in range(3000)))
            await raw.ping()
            await raw.until(lambda: len(raw.messages) >= 2999, 10)
            assert fleet._tasks is not None
            held = len([task for task in fleet._tasks._tasks if not task.done()])
            return f"{REFUSED}: {held} held" if held <= 1 + len(VICTIMS) + 1 else f"{ACCEPTED}: {held} held"

    yield Attempt("exhaust", "3,000 held polls", REFUSED, many_polls)

    async def registering(world: World) -> str:
        """Registering again and again, which writes to the ledger, answers nobody else's poll."""
        fleet = world.coordinator.fleet
        revision = fleet._revision
        for _ in range(20):
            await world.register(200)
        return REFUSED if fleet._revision == revision else ACCEPTED

    yield Attempt(
        "exhaust", "20 registrations, to wake everybody's polls", REFUSED, registering, ("fleet.w1.", "refused")
    )


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


async def breaches(world: World, attempts: Iterable[Attempt]) -> AsyncGenerator[tuple[Attempt, str, list[str]]]:
    """Each attempt, what it came to, and what is wrong with that: another outcome, or something that changed."""
    before = await world.fingerprint()
    for attempt in attempts:
        try:
            outcome = await attempt.act(world)
            after = await world.fingerprint()
        except Exception as error:
            # The run is so much changed that it cannot be looked at, or the attempt could not be made.
            yield attempt, f"failed: {error!r}", [f"{error!r}"]
            return
        wrong = changes(before, after, attempt.allowed)
        if not outcome.startswith(attempt.expected):
            wrong.append(f"{outcome}, expected {attempt.expected}")
        yield attempt, outcome, wrong
        before = after
