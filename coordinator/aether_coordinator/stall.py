"""Stalled, not slow: a job is taken from a worker when its progress stops, however long it takes.

Deadlines would select short completions and bias the training; what heartbeats report about tokens does not.
"""

from collections.abc import Iterable, Mapping


class Progress:
    """What the heartbeats of one worker tell about its jobs. Times are of one monotonic clock, seconds."""

    def __init__(self, now: float) -> None:
        self._jobs: dict[str, tuple[int, float]] = {}
        """Tokens of each running job, and when they last changed."""
        self._tokens = 0
        self._moved = now

    def beat(self, now: float, running: Mapping[str, int], tokens: int, *, idle: bool) -> None:
        """A heartbeat: tokens by job, tokens since the worker's start, and whether it has no jobs to work on."""
        self._jobs = {
            job: known if (known := self._jobs.get(job)) is not None and known[0] == count else (count, now)
            for job, count in running.items()
        }
        if tokens != self._tokens or idle:
            self._tokens, self._moved = tokens, now

    def stalled(self, now: float, jobs: Iterable[str], limit_s: float) -> set[str]:
        """Which of the `jobs` that the worker was given have stalled.

        One that has begun is stalled when its own tokens stand still. One that has not may wait for a slot, an
        adapter or a long prompt: it is stalled only when the whole worker stands still.
        """
        if now - self._moved >= limit_s:
            return set(jobs)
        return {
            job
            for job in jobs
            if (known := self._jobs.get(job)) is not None and known[0] > 0 and now - known[1] >= limit_s
        }

    def taken(self, now: float, jobs: Iterable[str]) -> None:
        """These jobs were taken from the worker: what it is given now, they too, has the whole time again."""
        self._moved = now
        for job in jobs:
            self._jobs.pop(job, None)
