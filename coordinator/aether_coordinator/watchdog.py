"""The watchdog: says what a run waits for when no step was completed for a configured time."""

from dataclasses import dataclass, field

from aether_common.errors import AetherError

from aether_coordinator.status import WorkerStatus


class Stalled(AetherError):
    """The run made no progress and is configured to stop then."""

    exit_code = 11


@dataclass(frozen=True, slots=True)
class View:
    """What the watchdog looks at."""

    bus_connected: bool
    ledger_failing: bool
    paused: bool
    trainer_ready: bool
    trainer_busy: bool
    """A committed batch is not trained yet."""
    turns_waiting: int
    turns_running: int
    episodes_running: int
    groups_open: int
    scoring: int
    """Groups whose episodes are final and that are not scored or cut yet."""
    workers: list[WorkerStatus] = field(default_factory=list)


def waits_for(view: View) -> list[str]:
    """What the run waits for, the cause nearest to the root first; never empty."""
    found: list[str] = []
    if view.ledger_failing:
        found.append("disk: the state cannot be written; free space on the disk of run_root")
    if not view.bus_connected:
        found.append("nats-server: not reachable; see logs/nats-server.log, or the server that nats.url names")
    if view.paused:
        found.append("you: the run is paused; `aether-coordinator resume`")
    if view.trainer_busy:
        found.append(
            "trainer: the next batch is there and not trained; see logs/trainer.log"
            if view.trainer_ready
            else "trainer: it is not ready; see logs/trainer.log"
        )
    usable = [worker for worker in view.workers if worker.state == "connected"]
    found += [
        f"you: worker {worker.name} is quarantined ({worker.reason}); repair it, then "
        f"`aether-coordinator worker release {worker.name}`"
        for worker in view.workers
        if worker.state == "quarantined"
    ]
    if (view.turns_waiting or view.turns_running) and not usable:
        reasons = [f"{worker.name} is {worker.state}: {worker.reason}".rstrip(": ") for worker in view.workers]
        found.append(f"worker: no compatible worker is connected ({'; '.join(reasons) or 'none ever registered'})")
    elif view.turns_waiting:
        found.append(f"slot: {view.turns_waiting} turns wait, the workers' slots are full")
    elif view.turns_running:
        found.append(f"worker: {view.turns_running} turns are being generated")
    elif view.episodes_running:
        found.append(f"environment: {view.episodes_running} episodes run without asking for a turn (sandbox, tools)")
    if view.scoring and not view.trainer_busy:
        found.append(f"scoring: {view.scoring} groups are finished and wait for their batch")
    return found or ["nothing that is known: see logs/coordinator.jsonl"]
