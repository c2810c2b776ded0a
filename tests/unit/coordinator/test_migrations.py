"""The state of an older release, as it was stored, opened by this one."""

from pathlib import Path

import msgpack
import pytest
from aether_common.errors import RunDirectoryError
from aether_common.wire import pack
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.migrations import migrate
from aether_coordinator.records import (
    SCHEMA,
    BatchRecord,
    EpisodeRecord,
    GroupRecord,
    PolicyRecord,
    RunRecord,
    SourceRecord,
    TurnRecord,
    WorkerRecord,
)
from aether_coordinator.samples import decode_episode

STORED = Path(__file__).parent / "data" / "state_v1.msgpack"
KINDS = {
    "sources": SourceRecord,
    "groups": GroupRecord,
    "episodes": EpisodeRecord,
    "journal": TurnRecord,
    "batches": BatchRecord,
    "policies": PolicyRecord,
    "workers": WorkerRecord,
}


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path)
    databases = msgpack.unpackb(STORED.read_bytes())
    ledger.commit_now(*(Write(name, key, value) for name, rows in databases.items() for key, value in rows))
    yield ledger
    ledger.close()


def everything(ledger: Ledger) -> dict[str, list[tuple[bytes, bytes]]]:
    return {name: list(ledger.scan(name)) for name in (*KINDS, "run", "traces")}


def test_a_state_of_schema_1_is_read_by_this_release(ledger):
    before = everything(ledger)
    assert msgpack.unpackb(ledger.get("run", b"run"))["schema_version"] == 1
    migrate(ledger)
    run = RunRecord.decode(ledger.get("run", b"run"))
    assert run.schema_version == SCHEMA == 3 and run.run == "tiny"
    for name, kind in KINDS.items():
        rows = list(ledger.scan(name))
        assert [key for key, _ in rows] == [key for key, _ in before[name]]
        for _, value in rows:
            kind.decode(value)
    # What was recorded is unchanged; what was not is said to be unknown.
    for (_, old), (_, new) in zip(before["journal"], ledger.scan("journal"), strict=True):
        assert msgpack.unpackb(new) == {**msgpack.unpackb(old), "reply": ""}
    for (_, old), (_, new) in zip(before["workers"], ledger.scan("workers"), strict=True):
        assert msgpack.unpackb(new) == {**msgpack.unpackb(old), "versions": {}, "seen_s": 0.0}
    for _, trace in ledger.scan("traces"):
        assert decode_episode(trace).traces


def test_a_state_of_schema_2_keeps_its_journal_and_learns_about_workers(ledger):
    run = msgpack.unpackb(ledger.get("run", b"run"))
    worker = {"name": "w9", "incarnation": "1", "engine": "vllm", "slots": 3, "window": 4}
    ledger.commit_now(Write("run", b"run", pack({**run, "schema_version": 2})), Write("workers", b"w9", pack(worker)))
    journal = list(ledger.scan("journal"))
    migrate(ledger)
    assert list(ledger.scan("journal")) == journal
    assert WorkerRecord.decode(ledger.get("workers", b"w9")) == WorkerRecord(**worker, versions={}, seen_s=0.0)


def test_a_second_migration_changes_nothing(ledger):
    migrate(ledger)
    once = everything(ledger)
    migrate(ledger)
    assert everything(ledger) == once


def test_a_newer_state_is_refused_by_its_schema(ledger):
    run = msgpack.unpackb(ledger.get("run", b"run"))
    ledger.commit_now(Write("run", b"run", pack({**run, "schema_version": SCHEMA + 1})))
    before = everything(ledger)
    with pytest.raises(RunDirectoryError, match=f"schema {SCHEMA + 1}, this release knows {SCHEMA}"):
        migrate(ledger)
    assert everything(ledger) == before


def test_an_empty_state_needs_no_migration(tmp_path):
    ledger = Ledger(tmp_path / "empty")
    migrate(ledger)
    assert list(ledger.scan("run")) == []
    ledger.close()
