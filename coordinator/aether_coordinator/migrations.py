"""Forward migration of the state: one function per schema version, applied in one transaction each."""

import json
from collections.abc import Callable
from typing import Any

import msgpack
from aether_common.errors import RunDirectoryError
from aether_common.wire import pack
from loguru import logger

from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import SCHEMA


def _to_2(ledger: Ledger) -> list[Write]:
    """The journal names the reply that an answer came from; older ones did not record it."""
    return [
        Write("journal", key, pack({"reply": "", **msgpack.unpackb(value)})) for key, value in ledger.scan("journal")
    ]


def _to_3(ledger: Ledger) -> list[Write]:
    """Workers are recorded with their package versions and when they were seen; older ones with neither."""
    return [
        Write("workers", key, pack({"versions": {}, "seen_s": 0.0, **msgpack.unpackb(value)}))
        for key, value in ledger.scan("workers")
    ]


MIGRATIONS: dict[int, Callable[[Ledger], list[Write]]] = {2: _to_2, 3: _to_3}


def recorded_run(ledger: Ledger) -> dict[str, Any] | None:
    """The record of the run, of any schema, None when there is none. Raises `RunDirectoryError` when it is damaged."""
    recorded = ledger.get("run", b"run")
    if recorded is None:
        return None
    try:
        run = msgpack.unpackb(recorded)
        json.loads(run["settings"])
        return {**run, "run": str(run["run"]), "schema_version": int(run["schema_version"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"the record of the run cannot be read: restore it from a backup: {error!r}") from error


def migrate(ledger: Ledger) -> None:
    """Bring the state to this release's schema. Raises `RunDirectoryError` for a newer one."""
    run = recorded_run(ledger)
    if run is None:
        return
    version = run["schema_version"]
    if version > SCHEMA:
        raise RunDirectoryError(
            f"the state has schema {version}, this release knows {SCHEMA}: use the release that wrote it"
        )
    for target in range(version + 1, SCHEMA + 1):
        run["schema_version"] = target
        ledger.commit_now(*MIGRATIONS[target](ledger), Write("run", b"run", pack(run)))
        logger.info("state migrated to schema {}", target)
