"""Whose logprobs are not the trainer's: a worker that serves something else than it says.

The trainer measures, per episode, how far the sampler's logprobs are from its own (k3, see `aether_common.pipe`).
That grows with the lag, and with how much the policy changes, so workers are compared with each other only,
at equal lag, and by the median of their episodes, which a few surprising tokens do not move.
"""

import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aether_common.pipe import Mismatch

from aether_coordinator.journal import TurnKey
from aether_coordinator.ledger import Ledger
from aether_coordinator.records import TurnRecord

EPISODES = 256
"""Newest episodes of a worker at one lag that count."""
ENOUGH = 8
"""Episodes that a worker, and the others together, need before they are compared."""
FACTOR = 10.0
FLOOR = 5e-3
"""k3 per token below which nobody stands out: bfloat16 on different kernels gives about 2e-4."""


@dataclass(slots=True)
class _Lag:
    means: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODES))
    """k3 per token of each episode."""
    largest: deque[float] = field(default_factory=lambda: deque(maxlen=EPISODES))


class Mismatches:
    """The mismatch of every worker. `stands_out` is called with a worker and the reason."""

    def __init__(self, stands_out: Callable[[str, str], None]) -> None:
        self._stands_out = stands_out
        self._workers: defaultdict[str, dict[int, _Lag]] = defaultdict(dict)

    def add(self, measured: Mapping[str, Mismatch], worker_of: Callable[[str], str | None]) -> None:
        """The episodes of one step; those that several workers answered say nothing about one."""
        for episode, mismatch in measured.items():
            if mismatch.tokens and (worker := worker_of(episode)) is not None:
                lag = self._workers[worker].setdefault(mismatch.lag, _Lag())
                lag.means.append(mismatch.total / mismatch.tokens)
                lag.largest.append(mismatch.largest)
        # One after the other, the furthest first: the next one is judged without it.
        while (outlier := self._outlier()) is not None:
            self.forget(outlier[0])
            self._stands_out(*outlier)

    def _outlier(self) -> tuple[str, str] | None:
        """The worker that is furthest from the others at some lag, and the reason; None if nobody stands out."""
        everyone: defaultdict[int, list[float]] = defaultdict(list)
        for lags in self._workers.values():
            for lag, own in lags.items():
                everyone[lag] += own.means
        for means in everyone.values():
            means.sort()
        furthest: tuple[float, str, str] | None = None
        for worker, lags in self._workers.items():
            for lag, own in lags.items():
                if min(len(own.means), len(everyone[lag]) - len(own.means)) < ENOUGH:
                    continue
                mine = statistics.median(own.means)
                if mine <= FLOOR:
                    continue
                usual = median_of_others(everyone[lag], sorted(own.means))
                if mine > FACTOR * usual and (furthest is None or mine > furthest[0]):
                    reason = (
                        f"its logprobs are not the trainer's: k3 {mine:.2g} per token at lag {lag} "
                        f"(median of {len(own.means)} episodes), {usual:.2g} on the other workers"
                    )
                    furthest = (mine, worker, reason)
        return furthest[1:] if furthest is not None else None

    def forget(self, worker: str) -> None:
        """Its past counts no more: it is quarantined or released."""
        self._workers.pop(worker, None)

    def of(self, worker: str) -> tuple[float, float] | None:
        """Mean k3 per token, and the 95th percentile of its episodes' largest, at its smallest lag; None if unknown."""
        if not (lags := self._workers.get(worker)):
            return None
        lag = lags[min(lags)]
        return statistics.fmean(lag.means), sorted(lag.largest)[int(0.95 * (len(lag.largest) - 1))]


def median_of_others(everyone: Sequence[float], own: Sequence[float]) -> float:
    """Median of `everyone` without the values of `own`, which are among them; both sorted. A large fleet has no
    time to sort the others of each worker.
    """

    def at(rank: int) -> float:
        def others_up_to(value: float) -> int:
            return bisect_right(everyone, value) - bisect_right(own, value)

        return everyone[bisect_right(everyone, rank, key=others_up_to)]

    count = len(everyone) - len(own)
    return (at((count - 1) // 2) + at(count // 2)) / 2


def worker_of(ledger: Ledger, episode: str) -> str | None:
    """The worker that answered all turns of an episode's last attempt; None where it was not one, or is forgotten."""
    attempts: defaultdict[int, set[str]] = defaultdict(set)
    for key, value in ledger.scan("journal", f"{episode}/".encode()):
        attempts[TurnKey.parse(key.decode()).attempt].add(TurnRecord.decode(value).worker)
    if not attempts:
        return None
    workers = attempts[max(attempts)]
    return workers.pop() if len(workers) == 1 else None
