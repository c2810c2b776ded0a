"""Every decoder of `common`, given anything: the documented error or a value that can be encoded, never a crash."""

import json
import string
from contextlib import suppress

import pytest
from aether_common.arrays import pack_floats, pack_tokens, unpack_floats, unpack_tokens
from aether_common.batch import Batch, Sample, decode_batch
from aether_common.checkpoint import checkpoint_path, complete_steps, read_manifest, verify_adapter
from aether_common.digests import FileEntry, file_list_bytes, parse_file_list
from aether_common.errors import ConfigError, MessageError, RunDirectoryError
from aether_common.identity import ModelIdentity
from aether_common.names import Names, parse_job, parse_reply
from aether_common.pipe import (
    BatchReady,
    CheckpointWritten,
    Progress,
    Ready,
    Stop,
    decode_from_trainer,
    decode_to_trainer,
)
from aether_common.settings import read_toml
from aether_common.wire import (
    DesiredState,
    Heartbeat,
    Job,
    Message,
    PolicyRef,
    Poll,
    Registration,
    RegistrationAnswer,
    Reply,
    Sampling,
    unpack,
)
from aether_coordinator.settings import ServerSettings
from aether_trainer.settings import TrainerSettings
from aether_worker.settings import WorkerSettings
from fuzzing import BOUNDED, near_json, near_msgpack
from hypothesis import given
from hypothesis import strategies as st
from run_directory import IDENTITY, write_checkpoint

DIGEST = "a" * 64
MESSAGES: list[Message] = [
    Job(
        job="j-1",
        dispatch=1,
        key="k",
        kind="train",
        version=2,
        adapter=DIGEST,
        prompt=pack_tokens([1, 2]),
        sampling=Sampling(max_tokens=4, stop_token_ids=(2,)),
        seed=2**62,
        session="s",
        remaining_ms=1000,
    ),
    Reply.model_validate(
        {"job": "j", "dispatch": 0, "worker": "w", "incarnation": "1", "kind": "ok", "tokens": b"1234"}
    ),
    Registration(
        worker="w",
        incarnation="1",
        protocol_min=1,
        protocol_max=1,
        engine="e",
        slots=1,
        window=2,
        identity=IDENTITY,
        max_model_len=8,
        versions={"a": "1"},
    ),
    RegistrationAnswer(accepted=True, state=DesiredState(revision=1, policies=[PolicyRef(version=0, adapter=DIGEST)])),
    Heartbeat(worker="w", incarnation="1", running={"j": 3}, adapters=[DIGEST], clock=1.5),
    Poll(worker="w", incarnation="1", revision=3),
    DesiredState(revision=2, cancel=["j"]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages(message):
    kind = type(message)
    assert kind.decode(message.encode()) == message

    @BOUNDED
    @given(near_msgpack(message.encode()))
    def decode(data: bytes) -> None:
        try:
            found = kind.decode(data)
        except MessageError as error:
            assert str(error)
        else:
            assert kind.decode(found.encode()).encode() == found.encode()

    decode()


@pytest.mark.parametrize("version", [0, 99, -1, "1", None, 1.5, []])
def test_another_protocol_version_is_refused_by_name(version):
    data = Poll(worker="w", incarnation="1", revision=3).model_copy(update={"v": version}).encode()
    with pytest.raises(MessageError, match="protocol version"):
        Poll.decode(data)


@BOUNDED
@given(near_msgpack(MESSAGES[0].encode()))
def test_unpack(data):
    with suppress(MessageError):
        assert isinstance(unpack(data), dict)


def test_batches():
    sample = Sample(
        source="s",
        group=1,
        episode="e",
        version=0,
        reward=0.5,
        temperature=1.0,
        tokens=pack_tokens([1, 2]),
        sampled=b"\0\1",
        logprobs=pack_floats([0.0, -0.5]),
        advantages=pack_floats([0.0, 1.0]),
    )
    batch = Batch("r", 1, [sample])
    assert decode_batch(batch.encode()) == batch

    @BOUNDED
    @given(near_msgpack(batch.encode()))
    def decode(data: bytes) -> None:
        try:
            found = decode_batch(data)
        except MessageError:
            return
        for sample in found.samples:
            count = len(sample.token_ids())
            assert count == len(sample.sampled) == len(sample.logprob_values()) == len(sample.advantage_values())

    decode()


def test_file_lists():
    valid = file_list_bytes([FileEntry("a", 1, DIGEST), FileEntry("b", 2, DIGEST)])
    assert [entry.name for entry in parse_file_list(valid)] == ["a", "b"]

    @BOUNDED
    @given(near_json(valid))
    def parse(data: bytes) -> None:
        try:
            files = parse_file_list(data)
        except ValueError:
            return
        for entry in files:
            assert "/" not in entry.name and not entry.name.startswith(".")
            entry.name.encode()

    parse()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".", "..", "", "a\0b", ".hidden", "\ud800", "a\nb"])
