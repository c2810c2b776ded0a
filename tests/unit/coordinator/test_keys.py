"""The `worker` commands' work on files: what they write, what they refuse, and what they tell the operator."""

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aether_common.errors import ConfigError
from aether_common.names import Names
from aether_coordinator import keys as keys_module
from aether_coordinator.accounts import make_key, public_key
from aether_coordinator.events import read_events
from aether_coordinator.host import write_host
from aether_coordinator.keys import Keys, refuse_other_user
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import WorkerRecord
from aether_coordinator.roster import Entry, roster, table
from aether_coordinator.settings import ServerSettings
from aether_coordinator.standing import ban, read_standing
from aether_coordinator.workers_conf import WorkerKey, read_workers, write_workers
from server_settings import SERVER

HOUR = timedelta(hours=1)


def keys_of(tmp_path: Path, *overrides: str) -> Keys:
    file = tmp_path / "server.toml"
    file.write_text(SERVER)
    return Keys(ServerSettings.load(file, list(overrides)))


def seed(tmp_path: Path, name: str) -> str:
    path = tmp_path / "run" / "workers" / f"{name}.nk"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    return public_key(path.read_text().strip())


def events(tmp_path: Path) -> list[tuple[str, str]]:
    return [(entry["event"], entry["worker"]) for entry in read_events(tmp_path / "run")[0]]


def test_add_rotate_expire_revoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(tmp_path)
    added = keys.add("w1")
    assert added.lines[:2] == ('name = "w1"', 'run = "test"') and len(added.lines) == 4
    assert added.lines[3] == f'key_file = "{tmp_path / "run" / "workers" / "w1.nk"}"'
    assert added.notes == ("no nats-server of this run is running here: it reads the keys at its next start",)
    keys.add("w2")
    first = WorkerKey("w1", seed(tmp_path, "w1"))
    other = WorkerKey("w2", seed(tmp_path, "w2"))
    assert keys.all() == [first, other]
    with pytest.raises(ConfigError, match=r"worker 'w1' has a key already .*`aether-coordinator worker rotate`"):
        keys.add("w1")

    # Twice within the overlap: no key is good for longer than it was.
    before = datetime.now(UTC)
    keys.rotate("w1", HOUR)
    second = WorkerKey("w1", seed(tmp_path, "w1"))
    old, _, new = keys.all()
    assert (old.public, new) == (first.public, second) and old.until is not None
    assert timedelta(minutes=59) < old.until - before <= HOUR
    keys.rotate("w1", 2 * HOUR)
    until = {key.public: key.until for key in keys.all()}
    assert until[first.public] == old.until and until[second.public] is not None
    assert until[second.public] > old.until  # type: ignore[operator]
    assert roster(keys).entries[0].key.startswith("valid, valid until ")

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return before + HOUR + timedelta(seconds=1)

    monkeypatch.setattr(keys_module, "datetime", Later)
    assert [key.public for key in keys.remove_expired()] == [first.public]
    assert keys.remove_expired() == []
    assert {key.public for key in keys.all()} == {second.public, seed(tmp_path, "w1"), other.public}

    keys.rotate("w1", timedelta())
    assert keys.all() == [other, WorkerKey("w1", seed(tmp_path, "w1"))]

    keys.revoke("w1")
    assert keys.all() == [other]
    assert not (tmp_path / "run" / "workers" / "w1.nk").exists()
    assert "by the operator" in read_standing(tmp_path / "run").revoked["w1"]
    with pytest.raises(ConfigError, match="worker 'w1' has no key: workers with one are: w2"):
        keys.revoke("w1")
    with pytest.raises(ConfigError, match="worker 'w1' has no key"):
        keys.rotate("w1", HOUR)
    keys.add("w1")
    assert read_standing(tmp_path / "run").revoked == {}
    expected = ["added", "added", "rotated", "rotated", "key_expired", "rotated", "revoked", "added"]
    assert [event for event, _ in events(tmp_path)] == expected


@pytest.mark.parametrize("name", ["", "W1", "a.b", "*", "../x", "a" * 65])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    keys = keys_of(tmp_path)
    for change in (keys.add, keys.revoke, keys.release, lambda name: keys.rotate(name, HOUR)):
        with pytest.raises(ConfigError, match="use 1 to 64 lower-case letters, digits and hyphens"):
            change(name)
    assert keys.all() == []


