"""The coordinator of one run: composes the parts, starts and stops them, and shows their state."""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats.errors
from aether_common.bus import Bus, read_seed
from aether_common.checkpoint import checkpoint_path, complete_steps, read_manifest
from aether_common.errors import AetherError, BusError, DiskError, RunDirectoryError
from aether_common.files import remove_temporaries, write_durably
from aether_common.identity import resolve_model
from aether_common.names import Names
from aether_common.pipe import Mismatch
from aether_common.tls import Tls
from loguru import logger

from aether_coordinator import sources as source_module
from aether_coordinator.batches import Batches
from aether_coordinator.check import lock_run
from aether_coordinator.control import Control
from aether_coordinator.dispatch import Dispatcher, Expected
from aether_coordinator.embedded import EmbeddedServer
from aether_coordinator.evaluations import Evaluations
from aether_coordinator.events import Events
from aether_coordinator.fleet import Fleet
from aether_coordinator.gateway import SECRET_VARIABLE, Gateway, OpenEpisode
from aether_coordinator.groups import Groups
from aether_coordinator.host import external_server
from aether_coordinator.journal import Claims, TurnKey
from aether_coordinator.keys import Keys
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.mismatch import Mismatches, worker_of
from aether_coordinator.opening import open_run
from aether_coordinator.ownership import Ownership
from aether_coordinator.pauses import freeze_heap
from aether_coordinator.policies import Policies
from aether_coordinator.reconciliation import Reconciliation
from aether_coordinator.records import DispatchRecord, EpisodeRecord, GroupRecord
from aether_coordinator.replies import ReplyIntake
from aether_coordinator.rollout import Outcome, client_config, run_attempt
from aether_coordinator.schedule import Schedule
from aether_coordinator.settings import ServerSettings
from aether_coordinator.status import Counters, RunState, RunStatus
from aether_coordinator.steps import Steps
from aether_coordinator.streams import Streams
from aether_coordinator.tokenizer import stop_token_ids
from aether_coordinator.training import Trainer
from aether_coordinator.watchdog import Stalled, View, waits_for

LEASE_S = 30.0
TRAINER_STOP_S = 20.0
TAKE_BUS_S = 30.0
"""How long a start waits for an embedded server that dies or does not answer."""
FLUSH_S = 10.0
"""How long a stop waits for a disk that takes nothing."""
KEYS_S = 10.0
"""Between two looks at the workers' keys: their ends, and what a command line could not tell us."""


class Finished(Exception):
    """All steps are trained and evaluated, or a signal asked for the end."""


