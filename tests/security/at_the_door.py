"""Who else tries to get in, and how much one connection may take."""

import asyncio
import json
from collections.abc import Iterator

from aether_common.wire import Poll
from aether_coordinator.accounts import make_key
from security.raw import Raw, line, public, sign
from security.trying import (
    ACCEPTED,
    CLOSED,
    IGNORED,
    OWN_LANE,
    REFUSED,
    VIOLATION,
    Attempt,
    Try,
    connecting,
    flooding,
)
from security.world import CARRIED, HOSTILE, VICTIMS, World


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
