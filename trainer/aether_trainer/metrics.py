"""`metrics/trainer.jsonl` in the run directory: one JSON line per step.

A checkpoint carries the metrics of its step, so a line that a crash took is written again at the next start.
"""

import json
import os
import time
from pathlib import Path

from aether_common.files import disk_error


def metrics_path(run_root: Path) -> Path:
    return run_root / "metrics" / "trainer.jsonl"


def append_metrics(run_root: Path, step: int, metrics: dict[str, float]) -> None:
    """Append the line of a step. Raises `RunDirectoryError` when the disk refuses it."""
    path = metrics_path(run_root)
    line = json.dumps({"step": step, "time": round(time.time(), 3)} | metrics, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise disk_error(error, path) from error


def repair_metrics(run_root: Path, step: int, metrics: dict[str, float]) -> None:
    """Cut off half a line and append that of the newest checkpoint if it is missing."""
    path = metrics_path(run_root)
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    written = [json.loads(line)["step"] for line in whole.splitlines()]
    if step and step not in written:
        append_metrics(run_root, step, metrics)
