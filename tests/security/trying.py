"""An attempt, the ways to make one, and whether it failed as it must."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from security.raw import Raw
from security.world import HOSTILE, World, changes

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
