"""Every decoder of the coordinator, given anything: the documented error or a value, never a crash."""

import pytest
from aether_common.errors import ConfigError, RunDirectoryError
from aether_common.names import Names
from aether_common.wire import pack
from aether_coordinator.accounts import make_key
from aether_coordinator.journal import TurnKey
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.migrations import migrate
from aether_coordinator.records import (
    BatchRecord,
    DispatchRecord,
    EpisodeRecord,
    GroupRecord,
    PolicyRecord,
    Record,
    RunRecord,
    SourceRecord,
    TurnRecord,
    WorkerRecord,
)
from aether_coordinator.samples import TraceError, decode_episode, encode_episode, episode_samples
from aether_coordinator.workers_conf import read_workers
from fuzzing import BOUNDED, near_msgpack
from hypothesis import given
from hypothesis import strategies as st
from nats_server import add_worker
from run_directory import episode_of, node

RECORDS: list[Record] = [
    RunRecord(run="r", uuid="u", created_s=1.0, settings="{}"),
    SourceRecord(name="s", drawn=3),
    GroupRecord(id=1, kind="train", source="s", task=0, version=0, size=2),
    EpisodeRecord(group=1, index=0, reward=0.5),
    TurnRecord(
        job="j",
        worker="w",
        dispatch=0,
        reply="r",
        version=0,
        adapter="a",
        tokens=b"",
        logprobs=b"",
        finish_reason="stop",
    ),
    DispatchRecord(
        job="j",
        worker="w",
        dispatch=0,
        journal=b"k",
        kind="eval",
        version=0,
        adapter="a",
        max_tokens=1,
        group=1,
        seed=0,
    ),
    BatchRecord(step=1, digest="d", groups=[1], reward=0.0, tokens=3, lag=0.0),
    PolicyRecord(
        version=0, adapter="a", files=[("f", 1, "d")], rank=8, alpha=16, target_modules=["q"], dtype="x", activated_s=0
    ),
    WorkerRecord(name="w", incarnation="1", engine="e", slots=1, window=2, versions={"torch": "2"}, seen_s=1.5),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records(record):
    kind = type(record)
    assert kind.decode(record.encode()) == record

    @BOUNDED
    @given(near_msgpack(record.encode()))
    def decode(data: bytes) -> None:
        try:
            kind.decode(data)
        except RunDirectoryError as error:
            assert kind.__name__ in str(error) and "\n" not in str(error)

    decode()


def test_traces():
    valid = encode_episode(episode_of([node(None, [1], 0), node(0, [2, 3], 2)]))
    group, record = RECORDS[2], RECORDS[3]
    assert isinstance(group, GroupRecord) and isinstance(record, EpisodeRecord)
    assert len(episode_samples(decode_episode(valid), record, group, 1.0, 1.0)) == 1

    @BOUNDED
    @given(near_msgpack(valid))
    def decode(data: bytes) -> None:
        try:
            decode_episode(data)
        except TraceError as error:
            assert str(error)

    decode()


@BOUNDED
@given(st.text(max_size=120) | st.from_regex(r"g\d+-e\d+/\d+/[0-9a-f]{64}/\d+", fullmatch=True))
def test_journal_keys(text):
    try:
        key = TurnKey.parse(text)
    except ValueError:
        return
    assert key.journal.decode() == text


@pytest.mark.parametrize(
    "text",
    ["", "/", "///", "g00000001-e000/0/x/000000", f"g00000001-e000/00/{'a' * 64}/000000", f"x/0/{'a' * 64}/000000"]
    + [f"g00000001-e000/{attempt}/{'a' * 64}/{count}" for attempt, count in (("0", "0"), ("-1", "000000"), ("٣", "0"))],
)
def test_only_the_written_form_of_a_journal_key_is_one(text):
    with pytest.raises(ValueError):
        TurnKey.parse(text)


def test_worker_files(tmp_path):
    path = tmp_path / "workers.conf"
    assert read_workers(path) == []
    names = Names("r")
    for worker in ("w1", "w2"):
        add_worker(path, names, worker, make_key().public)
    valid = path.read_bytes()
    assert [key.worker for key in read_workers(path)] == ["w1", "w2"]
    mutated = st.tuples(st.integers(0, len(valid) - 1), st.integers(0, 255)).map(
        lambda change: valid[: change[0]] + bytes([change[1]]) + valid[change[0] + 1 :]
    )

    @BOUNDED
    @given(st.binary(max_size=300) | mutated | st.just(b"nkey: U" + b"A" * 55 + b" nkey: U" * 3000))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            workers = read_workers(path)
        except ConfigError as error:
            assert "workers.conf" in str(error)
        else:
            assert all(key.worker.isascii() and len(key.public) == 56 for key in workers)

    read()


@pytest.mark.parametrize("recorded", [b"", b"\xc1", pack([]), pack({}), pack({"schema_version": "x"}), pack(7)])
def test_a_run_record_that_cannot_be_read_is_refused(tmp_path, recorded):
    ledger = Ledger(tmp_path)
    ledger.commit_now(Write("run", b"run", recorded))
    with pytest.raises(RunDirectoryError, match="restore"):
        migrate(ledger)
    ledger.close()
