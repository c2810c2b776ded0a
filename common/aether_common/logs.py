"""Logging: one readable line each in the terminal, JSON lines in a file, both with the ids that matter.

Every process calls `configure` once. Ids (policy, group, episode, job, worker) are bound with
`logger.bind(job=…)` or `logger.contextualize(…)`.
"""

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from aether_common.files import disk_error

if TYPE_CHECKING:
    from loguru import Message, Record

IDS = ("step", "policy", "group", "episode", "job", "worker")
FILE_BYTES = 64 << 20
"""A file of JSON lines is set aside at this size, as NAME.1.jsonl in place of the one before."""
LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR")


def _line(record: "Record") -> str:
    extra = record["extra"]
    record["extra"]["_ids"] = "".join(f" {key}={extra[key]}" for key in IDS if key in extra)
    tail = "\n{exception}" if record["exception"] else ""
    return (
        "<dim>{time:HH:mm:ss}</dim> <level>{level.name:<7}</level> "
        "<dim>{extra[run]}/{extra[role]}</dim> {message}<dim>{extra[_ids]}</dim>" + tail + "\n"
    )


class _JsonFile:
    """Appends one JSON object per record to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise disk_error(error, path) from error

    def write(self, message: "Message") -> None:
        record = message.record
        entry: dict[str, object] = {"time": record["time"].isoformat(), "level": record["level"].name}
        entry |= {key: value for key, value in record["extra"].items() if not key.startswith("_")}
        entry["message"] = record["message"]
        if record["exception"]:
            entry["exception"] = str(message)[-8000:]
        # A full disk must not stop the process through its log; the terminal still has the line.
        with suppress(OSError):
            if self._file.tell() > FILE_BYTES:
                self._set_aside()
            self._file.write(json.dumps(entry, default=str) + "\n")
            self._file.flush()

    def _set_aside(self) -> None:
        with suppress(FileNotFoundError):
            self._path.replace(self._path.with_suffix(".1.jsonl"))
        full, self._file = self._file, self._path.open("a", encoding="utf-8")
        full.close()


class _StandardLogging(logging.Handler):
    """Hands the records of libraries that use `logging` to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname if record.levelname in LEVELS else "INFO"
        logger.opt(exception=record.exc_info).log(level, "{}: {}", record.name, record.getMessage())


def configure(run: str, role: str, file: Path | None = None, level: str = "INFO") -> None:
    """Set up logging for this process; `file` receives JSON lines. Raises `RunDirectoryError`."""
    logger.remove()
    logger.configure(extra={"run": run, "role": role})
    logger.add(sys.stderr, format=_line, level=level, backtrace=False, diagnose=False)
    if file is not None:
        logger.add(_JsonFile(file).write, level=level, format="{message}\n{exception}", backtrace=False, diagnose=False)
    logging.basicConfig(handlers=[_StandardLogging()], level=logging.WARNING, force=True)
