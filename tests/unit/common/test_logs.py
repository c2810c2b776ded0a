"""The JSON lines of a process that runs for weeks."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aether_common import logs
from loguru import logger


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    logger.remove()


def messages(file: Path) -> list[str]:
    return [json.loads(line)["message"] for line in file.read_text().splitlines()]


def test_a_full_file_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two files; the newest lines are in them, each once, also over a restart of the process."""
    monkeypatch.setattr(logs, "FILE_BYTES", 4000)
    file, older = tmp_path / "logs" / "worker.jsonl", tmp_path / "logs" / "worker.1.jsonl"
    for start in (0, 50):
        logs.configure("test", "worker", file)
        for number in range(start, start + 50):
            logger.info("line {}", number)
    assert sorted(path.name for path in file.parent.iterdir()) == ["worker.1.jsonl", "worker.jsonl"]
    kept = messages(older) + messages(file)
    assert kept == [f"line {number}" for number in range(100 - len(kept), 100)]
    assert older.stat().st_size < 4300
    assert file.stat().st_size < 4300
    file.unlink()
    for number in range(40):
        logger.info("later {}", number)
    assert messages(file)[-1] == "later 39"
