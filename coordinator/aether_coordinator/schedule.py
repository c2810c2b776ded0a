"""The schedule: when groups open, batches are cut, evaluations run, and the run is finished."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from loguru import logger

from aether_coordinator.batches import Batches
from aether_coordinator.dispatch import Dispatcher
from aether_coordinator.evaluations import Evaluations
from aether_coordinator.groups import Groups
from aether_coordinator.lag import cut, may_open
from aether_coordinator.policies import Policies
from aether_coordinator.records import EpisodeRecord, GroupRecord
from aether_coordinator.retention import first_kept, remove_step_files
from aether_coordinator.rollout import Outcome
from aether_coordinator.settings import ServerSettings
from aether_coordinator.sources import Source, next_source, task_at

TICK_S = 5.0


class Schedule:
    """Drives the run until all steps are trained and all due evaluations done."""

    def __init__(
        self,
        settings: ServerSettings,
        sources: dict[str, Source],
        groups: Groups,
        batches: Batches,
        policies: Policies,
        evaluations: Evaluations,
        dispatcher: Dispatcher,
        *,
        attempt: Callable[[GroupRecord, EpisodeRecord], Awaitable[Outcome]],
        announce_batch: Callable[[int], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._groups = groups
        self._batches = batches
        self._policies = policies
        self._evaluations = evaluations
        self._dispatcher = dispatcher
        self._attempt = attempt
        self._announce_batch = announce_batch
        self._changed = asyncio.Event()
        self._full_since: dict[int, float] = {}
        self._running: dict[int, list[asyncio.Task[None]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """No new groups any more in this process."""
        self.episodes_running = 0

    def wake(self) -> None:
        """Something changed: look again at once."""
        self._changed.set()

    @property
    def finished(self) -> bool:
        steps = self._settings.steps
        return self._policies.newest >= steps and self._evaluations.complete(steps)

    async def run(self) -> None:
        """Work until `finished`."""
        for step, record in self._batches.records.items():
            if step < self._groups.run.retained_from:
                remove_step_files(self._settings.run_root, record)
        async with asyncio.TaskGroup() as episodes:
            for group in list(self._groups.groups.values()):
                if group.state == "open":
                    self._start(group, episodes)
            for version in range(self._policies.newest + 1):
                await self._evaluations.begin(version)
            while not self.finished:
                self._changed.clear()
                await self._take_finished()
                await self._cut()
                if not (self.draining or self._groups.run.paused):
                    await self._open_groups(episodes)
                await self._retain()
                if self.finished:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), TICK_S)
        logger.info("all {} steps are trained and evaluated", self._settings.steps)

    async def drained(self, timeout_s: float) -> None:
        """Wait until no episode runs, at most `timeout_s`."""
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    # ---- episodes ----------------------------------------------------------------------------------

    def _start(self, group: GroupRecord, tasks: asyncio.TaskGroup) -> None:
        """Run the episodes of a group that are not final yet."""
        running = [episode for episode in self._groups.of(group) if episode.state == "running"]
        if not running:
            tasks.create_task(self._complete(group))
        for episode in running:
            self.episodes_running += 1
            self._idle.clear()
            task = tasks.create_task(self._run_episode(group, episode.index))
            self._running.setdefault(group.id, []).append(task)

    async def _complete(self, group: GroupRecord) -> None:
        await self._groups.complete(group)
        self._changed.set()

    async def _run_episode(self, group: GroupRecord, index: int) -> None:
        try:
            await self._groups.run_episode(group, index, lambda episode: self._attempt(group, episode))
        finally:
            self.episodes_running -= 1
            if not self.episodes_running:
                self._idle.set()
            self._changed.set()

    # ---- groups ------------------------------------------------------------------------------------

    async def _take_finished(self) -> None:
        while not self._groups.finished.empty():
            group = self._groups.finished.get_nowait()
            self._dispatcher.forget_prefixes([f"group {group.id}"])
            for task in self._running.pop(group.id, []):
                task.cancel()  # Nothing but the rest of a dropped group still runs.
            if group.kind == "eval":
                await self._evaluations.finish(group)

    async def _cut(self) -> None:
        while self._batches.next_step <= self._settings.steps:
            step, batch = self._batches.next_step, self._settings.batch
            decision = cut(
                self._groups.unbatched(),
                next_step=step,
                groups_per_batch=batch.groups,
                max_lag=batch.max_policy_lag,
                deadline_passed=self._deadline_passed(step),
            )
            for group in decision.too_old:
                await self._groups.drop(group, f"too old for step {step}")
            if not decision.take:
                return
            self._full_since.pop(step, None)
            await self._batches.commit(decision.take)
            await self._announce_batch(step)

    def _deadline_passed(self, step: int) -> bool:
        """Whether the batch of `step` has waited long enough since it was full for the first time."""
        ready = sum(group.state == "ready" for group in self._groups.unbatched())
        if ready < self._settings.batch.groups:
            return False
        since = self._full_since.setdefault(step, time.monotonic())
        return time.monotonic() - since > self._settings.batch.group_deadline_s

    async def _open_groups(self, tasks: asyncio.TaskGroup) -> None:
        if self._policies.newest < 0:
            return
        limit = self._settings.episodes.max_concurrent
        while (opening := self._next_evaluation()) is not None:
            source, version, task = opening
            size = self._evaluations.size(source)
            if self.episodes_running and self.episodes_running + size > limit:
                return
            self._start(await self._groups.open("eval", source, task, version, size, 0), tasks)
        size = self._settings.batch.group_size
        while self._may_open() and (not self.episodes_running or self.episodes_running + size <= limit):
            await self._open_train_group(tasks)

    def _next_evaluation(self) -> tuple[str, int, int] | None:
        opening = self._evaluations.next_task()
        return opening if opening and opening[1] in self._policies.records else None

    def _may_open(self) -> bool:
        batch = self._settings.batch
        return may_open(
            next_step=self._batches.next_step,
            unbatched=len(self._groups.unbatched()),
            groups_per_batch=batch.groups,
            version=self._policies.newest,
            max_lag=batch.max_policy_lag,
            last_step=self._settings.steps,
        )

    async def _open_train_group(self, tasks: asyncio.TaskGroup) -> None:
        settings = self._settings
        source = next_source(settings.train, self._groups.drawn)
        position = self._groups.drawn.get(source.name, 0)
        task = task_at(
            position,
            len(self._sources[source.name].tasks),
            seed=settings.seed,
            name=source.name,
            shuffle=source.shuffle,
        )
        if not self._groups.run.started_s:
            self._groups.run = self._groups.run.with_(started_s=time.time())
        group = await self._groups.open(
            "train", source.name, task, self._policies.newest, settings.batch.group_size, position + 1
        )
        self._start(group, tasks)

    # ---- what is kept ------------------------------------------------------------------------------

    def needed_versions(self) -> set[int]:
        """Versions whose adapters must stay on the bus."""
        newest = self._policies.newest
        lagging = range(max(0, newest - self._settings.batch.max_policy_lag), newest + 1)
        return {*lagging, *(group.version for group in self._groups.groups.values()), *self._evaluations.versions()}

    async def _retain(self) -> None:
        needed = self.needed_versions()
        await self._policies.prune(needed)
        before = self._groups.run.retained_from
        kept = first_kept(self._policies.newest, self._settings.retention.keep_steps, needed)
        if expired := self._evaluations.expired(kept):
            await self._groups.forget_recordings(expired, before)
        for step in range(before, kept):
            record = self._batches.records.get(step)
            if record is not None:
                # Forgotten before deleted: a crash in between leaves files, never a record without them.
                await self._groups.forget_recordings(record.groups, step + 1)
                await asyncio.to_thread(remove_step_files, self._settings.run_root, record)
                logger.bind(step=step).debug("recordings of step {} deleted", step)
