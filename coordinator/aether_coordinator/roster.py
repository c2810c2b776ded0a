"""The workers of a run as `worker list` shows them: their keys, and what is known of each.

From the running coordinator, else from what is recorded.
"""

import time
from dataclasses import dataclass, field

from aether_common.errors import AetherError

from aether_coordinator.keys import Keys
from aether_coordinator.settings import ServerSettings
from aether_coordinator.standing import Standing, read_standing
from aether_coordinator.status import RunStatus, WorkerStatus


@dataclass(frozen=True, slots=True)
class Entry:
    """One worker."""

    name: str
    state: str
    """That of the status; `never seen`, or `unknown` when the run is not running."""
    key: str
    last_seen_s: float | None = None
    engine: str = ""
    slots: int = 0
    running: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Roster:
    """By name, and why there is no more than what is recorded (empty while the run runs)."""

    entries: list[Entry]
    note: str


def roster(keys: Keys) -> Roster:
    """Raises `ConfigError` when the keys cannot be read."""
    settings = keys.settings
    standing = read_standing(settings.run_root)
    seen, note = _running(settings)
    if note:
        recorded, problem = _recorded(settings)
        seen = {entry.name: entry for entry in recorded}
        note += problem
    good: dict[str, list[str]] = {}
    for key in keys.all():
        good.setdefault(key.worker, []).append(f"valid until {key.until_text}" if key.until else "valid")
    shown = {name: ", ".join(sorted(texts)) for name, texts in good.items()}
    names = sorted({*shown, *seen, *standing.revoked, *standing.quarantined})
    # Keys of a server elsewhere are not known here.
    missing = "none" if keys.host is not None else "not known here"
    return Roster([_entry(name, seen.get(name), shown.get(name, missing), standing, note) for name in names], note)


def _entry(name: str, seen: WorkerStatus | None, key: str, standing: Standing, note: str) -> Entry:
    revoked = name in standing.revoked
    key = "revoked" if revoked and not key.startswith("valid") else key
    reason = standing.revoked.get(name) or standing.quarantined.get(name) or (seen.reason if seen else "")
    state = "revoked" if revoked else "quarantined" if name in standing.quarantined else ""
    if seen is None:
        return Entry(name, state or "never seen", key, reason=reason)
    return Entry(
        name,
        state or ("unknown" if note else seen.state),
        key,
        seen.last_seen_s,
        seen.engine,
        seen.slots,
        seen.running,
        seen.versions,
        reason,
    )


def _running(settings: ServerSettings) -> tuple[dict[str, WorkerStatus], str]:
    from aether_coordinator.control import call

    try:
        status = RunStatus.model_validate_json(call(settings.run_root, "/status"))
    except AetherError:
        return {}, "the run is not running: what is recorded is shown"
    return {worker.name: worker for worker in status.workers}, ""


def _recorded(settings: ServerSettings) -> tuple[list[WorkerStatus], str]:
    """The workers that the state knows, and why it cannot be read."""
    state = settings.run_root / "state"
    if not (state / "data.mdb").is_file():
        return [], ""
    from aether_coordinator.ledger import Ledger
    from aether_coordinator.records import WorkerRecord

    now = time.time()
    try:
        ledger = Ledger(state)
        try:
            records = [WorkerRecord.decode(value) for _, value in ledger.scan("workers")]
        finally:
            ledger.close()
    except AetherError as error:
        return [], f"; {error}"
    return [
        WorkerStatus(
            name=record.name,
            state="lost",
            engine=record.engine,
            slots=record.slots,
            versions=record.versions,
            last_seen_s=now - record.seen_s,
        )
        for record in records
    ], ""


def table(entries: list[Entry]) -> str:
    """As text, one line a worker."""
    rows = [("name", "state", "last seen", "slots", "running", "key", "versions", "reason")]
    rows += [
        (
            entry.name,
            entry.state,
            "-" if entry.last_seen_s is None else _ago(entry.last_seen_s),
            str(entry.slots or "-"),
            str(entry.running),
            entry.key,
            ", ".join(f"{package} {version}" for package, version in sorted(entry.versions.items())) or "-",
            entry.reason,
        )
        for entry in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _ago(seconds: float) -> str:
    if seconds > 10 * 365 * 86400:
        return "not recorded"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
