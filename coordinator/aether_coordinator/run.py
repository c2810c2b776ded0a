"""The coordinator of one run: composes the parts, and decides when groups open, batches are cut and the run ends."""

import asyncio
import json
import os
import signal
import time
import uuid
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from aether_common.bus import Bus, read_seed
from aether_common.checkpoint import checkpoint_path, complete_steps, read_manifest
from aether_common.errors import AetherError, BusError, ConfigError, RunDirectoryError
from aether_common.files import FileLock, remove_temporaries, write_durably
from aether_common.identity import resolve_model
from aether_common.names import Names
from loguru import logger

from aether_coordinator import sources as source_module
from aether_coordinator.batches import Batches
from aether_coordinator.dispatch import Dispatcher
from aether_coordinator.embedded import EmbeddedServer
from aether_coordinator.evaluations import Evaluations
from aether_coordinator.fleet import Fleet
from aether_coordinator.gateway import SECRET_VARIABLE, Gateway, OpenEpisode
from aether_coordinator.groups import Groups
from aether_coordinator.journal import Claims
from aether_coordinator.lag import cut, may_open
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.policies import Policies
from aether_coordinator.records import DispatchRecord, EpisodeRecord, GroupRecord, RunRecord
from aether_coordinator.replies import ReplyIntake
from aether_coordinator.rollout import Outcome, client_config, run_attempt
from aether_coordinator.settings import ServerSettings, TrainSource
from aether_coordinator.sources import next_source, task_at
from aether_coordinator.status import Counters, RunState, RunStatus, StepStatus
from aether_coordinator.streams import Streams
from aether_coordinator.tokenizer import stop_token_ids
from aether_coordinator.training import Trainer

LEASE_S = 30.0
STOP_S = 20.0
MAY_CHANGE = {
    "steps",
    "model",
    "run_root",
    "episodes",
    "trainer",
    "nats",
    "gateway",
    "log_level",
}
"""Settings that may differ when a run is resumed."""


class Finished(Exception):
    """All steps are trained and all due evaluations done."""