class Coordinator:
    """Everything that a run needs, in one process."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._root = settings.run_root
        self._names = Names(settings.run)
        self._lock = lock_run(settings)
        self._ledger = Ledger(self._root / "state")
        self._run = open_run(self._ledger, settings)
        recorded = self._ledger.get("run", b"counters")
        self.counters = Counters.model_validate_json(recorded) if recorded else Counters()
        self._ledger.with_every_commit = lambda: [Write("run", b"counters", self.counters.model_dump_json().encode())]
        self._server = EmbeddedServer(settings) if settings.nats.embedded else None
        self._events = Events(self._root)
        self._state: RunState = "starting"
        self._supervised: asyncio.Task[None] | None = None
        """Keeps the embedded server running."""
        self._stop = asyncio.Event()
        self._steps = Steps(self._root, self._ledger)
        self._progress = time.monotonic()
        """When the last step was completed, or this process began."""
        self._waits_for: list[str] = []

    async def run(self) -> None:
        """Run until finished, stopped by a signal (both return), or broken (raises)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        async with AsyncExitStack() as stack:
            stack.callback(self._lock.release)
            stack.callback(self._ledger.close)
            model_path = resolve_model(self._settings.model, self._settings.base_model.revision)
            logger.info("loading tasksets")
            configured = (*self._settings.train, *self._settings.eval)
            self._sources = {source.name: source_module.load_source(source) for source in configured}
            self._bus = await self._connect(stack)
            self._compose(model_path)
            self._load_state()
            await self._take_bus()
            await source_module.serve(list(self._sources.values()), stack)
            self._events.record("started", f"pid {os.getpid()}")
            try:
                freeze_heap()
                await self._work()
            finally:
                self._events.record(
                    "stopped", f"pid {os.getpid()}, {self._state} at step {max(0, self._policies.newest)}"
                )
                self._events.close()
                self._write_last_status()

    # ---- composition -------------------------------------------------------------------------------

    async def _connect(self, stack: AsyncExitStack) -> Bus:
        if self._server is not None:
            self._server.prepare()
            await self._server.start()
            stack.push_async_callback(self._server.stop)
            # From here on it may die at any time, also before the run has begun.
            self._supervised = asyncio.create_task(self._server.supervise())
            stack.callback(self._supervised.cancel)
            url, key_file = self._server.url, self._server.key_file
        else:
            url, key_file = external_server(self._settings)
        tls = Tls(self._settings.nats.ca_file, table="nats")
        bus = Bus(url, read_seed(key_file), "_INBOX", f"coordinator-{self._settings.run}", tls)
        await bus.connect()
        stack.push_async_callback(bus.close)
        return bus

    def _compose(self, model_path: Path) -> None:
        settings, names, bus, ledger, counters = (
            self._settings,
            self._names,
            self._bus,
            self._ledger,
            self.counters,
        )
        self._streams = Streams(
            bus,
            names,
            self._run.uuid,
            max_age_s=2 * settings.episodes.turn_deadline_s,
            lease_s=LEASE_S,
            storage=settings.nats.max_storage_mib << 20,
        )
        self._ownership = Ownership(bus, names, self._streams, self._run.uuid)
        self._dispatcher = Dispatcher(bus, names, ledger, self._streams, counters)
        self._intake = ReplyIntake(bus, names, ledger, self._dispatcher, counters, settings.seed)
        self._policies = Policies(
            ledger,
            self._streams,
            self._root,
            run=settings.run,
            run_uuid=self._run.uuid,
            identity=settings.base_model,
            bus_connected=bus.connected,
        )
        self._gateway = Gateway(
            ledger,
            self._dispatcher,
            counters,
            run=settings.run,
            seed=settings.seed,
            max_model_len=settings.max_model_len,
            turn_deadline_s=settings.episodes.turn_deadline_s,
            stop_token_ids=stop_token_ids(model_path),
            vocab_size=settings.base_model.vocab_size,
            on_refused=lambda reason: self._events.record("request_refused", f"gateway: {reason}", warn=True),
        )
        os.environ[SECRET_VARIABLE] = self._gateway.secret
        never_proxy_loopback()
        self._model_path = model_path
        self._groups = Groups(
            ledger,
            self._root,
            counters,
            max_attempts=settings.episodes.max_attempts,
            drop_uniform=settings.batch.drop_uniform_groups,
        )
        self._batches = Batches(settings, ledger, self._groups, counters)
        evals = {source.name: self._sources[source.name] for source in settings.eval}
        self._evaluations = Evaluations(ledger, self._groups, evals, self._root, settings.steps)
        self._trainer = Trainer(settings, self._on_checkpoint, busy=self._training)
        self._schedule = Schedule(
            settings,
            self._sources,
            self._groups,
            self._batches,
            self._policies,
            self._evaluations,
            self._dispatcher,
            attempt=self._attempt,
            announce_batch=self._trainer.announce,
        )
        self._fleet = Fleet(
            bus,
            names,
            self._streams,
            identity=settings.base_model,
            max_model_len=settings.max_model_len,
            lease_s=LEASE_S,
            wanted=lambda: self._policies.refs(self._schedule.needed_versions()),
            on_lost=self._dispatcher.lost,
            on_stalled=self._dispatcher.stalled,
            stall_s=settings.episodes.stall_s,
            mismatch=lambda worker: self._mismatches.of(worker),
            on_room=self._dispatcher.pump,
            on_bad_message=self._count_bad_message,
            ledger=ledger,
            events=self._events,
            run_root=self._root,
        )
        self._mismatches = Mismatches(self._fleet.quarantine)
        self._fleet.on_released = self._mismatches.forget
        self._dispatcher.fleet = self._fleet
        self._dispatcher.expected = self._expected
        self._reconciliation = Reconciliation(
            bus,
            self._server,
            self._streams,
            self._ownership,
            self._policies,
            self._schedule,
            self._fleet,
            self._dispatcher,
            self._intake,
        )
        self._control = Control(
            self._root,
            settings.control,
            status=self.status,
            pause=self._pause,
            workers=self._fleet.look,
            on_refused=lambda reason: self._events.record("request_refused", f"control: {reason}", warn=True),
            websocket_url=self._server.websocket_url if self._server else None,
        )

    async def _take_bus(self) -> None:
        """First contact with the streams. An embedded server that dies meanwhile comes back and is asked again."""
        deadline = time.monotonic() + (TAKE_BUS_S if self._server is not None else 0.0)
        while True:
            try:
                await self._streams.declare()
                await self._ownership.claim()
                await self._streams.deliver_again()
                await self._policies.report_newer()
                return
            except (BusError, nats.errors.Error, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("the bus is not ready, asking again: {}", error or type(error).__name__)
                await asyncio.sleep(1.0)

    def _load_state(self) -> None:
        # A temporary batch may be the committed one, so `batches` is left alone.
        for directory in (self._root, self._root / "traces"):
            remove_temporaries(directory)
        self._groups.load(self._run)
        self._batches.load()
        self._policies.load()
        self._evaluations.load([GroupRecord.decode(value) for _, value in self._ledger.scan("groups")])
        self._fleet.load()
        for _, value in self._ledger.scan("dispatches"):
            record = DispatchRecord.decode(value)
            self._dispatcher.adopt(record)
        self._steps.load(self._policies.newest)

    def _expected(self, journal: bytes) -> Expected | None:
        """What an answer under a journal key must be sampled from; None when its attempt is over."""
        try:
            key = TurnKey.parse(journal.decode())
        except ValueError:
            return None
        record = self._groups.episodes.get(key.episode)
        if record is None or record.state != "running" or record.attempt != key.attempt:
            return None
        group = self._groups.groups[record.group]
        policy = self._policies.records.get(group.version)
        return Expected(group, policy.adapter) if policy else None

    def _count_bad_message(self) -> None:
        self.counters.messages_bad += 1

    # ---- work --------------------------------------------------------------------------------------

    async def _work(self) -> None:
        ready = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ledger.run())
                tasks.create_task(self._bus.raise_when_refused())
                tasks.create_task(self._fleet.run())
                tasks.create_task(self._dispatcher.run())
                tasks.create_task(self._intake.run())
                tasks.create_task(self._gateway.serve(self._settings.gateway.port, ready.set))
                tasks.create_task(self._control.serve())
                tasks.create_task(self._reconciliation.run())
                tasks.create_task(self._watch())
                tasks.create_task(self._keep_keys())
                if self._supervised is not None:
                    tasks.create_task(ended(self._supervised))
                # Before the first wait: a start can be stopped, too.
                tasks.create_task(self._stop_on_request())
                await ready.wait()
                await self._reconciliation.done.wait()
                tasks.create_task(self._ownership.keep())
                tasks.create_task(self._trainer.supervise())
                if not self._stop.is_set():
                    self._state = "running"
                    tasks.create_task(self._run_schedule())
        except* Finished:
            if self._schedule.finished:
                self._state = "finished"
        except* AetherError as errors:
            self._state = "failed"
            raise first_error(errors) from errors
        finally:
            seen = self._fleet.seen(self._fleet.workers.values())
            self._ledger.commit_now(*self._ledger.with_every_commit(), *seen)

    async def _run_schedule(self) -> None:
        await self._schedule.run()
        await self._shut_down(0)
        raise Finished

    async def _stop_on_request(self) -> None:
        await self._stop.wait()
        await self._shut_down(self._settings.episodes.drain_s)
        raise Finished

    async def _shut_down(self, drain_s: float) -> None:
        """Nothing new; running episodes get `drain_s`; jobs stay where they are; the trainer ends its step."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._trainer.stop(TRAINER_STOP_S))
            tasks.create_task(self._schedule.drained(drain_s))
        self._dispatcher.closing = True
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._ledger.flush()
        except TimeoutError:
            raise DiskError(
                f"stopped, but the disk of {self._root} did not take the newest state within {FLUSH_S:.0f} s: free "
                "space and start again, what was not committed is done again"
            ) from None

    def _request_stop(self) -> None:
        if self._stop.is_set():
            return
        logger.info("stopping: episodes that do not finish in time stay journaled, the trainer finishes its step")
        self._state = "draining"
        self._stop.set()

    async def _pause(self, paused: bool) -> None:
        await self._groups.set_run(paused=paused)
        self._events.record("paused" if paused else "resumed", "no new groups" if paused else "by the operator")
        self._progress = time.monotonic()
        self._schedule.wake()

    async def _attempt(self, group: GroupRecord, episode: EpisodeRecord) -> Outcome:
        source = self._sources[group.source]
        opened = OpenEpisode(
            record=episode,
            group=group,
            adapter=self._policies.records[group.version].adapter,
            source=source.settings,
            claims=Claims(episode.id, episode.attempt),
        )
        renderer = {"name": self._settings.base_model.renderer, **self._settings.renderer}
        client = client_config(self._gateway, str(self._model_path), renderer)
        return await run_attempt(opened, source, self._gateway, client, self._settings.episodes.timeout_s)

    async def _keep_keys(self) -> None:
        """End keys whose time is over, and act on what was changed while nobody could tell us."""
        keys = Keys(self._settings)
        while True:
            try:
                for key in await asyncio.to_thread(keys.remove_expired):
                    logger.info("the key of worker {} before its rotation ended at {}", key.worker, key.until_text)
            except AetherError as error:
                logger.error("the workers' keys cannot be looked at: {}", error)
            await self._fleet.look()
            await asyncio.sleep(KEYS_S)

    async def _watch(self) -> None:
        """Say what the run waits for when no step is completed; stop then if configured."""
        settings = self._settings.watchdog
        while True:
            await asyncio.sleep(min(5.0, settings.after_s / 4))
            if time.monotonic() - self._progress < settings.after_s or self._state != "running":
                self._waits_for = []
                continue
            found = waits_for(self._view())
            if found != self._waits_for:
                logger.warning("no step for {:.0f} s; waiting for {}", settings.after_s, "; ".join(found))
            self._waits_for = found
            if settings.stop and not self._groups.run.paused:
                raise Stalled(f"no step was completed for {settings.after_s:.0f} s; waiting for {'; '.join(found)}")

    def _view(self) -> View:
        train = self._groups.unbatched()
        return View(
            bus_connected=self._bus.connected.is_set(),
            ledger_failing=self._ledger.failing,
            paused=self._groups.run.paused,
            trainer_ready=self._trainer.ready,
            trainer_busy=self._training(),
            turns_waiting=self._dispatcher.waiting,
            turns_running=self._dispatcher.running,
            episodes_running=self._schedule.episodes_running,
            groups_open=sum(group.state == "open" for group in train),
            scoring=sum(group.state == "ready" for group in train),
            workers=self._fleet.status(),
        )

    def _training(self) -> bool:
        """Whether a committed batch is not trained yet."""
        return self._batches.next_step > self._policies.newest + 1

    # ---- what the trainer says ---------------------------------------------------------------------

    async def _on_checkpoint(self, step: int, metrics: dict[str, float], mismatch: dict[str, Mismatch]) -> None:
        """Checkpoint `step` (and any before it that was not published yet) is complete."""
        for complete in complete_steps(self._root):
            if self._policies.newest < complete <= step:
                await self._publish(complete, metrics if complete == step else {})
        if self._batches.next_step > step + 1:
            await self._trainer.announce(step + 1)
        self._mismatches.add(mismatch, lambda episode: worker_of(self._ledger, episode))

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
        self._progress = time.monotonic()
        if batch is not None:
            await self._steps.add(batch, metrics, self._batches.records)
            logger.bind(step=version).info("step {} trained, mean reward {:.3f}", version, batch.reward)
        await self._evaluations.begin(version)
        self._fleet.announce()
        self._schedule.wake()

    # ---- status ------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """What `aether-coordinator status` shows."""
        batch = self._settings.batch
        train = self._groups.unbatched()
        ready = sum(group.state == "ready" for group in train)
        newest = self._policies.newest
        workers = self._fleet.status()
        paused = self._state == "running" and self._groups.run.paused
        return RunStatus(
            run=self._settings.run,
            run_uuid=self._run.uuid,
            state="paused" if paused else self._state,
            waits_for=self._waits_for,
            step=max(0, newest),
            steps=self._settings.steps,
            policy_version=newest,
            step_share=self._trainer.share if self._training() else min(1.0, ready / batch.groups),
            groups_open=len(train) - ready,
            groups_ready=ready,
            groups_per_batch=batch.groups,
            turns_waiting=self._dispatcher.waiting,
            turns_running=self._dispatcher.running,
            episodes_running=self._schedule.episodes_running,
            tokens_per_s=round(sum(worker.tokens_per_s for worker in workers), 1),
            started_s=self._groups.run.started_s,
            steps_done=self._steps.newest,
            evaluations=self._evaluations.status(),
            workers=workers,
            counters=self.counters,
            adapter=str(checkpoint_path(self._root, newest) / "adapter") if newest >= 0 else "",
        )

    def _write_last_status(self) -> None:
        write_durably(self._root / "status.json", self.status().model_dump_json(indent=2).encode())


def never_proxy_loopback() -> None:
    """verifiers' client asks the gateway on loopback; a proxy of the environment must not get to see that."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = {*filter(None, os.environ.get(name, "").split(",")), "127.0.0.1", "localhost"}
        os.environ[name] = ",".join(sorted(hosts))


async def ended(task: asyncio.Task[None]) -> None:
    """Wait for a task that began elsewhere, so that its failure is one of the group that waits."""
    await task


def first_error(errors: BaseExceptionGroup[Any]) -> BaseException:
    """The first leaf of an exception group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
