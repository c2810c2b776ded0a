"""What a worker tries on the bus: each must fail in nats-server."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from security.raw import line
from security.trying import (
    ACCEPTED,
    IGNORED,
    OWN_LANE,
    OWN_REPLY,
    REFUSED,
    VIOLATION,
    Attempt,
    Try,
    publishing,
    send,
    subscribing,
    through_replies,
)
from security.world import CARRIED, HOSTILE, VICTIMS, World


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
            guessing(lambda n, time: f"$JS.ACK.{names.jobs}.{own}.1.{1 + n % 3}.{1000 + n}.{time}.0", verb),
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
