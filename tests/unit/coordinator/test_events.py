"""The event log: bounded whatever comes, readable whatever was written, and never in the way."""

import json
import os
import threading

import pytest
from aether_coordinator import events as module
from aether_coordinator.events import EVENTS, OLDER, Events, append_event, event_line, read_events


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def texts(root, **where):
    entries, _ = read_events(root)
    return [entry["message"] for entry in entries if where.items() <= entry.items()]


def test_an_event_has_time_kind_worker_and_message(tmp_path):
    append_event(tmp_path, "joined", "null engine", "w1", slots=3)
    append_event(tmp_path, "paused", "x" * 2000)
    first, second = map(json.loads, (tmp_path / EVENTS).read_text().splitlines())
    assert first.items() >= {"event": "joined", "worker": "w1", "slots": 3, "message": "null engine"}.items()
    assert first["time"].endswith("+00:00") and len(first["time"]) == 29
    assert "worker" not in second and len(second["message"]) == 500
    assert (tmp_path / EVENTS).stat().st_mode & 0o777 == 0o600
    shown = event_line(first)
    assert shown.split() == [*first["time"][:19].split("T"), "joined", "w1", "null", "engine"]


def test_a_message_is_one_line_without_control_characters(tmp_path):
    append_event(tmp_path, "refused", "bad\x1b[2J\nname\x9b é", "w1")
    assert texts(tmp_path) == ["bad [2J name  é"]


def test_a_flood_is_counted_and_only_that_of_one_worker(tmp_path):
    clock = Clock()
    events = Events(tmp_path, clock)
    for number in range(1000):
        events.record("bad_message", f"no. {number}", "w1", warn=True)
        if number < 3:
            events.record("bad_message", f"no. {number}", "w2", warn=True)
        clock.now += 0.01
    assert texts(tmp_path, worker="w1") == [f"no. {number}" for number in range(5)]
    events.tick()
    assert len(texts(tmp_path, worker="w1")) == 5  # The minute is not over.
    clock.now += 60
    events.tick()
    assert texts(tmp_path, worker="w1")[5:] == ["995 more like this within 60 s"]
    assert texts(tmp_path, worker="w2") == ["no. 0", "no. 1", "no. 2"]
    events.record("bad_message", "another", "w1")
    for _ in range(6):
        events.record("lost", "gone", "w1")
    events.close()
    assert texts(tmp_path, worker="w1", event="lost")[-1] == "2 more like this within 60 s".replace("2", "1", 1)
    assert texts(tmp_path, worker="w1")[6] == "another"


def test_a_full_file_is_set_aside_and_both_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE", 4000)
    for number in range(100):
        append_event(tmp_path, "refused", f"no. {number:03}", "w1")
    assert (tmp_path / EVENTS).stat().st_size <= 4000 and (tmp_path / OLDER).stat().st_size <= 4000
    kept = texts(tmp_path)
    assert kept == [f"no. {number:03}" for number in range(100 - len(kept), 100)] and len(kept) > 40


def test_many_writers_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE", 20_000)
    threads = [
        threading.Thread(target=lambda who=who: [append_event(tmp_path, "joined", f"{who} {n}") for n in range(40)])
        for who in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts(tmp_path)) == sorted(f"{who} {n}" for who in range(4) for n in range(40))


def test_lines_that_are_none_are_skipped(tmp_path):
    append_event(tmp_path, "joined", "one")
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"time": 1}\n\n{"time": "x", "event"')
    assert texts(tmp_path) == ["one"]
    assert texts(tmp_path / "nowhere") == []


@pytest.mark.parametrize("written", [None, 3])
def test_a_full_disk_is_no_reason_to_stop(tmp_path, monkeypatch, written):
    append_event(tmp_path, "joined", "one")
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if written is None:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:written])

    monkeypatch.setattr(os, "write", full)
    append_event(tmp_path, "joined", "two")
    monkeypatch.setattr(os, "write", write)
    append_event(tmp_path, "joined", "three")
    assert texts(tmp_path) == ["one", "three"]


def test_what_is_appended_later_follows_also_into_the_next_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.0)
    monkeypatch.setattr(module, "MAX_FILE", 1000)
    append_event(tmp_path, "joined", "old")
    old, following = read_events(tmp_path)
    assert [entry["message"] for entry in old] == ["old"]
    for number in range(12):
        append_event(tmp_path, "joined", f"no. {number}")
        assert next(following)["message"] == f"no. {number}"
    assert (tmp_path / OLDER).exists()