def test_a_file_list_names_files_of_its_directory_only(name):
    with pytest.raises(ValueError, match="not a plain file name"):
        parse_file_list(file_list_bytes([FileEntry(name, 1, DIGEST)]))


@BOUNDED
@given(st.text(max_size=80) | st.text(string.ascii_lowercase + "0123456789.-", max_size=80))
def test_subjects(subject):
    for parse in (parse_job, parse_reply):
        with suppress(ValueError):
            parse(subject)


@BOUNDED
@given(st.text(max_size=50))
def test_run_names(run):
    try:
        names = Names(run)
    except ConfigError:
        return
    assert not set(names.lane("w")) & set(" *\t\r\n") and names.run == run


@BOUNDED
@given(st.binary(max_size=64))
def test_arrays(data):
    for unpack_array in (unpack_tokens, unpack_floats):
        try:
            assert len(unpack_array(data)) * 4 == len(data)
        except ValueError:
            assert len(data) % 4


LINES = [
    BatchReady(step=1),
    Stop(),
    Ready(step=1, identity=IDENTITY),
    Progress(step=1, share=0.5),
    CheckpointWritten(step=1, metrics={"loss": 1.0}),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: type(line).__name__)
def test_pipe_lines(line):
    @BOUNDED
    @given(near_json(line.encode()))
    def decode(data: bytes) -> None:
        for side in (decode_to_trainer, decode_from_trainer):
            side(data)

    decode()
    assert line in (decode_to_trainer(line.encode()), decode_from_trainer(line.encode()))


def test_checkpoint_manifests(tmp_path):
    write_checkpoint(tmp_path, 0, None)
    path = checkpoint_path(tmp_path, 0) / "manifest.json"
    valid = path.read_bytes()

    @BOUNDED
    @given(near_json(valid))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        for look in (read_manifest, verify_adapter):
            try:
                look(tmp_path, 0)
            except RunDirectoryError as error:
                assert "checkpoint" in str(error)

    read()
    (tmp_path / "checkpoints" / "step_x").mkdir()
    (tmp_path / "checkpoints" / "step_000001").mkdir()
    assert complete_steps(tmp_path) == [0]


@pytest.mark.parametrize("kind", [ServerSettings, WorkerSettings, TrainerSettings])
def test_settings_files(tmp_path, kind):
    path = tmp_path / "settings.toml"
    valid = b"""run = "r"\nrun_root = "x"\nmodel = "~nobody-at-all/x"\nsteps = 3\n"""
    nasty = [
        b"a = " + b"[" * 50_000,
        b"\xff",
        b'run_root = "\\u0000"',
        b'model = "~nobody-at-all/x"',
        b"a.b.c = 1\na = 2",
    ]
    keys = st.sampled_from([*kind.model_fields, "unknown", "a.b"])
    values = st.sampled_from(
        ['"x"', "1", "-1", "nan", "inf", "[]", "{}", "[{}]", "true", '"~nobody-at-all"', "{a = 1}"]
    )
    tables = st.lists(st.tuples(keys, values), max_size=6)
    written = tables.map(lambda rows: "".join(f"{key} = {value}\n" for key, value in rows).encode())

    @BOUNDED
    @given(
        st.binary(max_size=100) | st.sampled_from(nasty) | written | written.map(lambda text: valid + text),
        st.lists(st.text(max_size=20), max_size=2),
    )
    def load(data: bytes, overrides: list[str]) -> None:
        path.write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            kind.load(path, overrides)
        assert str(caught.value)

    load()


def test_toml(tmp_path):
    path = tmp_path / "settings.toml"

    @BOUNDED
    @given(st.binary(max_size=100))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            assert isinstance(read_toml(path), dict)

    read()


@BOUNDED
@given(near_json(json.dumps(IDENTITY.model_dump()).encode()))
def test_identities(data):
    with suppress(ValueError):
        ModelIdentity.model_validate_json(data)
