"""The turns that wait for a worker: which is next, and for whom.

Evaluations go before training, then the oldest. A turn waits for its home, the worker that holds the prefix of its
session, as long as nobody else would idle; a slot that is free takes it from there if nothing else fits.
"""

import heapq
from collections.abc import Callable, Collection

NOWHERE = ""
"""The home of a turn without one."""
Place = tuple[int, int, str]
"""Priority, age and job: the smaller, the sooner."""


class Ready:
    """Job ids by home. What is no longer waiting is skipped when it comes up."""

    def __init__(self, still_waits: Callable[[str], bool]) -> None:
        self._still_waits = still_waits
        self._places: dict[str, list[Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, job: str, order: int, *, urgent: bool, home: str = NOWHERE) -> None:
        heapq.heappush(self._places.setdefault(home, []), (0 if urgent else 1, order, job))

    def next(self, able: Collection[str], usable: Collection[str], *, take_away: bool) -> str | None:
        """Take the job that is next; None when nothing fits.

        Its home is one of the workers that are `able` to take it, or none that is still `usable`; with `take_away`,
        and if nothing else is left, any other.
        """
        heads = [(places[0], home) for home in list(self._places) if (places := self._waiting_at(home))]
        fitting = [head for head in heads if head[1] in able or head[1] not in usable]
        if not fitting and take_away:
            fitting = heads
        if not fitting:
            return None
        _, home = min(fitting)
        _, _, job = heapq.heappop(self._places[home])
        return job

    def _waiting_at(self, home: str) -> list[Place]:
        """The places at a home, the first of which is taken by a turn that still waits; empty if none is."""
        places = self._places[home]
        while places and not self._still_waits(places[0][2]):
            heapq.heappop(places)
        if not places:
            del self._places[home]
        return places
