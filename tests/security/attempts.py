"""All that is tried, in the order in which it is."""

from collections.abc import Iterator

from security.at_the_coordinator import fleet_requests, http, replies, supersession, worker_names
from security.at_the_door import exhaustion, keys, protocol
from security.on_the_bus import (
    acknowledgements,
    forgeries,
    headers,
    interface,
    publishes,
    pulls_and_reads,
    subscriptions,
)
from security.trying import Attempt
from security.world import World


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