def test_release(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    with pytest.raises(ConfigError, match=r"worker 'w1' is not quarantined \(quarantined are: none\)"):
        keys.release("w1")
    ban(tmp_path / "run", "w1", "quarantined", "8 failures")
    assert roster(keys).entries[0].state == "quarantined" and "8 failures" in roster(keys).entries[0].reason
    with pytest.raises(ConfigError, match=r"quarantined are: w1"):
        keys.release("w2")
    keys.release("w1")
    assert events(tmp_path) == [("released", "w1")] and roster(keys).entries == []


def test_a_server_of_its_own_on_this_host(tmp_path: Path) -> None:
    host = write_host(tmp_path / "nats", "test", hosts=["train.example"], self_signed=True)
    keys = keys_of(tmp_path, f"nats.directory={host.directory}")
    added = keys.add("w1")
    assert added.lines[2:] == (
        'url = "wss://train.example:8443"',
        f'key_file = "{tmp_path / "run" / "workers" / "w1.nk"}"',
        f'tls.ca_file = "{host.directory / "ca.pem"}"',
    )
    assert read_workers(host.workers) == [WorkerKey("w1", seed(tmp_path, "w1"))]


def test_a_server_elsewhere_is_told_to_the_operator(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "nats.url=tls://n.example:4222", "nats.key_file=c.nk")
    added = keys.add("w1")
    assert 'url = "wss://HOST"' in added.lines
    told = "\n".join(added.notes)
    assert "'tls://n.example:4222' is configured elsewhere" in told and "nats-server --signal reload" in told
    assert f"nkey: {seed(tmp_path, 'w1')}" in told and "aether.test.replies.w1.*" in told and "public_url" in told
    with pytest.raises(ConfigError, match="has a key already"):
        keys.add("w1")
    rotated = "\n".join(keys.rotate("w1", HOUR).notes)
    assert f"nkey: {seed(tmp_path, 'w1')}" in rotated and "after 60 minutes remove the old one" in rotated
    assert roster(keys).entries == []
    revoked = keys.revoke("w1")
    assert "remove every user marked `# worker w1`" in revoked.notes[0]
    assert [(entry.state, entry.key) for entry in roster(keys).entries] == [("revoked", "revoked")]
    with pytest.raises(ConfigError, match="has no key"):
        keys.rotate("w1", HOUR)
    public = keys_of(tmp_path, "nats.url=tls://n:1", "nats.key_file=c.nk", "nats.public_url=wss://p.example/run")
    assert 'url = "wss://p.example/run"' in public.add("w2").lines


def test_another_user_than_that_of_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_other_user(tmp_path)  # Nothing runs there yet.
    (tmp_path / "coordinator.lock").touch()
    refuse_other_user(tmp_path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to another user .uid {owner}.*sudo -u '#{owner}'"):
        refuse_other_user(tmp_path)


def test_a_thousand_users(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    assert keys.host is not None
    many = [WorkerKey(f"w{number}", make_key().public) for number in range(1000)]
    write_workers(keys.host.workers, Names("test"), many)
    for change in (keys.add, lambda name: keys.rotate(name, HOUR), keys.revoke):
        began = time.process_time()
        change("new")
        spent = time.process_time() - began
        print(f"{spent:.3f} s of processor time")
        assert spent < 0.5
    assert keys.all() == many
    began = time.process_time()
    assert len(roster(keys).entries) == 1001
    assert time.process_time() - began < 0.5


def test_what_is_recorded_is_listed_without_a_coordinator(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    for name in ("w1", "w2", "w3"):
        keys.add(name)
    keys.revoke("w3")
    record = WorkerRecord(
        name="w2",
        incarnation="1",
        engine="vllm",
        slots=64,
        window=72,
        versions={"vllm": "0.33"},
        seen_s=time.time() - 7200,
    )
    ledger = Ledger(tmp_path / "run" / "state")
    ledger.commit_now(Write("workers", b"w2", record.encode()))
    ledger.close()
    found = roster(keys)
    assert found.note == "the run is not running: what is recorded is shown"
    first, second, third = found.entries
    assert first == Entry("w1", "never seen", "valid")
    assert (second.state, second.slots, second.versions) == ("unknown", 64, {"vllm": "0.33"})
    assert (third.state, third.key) == ("revoked", "revoked")
    lines = table(found.entries).splitlines()
    assert lines[0].split() == ["name", "state", "last", "seen", "slots", "running", "key", "versions", "reason"]
    assert lines[2].split() == ["w2", "unknown", "2", "h", "ago", "64", "0", "valid", "vllm", "0.33"]
    # Of another schema: said, and the keys are listed nevertheless.
    ledger = Ledger(tmp_path / "run" / "state")
    ledger.commit_now(Write("workers", b"w2", b"\xc1"))
    ledger.close()
    found = roster(keys)
    assert "cannot be read" in found.note and found.entries[1] == Entry("w2", "never seen", "valid")
    json.dumps([entry.versions for entry in found.entries])
