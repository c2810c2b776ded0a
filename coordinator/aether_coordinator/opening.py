"""Opening a run: the recorded one if there is one, and what may differ from its settings."""

import json
import time
import uuid
from typing import Any

from aether_common.errors import ConfigError, RunDirectoryError
from loguru import logger

from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.migrations import migrate, recorded_run
from aether_coordinator.records import RunRecord
from aether_coordinator.settings import ServerSettings

MAY_CHANGE = {
    "steps",
    "model",
    "run_root",
    "episodes",
    "trainer",
    "nats",
    "gateway",
    "control",
    "retention",
    "watchdog",
    "log_level",
}
"""Settings that may differ when a run is resumed."""


def first_difference(key: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """The innermost key at which two settings differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in new:
            if old.get(name) != new[name]:
                return first_difference(f"{key}.{name}", old.get(name), new[name])
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            if left != right:
                return first_difference(f"{key}.{index}", left, right)
    return key, old, new


def changed_settings(ledger: Ledger, settings: ServerSettings) -> list[str]:
    """The settings that differ from the recorded ones and may; writes nothing, reads every schema.

    Raises `RunDirectoryError` for the state of another run, `ConfigError` for a setting that may not change.
    """
    run = recorded_run(ledger)
    if run is None:
        return []
    if run["run"] != settings.run:
        raise RunDirectoryError(
            f"{settings.run_root} belongs to run {run['run']!r}, not {settings.run!r}: choose another run_root"
        )
    now, before = settings.model_dump(mode="json"), json.loads(run["settings"])
    # A table that did not exist when the run began had its defaults then.
    changed = [key for key in now if key in before and now[key] != before[key]]
    if refused := [key for key in changed if key not in MAY_CHANGE]:
        key, old, new = first_difference(refused[0], before[refused[0]], now[refused[0]])
        raise ConfigError(
            f"{key} was {old!r} when run {settings.run!r} began and is {new!r} now: "
            f"put it back (these may change on resume: {', '.join(sorted(MAY_CHANGE))})"
        )
    return changed


def open_run(ledger: Ledger, settings: ServerSettings) -> RunRecord:
    """The recorded run, or a new one. Raises `RunDirectoryError` or `ConfigError` when it does not fit."""
    changed = changed_settings(ledger, settings)
    migrate(ledger)
    now = settings.model_dump(mode="json")
    recorded = ledger.get("run", b"run")
    if recorded is None:
        run = RunRecord(run=settings.run, uuid=uuid.uuid4().hex, created_s=time.time(), settings=json.dumps(now))
        ledger.commit_now(Write("run", b"run", run.encode()))
        return run
    run = RunRecord.decode(recorded)
    if changed:
        logger.info("resumed with changed settings: {}", ", ".join(changed))
        run = run.with_(settings=json.dumps(now))
        ledger.commit_now(Write("run", b"run", run.encode()))
    return run
