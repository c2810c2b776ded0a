"""The event log of a run: who joined, left, was refused, revoked or quarantined, and why.

`events.jsonl` in the run directory, one JSON object a line, appended by the coordinator and by the
command line alike. It is bounded: a full file becomes `events.1.jsonl`, and equal events of one
worker that come in a flood are counted instead of written, so that nobody can fill the disk or push
the history out quickly. A disk that takes nothing never stops the run.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from loguru import logger

EVENTS = "events.jsonl"
OLDER = "events.1.jsonl"
MAX_FILE = 16 << 20
MAX_TEXT = 500
"""Characters of a message; what a worker sends may be in it."""
FLOOD = 5
"""Equal events of one worker that are written in a minute; the others are counted."""
FLOOD_S = 60.0
WAIT_S = 0.3
"""Between two looks at what was appended."""

Event = Literal[
    "started",
    "stopped",
    "paused",
    "resumed",
    "joined",
    "came_back",
    "left",
    "lost",
    "superseded",
    "stalled",
    "refused",
    "added",
    "rotated",
    "key_expired",
    "revoked",
    "quarantined",
    "released",
    "reply_refused",
    "bad_message",
    "request_refused",
]


def append_event(run_root: Path, event: Event, message: str, worker: str | None = None, **fields: object) -> None:
    """Append one event; what the disk refuses is dropped."""
    entry: dict[str, object] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event}
    entry |= ({"worker": worker} if worker is not None else {}) | fields | {"message": printable(message)}
    with suppress(OSError):
        _append(run_root, json.dumps(entry).encode() + b"\n")


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """One line that a terminal only shows: what a worker sends must not move the operator's cursor."""
    return "".join(character if character.isprintable() else " " for character in text[:limit])


def _append(run_root: Path, line: bytes) -> None:
    path = run_root / EVENTS
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # The lock is for the full file alone: one of the processes renames it, once.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size + len(line) > MAX_FILE:
                if _is_at(descriptor, path):
                    path.rename(run_root / OLDER)
                continue
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, size)
            return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@dataclass(slots=True)
class _Flood:
    since: float
    count: int = 0


class Events:
    """The coordinator's side: each event is a line of the log, too, and floods are collapsed in both."""

    def __init__(self, run_root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_root = run_root
        self._clock = clock
        self._floods: dict[tuple[Event, str | None], _Flood] = {}

    def record(
        self, event: Event, message: str, worker: str | None = None, *, warn: bool = False, **fields: object
    ) -> None:
        now = self._clock()
        flood = self._floods.get((event, worker))
        if flood is not None and now - flood.since >= FLOOD_S:
            self._end(event, worker)
            flood = None
        if flood is None:
            flood = self._floods[event, worker] = _Flood(now)
        flood.count += 1
        if flood.count <= FLOOD:
            self._write(event, message, worker, warn=warn, **fields)

    def tick(self) -> None:
        """Write how many were not written; to be called now and then."""
        now = self._clock()
        for event, worker in [key for key, flood in self._floods.items() if now - flood.since >= FLOOD_S]:
            self._end(event, worker)

    def close(self) -> None:
        for event, worker in list(self._floods):
            self._end(event, worker)

    def _end(self, event: Event, worker: str | None) -> None:
        flood = self._floods.pop((event, worker))
        if (more := flood.count - FLOOD) > 0:
            self._write(event, f"{more} more like this within {FLOOD_S:.0f} s", worker, warn=True, repeated=more)

    def _write(self, event: Event, message: str, worker: str | None, *, warn: bool, **fields: object) -> None:
        ids = {"worker": worker} if worker is not None else {}
        subject = f"worker {worker}" if worker is not None else "coordinator"
        logger.bind(event=event, **ids, **fields).log(
            "WARNING" if warn else "INFO", "{} {}: {}", subject, event.replace("_", " "), printable(message)
        )
        append_event(self._run_root, event, message, worker, **fields)


# ---- reading -----------------------------------------------------------------------------------------


def read_events(run_root: Path) -> tuple[list[dict[str, Any]], Iterator[dict[str, Any]]]:
    """All events that are kept, oldest first, and those that come after them, for ever.

    Lines that are no events are skipped.
    """
    reader = _Reader(run_root)
    return reader.read(), _follow(reader)


def _follow(reader: "_Reader") -> Iterator[dict[str, Any]]:
    while True:
        time.sleep(WAIT_S)
        yield from reader.read()


class _Reader:
    """Reads what was appended since the last time, also after the file was set aside."""

    def __init__(self, run_root: Path) -> None:
        self._paths = (run_root / EVENTS, run_root / OLDER)
        self._inode = 0
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with ExitStack() as stack:
            # In this order: a file that is set aside in between is opened twice, not missed.
            newest, older = (_opened(stack, path) for path in self._paths)
            if older is not None and self._inode in (0, os.fstat(older.fileno()).st_ino):
                found += self._rest(older)
            if newest is not None:
                found += self._rest(newest)
        return found

    def _rest(self, file: BinaryIO) -> list[dict[str, Any]]:
        inode = os.fstat(file.fileno()).st_ino
        if inode != self._inode:
            self._inode, self._offset = inode, 0
        file.seek(self._offset)
        data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return _parsed(data[:end].split(b"\n"))


def _opened(stack: ExitStack, path: Path) -> BinaryIO | None:
    with suppress(FileNotFoundError):
        return stack.enter_context(path.open("rb"))
    return None


def _parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    return [entry for line in lines if (entry := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and {"time", "event", "message"} <= entry.keys() else None


def event_line(entry: dict[str, Any]) -> str:
    """One event as text."""
    name = entry["event"].replace("_", " ")
    return f"{entry['time'][:19].replace('T', ' ')}  {name:<15}  {entry.get('worker', '-'):<16}  {entry['message']}"