class Coordinator:
    """Everything that a run needs, in one process."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._root = settings.run_root
        self._names = Names(settings.run)
        self._lock = FileLock(
            self._root / "coordinator.lock", f"another coordinator runs on {self._root}: stop it first"
        )
        for directory in (self._root, self._root / "batches"):
            directory.mkdir(parents=True, exist_ok=True)
        self.counters = Counters()
        self._ledger = Ledger(self._root / "state")
        self._ledger.with_every_commit = lambda: [Write("run", b"counters", self.counters.model_dump_json().encode())]
        self._run = self._open_run()
        self._server = EmbeddedServer(settings) if settings.nats.url is None else None
        self._state: RunState = "starting"
        self._message = ""
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._episodes_running = 0
        self._steps_done: list[StepStatus] = []
        self._group_waited_since: dict[int, float] = {}

    # ---- start -------------------------------------------------------------------------------------

    def _open_run(self) -> RunRecord:
        """The recorded run, or a new one. Raises `RunDirectoryError` or `ConfigError` when it does not fit."""
        settings = self._settings.model_dump(mode="json")
        if (counters := self._ledger.get("run", b"counters")) is not None:
            self.counters = Counters.model_validate_json(counters)
        recorded = self._ledger.get("run", b"run")
        if recorded is None:
            run = RunRecord(
                run=self._settings.run, uuid=uuid.uuid4().hex, created_s=time.time(), settings=json.dumps(settings)
            )
            self._ledger.commit_now(Write("run", b"run", run.encode()))
            return run
        run = RunRecord.decode(recorded)
        if run.run != self._settings.run:
            raise RunDirectoryError(
                f"{self._root} belongs to run {run.run!r}, not {self._settings.run!r}: choose another run_root"
            )
        before = json.loads(run.settings)
        changed = [key for key in settings if settings[key] != before.get(key)]
        if refused := [key for key in changed if key not in MAY_CHANGE]:
            key = refused[0]
            raise ConfigError(
                f"{key} was {before.get(key)!r} when run {run.run!r} began and is {settings[key]!r} now: "
                f"put it back (these may change on resume: {', '.join(sorted(MAY_CHANGE))})"
            )
        if changed:
            logger.info("resumed with changed settings: {}", ", ".join(changed))
            run = run.with_(settings=json.dumps(settings))
            self._ledger.commit_now(Write("run", b"run", run.encode()))
        return run

    async def run(self) -> None:
        """Run until finished, stopped by a signal (both return), or broken (raises)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        async with AsyncExitStack() as stack:
            stack.callback(self._ledger.close)
            model_path = str(resolve_model(self._settings.model, self._settings.base_model.revision))
            self._load_sources()
            bus = await self._connect(stack)
            self._compose(bus, model_path)
            await self._streams.declare()
            await self._claim_ownership(bus)
            await source_module.serve(list(self._sources.values()), stack)
            try:
                await self._work(model_path)
            finally:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)

    def _load_sources(self) -> None:
        logger.info("loading tasksets")
        settings = (*self._settings.train, *self._settings.eval)
        self._sources = {source.name: source_module.load_source(source) for source in settings}

    async def _connect(self, stack: AsyncExitStack) -> Bus:
        nats = self._settings.nats
        if self._server is not None:
            self._server.prepare()
            await self._server.start()
            stack.push_async_callback(self._server.stop)
            url, key_file = self._server.url, self._server.key_file
        else:
            assert nats.url is not None and nats.key_file is not None
            url, key_file = nats.url, nats.key_file
        bus = Bus(url, read_seed(key_file), "_INBOX", f"coordinator-{self._settings.run}", nats.ca_file)
        await bus.connect()
        stack.push_async_callback(bus.close)
        return bus

    def _compose(self, bus: Bus, model_path: str) -> None:
        settings, names = self._settings, self._names
        self._bus = bus
        self._streams = Streams(
            bus,
            names,
            self._run.uuid,
            max_age_s=2 * settings.episodes.turn_deadline_s,
            lease_s=LEASE_S,
            storage=settings.nats.max_storage_mib << 20,
        )
        self._dispatcher = Dispatcher(bus, names, self._ledger, self._streams, self.counters)
        self._intake = ReplyIntake(bus, names, self._ledger, self._dispatcher, self.counters)
        self._policies = Policies(self._ledger, self._streams, self._root, run=settings.run, run_uuid=self._run.uuid)
        self._policies.identity = settings.base_model
        self._fleet = Fleet(
            bus,
            names,
            self._streams,
            identity=settings.base_model,
            max_model_len=settings.max_model_len,
            lease_s=LEASE_S,
            wanted=lambda: self._policies.refs(self._needed_versions()),
            on_lost=self._dispatcher.lost,
            on_room=self._dispatcher.pump,
            on_bad_message=self._count_bad_message,
        )
        self._dispatcher.fleet = self._fleet
        self._gateway = Gateway(
            self._ledger,
            self._dispatcher,
            self.counters,
            run=settings.run,
            seed=settings.seed,
            max_model_len=settings.max_model_len,
            turn_deadline_s=settings.episodes.turn_deadline_s,
            stop_token_ids=stop_token_ids(Path(model_path)),
            vocab_size=settings.base_model.vocab_size,
            status=lambda: self.status().model_dump_json(),
        )
        os.environ[SECRET_VARIABLE] = self._gateway.secret
        self._groups = Groups(self._ledger, self._root, self.counters, max_attempts=settings.episodes.max_attempts)
        self._batches = Batches(settings, self._ledger, self._groups, self.counters)
        evals = {source.name: self._sources[source.name] for source in settings.eval}
        self._evaluations = Evaluations(self._groups, evals, self._root, settings.steps)
        self._trainer = Trainer(settings, self._on_checkpoint)
        self._load_state()

    def _load_state(self) -> None:
        remove_temporaries_but_batches(self._root)
        self._groups.load(self._run)
        self._batches.load()
        self._policies.load()
        recorded = [GroupRecord.decode(value) for _, value in self._ledger.scan("groups")]
        self._evaluations.load(recorded)
        for _, value in self._ledger.scan("dispatches"):
            record = DispatchRecord.decode(value)
            self._dispatcher.orphans[record.job] = record
        metrics = self._root / "metrics" / "steps.jsonl"
        if metrics.is_file():
            self._steps_done = [StepStatus.model_validate_json(line) for line in metrics.read_text().splitlines()]

    def _count_bad_message(self) -> None:
        self.counters.messages_bad += 1

    async def _claim_ownership(self, bus: Bus) -> None:
        """Refuse a bus on which another coordinator of this run answers, then answer there ourselves."""
        with suppress(BusError):
            await bus.request(self._names.owner, b"", timeout_s=1.0)
            raise RunDirectoryError(
                f"another coordinator of run {self._settings.run!r} answers on the bus: stop it, or rename this run"
            )

        async def answer(message: Any) -> None:
            await message.respond(self._run.uuid.encode())

        await bus.client.subscribe(self._names.owner, cb=answer)

    # ---- work --------------------------------------------------------------------------------------

    async def _work(self, model_path: str) -> None:
        ready = asyncio.Event()
        background = asyncio.TaskGroup()
        try:
            async with background as tasks:
                tasks.create_task(self._ledger.run())
                tasks.create_task(self._fleet.run())
                tasks.create_task(self._dispatcher.run())
                tasks.create_task(self._intake.run())
                tasks.create_task(self._gateway.serve(self._settings.gateway.port, ready.set))
                tasks.create_task(self._keep_reconciled())
                if self._server is not None:
                    tasks.create_task(self._server.supervise())
                await ready.wait()
                self._publish_endpoint()
                self._client = client_config(
                    self._gateway,
                    model_path,
                    {"name": self._settings.base_model.renderer, **self._settings.renderer},
                )
                await self._reconcile()
                tasks.create_task(self._trainer.supervise())
                self._state = "running"
                tasks.create_task(self._schedule())
                tasks.create_task(self._stop_on_request())
        except* Finished:
            self._state = "finished"
        except* AetherError as errors:
            self._state = "failed"
            raise first_error(errors) from errors
        finally:
            (self._root / "endpoint.json").unlink(missing_ok=True)
            self._ledger.commit_now(*self._ledger.with_every_commit())

    async def _stop_on_request(self) -> None:
        await self._stop.wait()
        await self._shut_down()
        raise Finished

    async def _shut_down(self) -> None:
        """Nothing new; jobs stay where they are; the trainer finishes its step within a bound."""
        self._dispatcher.closing = True
        await self._trainer.stop(STOP_S)
        await self._ledger.flush()

    def _request_stop(self) -> None:
        if self._stop.is_set():
            return
        logger.info("stopping: running episodes stay journaled, the trainer finishes its step")
        self._state = "draining"
        self._stop.set()

    def _publish_endpoint(self) -> None:
        endpoint = {
            "pid": os.getpid(),
            "status_url": f"http://127.0.0.1:{self._gateway.port}/status",
            "websocket_url": self._server.websocket_url if self._server else None,
        }
        write_durably(self._root / "endpoint.json", json.dumps(endpoint).encode())

    async def _keep_reconciled(self) -> None:
        reconnected = asyncio.Event()
        self._bus.on_reconnect(reconnected.set)
        while True:
            await reconnected.wait()
            reconnected.clear()
            try:
                await self._reconcile()
            except AetherError as error:
                logger.warning("reconciliation failed, trying again: {}", error)
                await asyncio.sleep(2)
                reconnected.set()

    async def _reconcile(self) -> None:
        """After a start or reconnect: declare what is missing, take the replies, publish the rest again."""
        await self._streams.declare()
        for worker in self._fleet.workers.values():
            await self._streams.declare_lane(worker.name, worker.window)
        await self._policies.restore(self._needed_versions())
        await self._intake.drained(await self._streams.last_reply(), timeout_s=30)
        await self._dispatcher.reconcile()
        self._fleet.announce()

    # ---- what the trainer says ---------------------------------------------------------------------

    async def _on_checkpoint(self, step: int, metrics: dict[str, float]) -> None:
        """Checkpoint `step` (and any before it that was not published yet) is complete."""
        for complete in complete_steps(self._root):
            if complete > self._policies.newest and complete <= step:
                await self._publish(complete, metrics if complete == step else {})
        if self._batches.next_step > step + 1:
            await self._trainer.announce(step + 1)

    async def _publish(self, version: int, metrics: dict[str, float]) -> None:
        batch = self._batches.records.get(version)
        manifest, _ = read_manifest(self._root, version)
        if version > 0 and (batch is None or manifest.batch != batch.digest):
            raise RunDirectoryError(
                f"checkpoint {version} names batch {manifest.batch}, committed is "
                f"{batch.digest if batch else 'none'}: the checkpoints are not of this run"
            )
        if manifest.skipped:
            self.counters.updates_skipped += 1
        await self._policies.publish(version)
        if batch is not None:
            self._record_step(
                StepStatus(
                    step=version,
                    reward=batch.reward,
                    tokens=batch.tokens,
                    lag=batch.lag,
                    finished_s=time.time(),
                    **{key: metrics[key] for key in ("loss", "kl", "entropy", "grad_norm") if key in metrics},
                )
            )
            logger.bind(step=version).info("step {} trained, mean reward {:.3f}", version, batch.reward)
        self._evaluations.begin(version)
        self._fleet.announce()
        self._changed.set()

    def _record_step(self, step: StepStatus) -> None:
        self._steps_done.append(step)
        path = self._root / "metrics" / "steps.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(step.model_dump_json() + "\n")

    # ---- scheduling --------------------------------------------------------------------------------

    async def _schedule(self) -> None:
        """Open groups, take finished ones, cut batches, until everything is trained and evaluated."""
        async with asyncio.TaskGroup() as episodes:
            for group in list(self._groups.groups.values()):
                if group.state == "open":
                    self._start(group, episodes)
            for version in range(self._policies.newest + 1):
                self._evaluations.begin(version)
            while True:
                self._changed.clear()
                await self._take_finished()
                await self._cut()
                await self._open_groups(episodes)
                await self._policies.prune(self._needed_versions())
                if self._policies.newest >= self._settings.steps and self._evaluations.complete(self._settings.steps):
                    logger.info("all {} steps are trained and evaluated", self._settings.steps)
                    await self._shut_down()
                    raise Finished
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 5.0)

    def _start(self, group: GroupRecord, tasks: asyncio.TaskGroup) -> None:
        """Run the episodes of a group that are not final yet."""
        running = [episode for episode in self._groups.of(group) if episode.state == "running"]
        if not running:
            tasks.create_task(self._complete(group))
        for episode in running:
            self._episodes_running += 1
            tasks.create_task(self._run_episode(group, episode.index))

    async def _complete(self, group: GroupRecord) -> None:
        await self._groups.complete(group)
        self._changed.set()

    async def _run_episode(self, group: GroupRecord, index: int) -> None:
        source = self._sources[group.source]

        async def attempt(episode: EpisodeRecord) -> Outcome:
            opened = OpenEpisode(
                record=episode,
                group=group,
                adapter=self._policies.records[group.version].adapter,
                source=source.settings,
                claims=Claims(episode.id, episode.attempt),
            )
            return await run_attempt(opened, source, self._gateway, self._client, self._settings.episodes.timeout_s)

        try:
            await self._groups.run_episode(group, index, attempt)
        finally:
            self._episodes_running -= 1
            self._changed.set()

    async def _take_finished(self) -> None:
        while not self._groups.finished.empty():
            group = self._groups.finished.get_nowait()
            self._dispatcher.forget_prefixes([f"group {group.id}"])
            if group.kind == "eval":
                self._evaluations.finish(group)
            elif self._settings.batch.drop_uniform_groups and group.state == "ready":
                rewards = [episode.reward for episode in self._groups.of(group) if episode.state == "done"]
                if len(set(rewards)) == 1:
                    await self._groups.drop(group, f"all rewards are {rewards[0]}")

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
            self._group_waited_since.pop(step, None)
            await self._batches.commit(decision.take)
            await self._trainer.announce(step)

    def _deadline_passed(self, step: int) -> bool:
        """Whether the batch of `step` has waited long enough since it was full for the first time."""
        ready = sum(group.state == "ready" for group in self._groups.unbatched())
        if ready < self._settings.batch.groups:
            return False
        since = self._group_waited_since.setdefault(step, time.monotonic())
        return time.monotonic() - since > self._settings.batch.group_deadline_s

    async def _open_groups(self, tasks: asyncio.TaskGroup) -> None:
        if self._policies.newest < 0:
            return
        limit = self._settings.episodes.max_concurrent
        while (opening := self._next_evaluation()) is not None:
            source, version, task = opening
            size = self._evaluations.size(source)
            if self._episodes_running and self._episodes_running + size > limit:
                return
            self._start(await self._groups.open("eval", source, task, version, size, 0), tasks)
        size = self._settings.batch.group_size
        while self._may_open() and (not self._episodes_running or self._episodes_running + size <= limit):
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
        source: TrainSource = next_source(settings.train, self._groups.drawn)
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

    def _needed_versions(self) -> set[int]:
        """Versions whose adapters must stay on the bus."""
        newest = self._policies.newest
        lagging = range(max(0, newest - self._settings.batch.max_policy_lag), newest + 1)
        return {*lagging, *(group.version for group in self._groups.groups.values()), *self._evaluations.versions()}

    # ---- status ------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """What `aether-coordinator status` shows."""
        batch = self._settings.batch
        train = self._groups.unbatched()
        ready = sum(group.state == "ready" for group in train)
        complete = complete_steps(self._root)
        training = self._batches.next_step > self._policies.newest + 1
        workers = self._fleet.status()
        return RunStatus(
            run=self._settings.run,
            run_uuid=self._run.uuid,
            state=self._state,
            message=self._message,
            step=max(0, self._policies.newest),
            steps=self._settings.steps,
            policy_version=self._policies.newest,
            step_share=self._trainer.share if training else min(1.0, ready / batch.groups),
            groups_open=len(train) - ready,
            groups_ready=ready,
            groups_per_batch=batch.groups,
            turns_waiting=self._dispatcher.waiting,
            turns_running=self._dispatcher.running,
            episodes_running=self._episodes_running,
            tokens_per_s=round(sum(worker.tokens_per_s for worker in workers), 1),
            started_s=self._groups.run.started_s,
            steps_done=self._steps_done,
            evaluations=self._evaluations.status(),
            workers=workers,
            counters=self.counters,
            adapter=str(checkpoint_path(self._root, complete[-1]) / "adapter") if complete else "",
        )


def remove_temporaries_but_batches(root: Path) -> None:
    """Remove what interrupted writes left; a temporary batch may be the committed one."""
    for directory in (root, root / "traces", root / "nats"):
        if directory.is_dir():
            remove_temporaries(directory)


def first_error(errors: BaseExceptionGroup[Any]) -> BaseException:
    """The first leaf of an exception group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
