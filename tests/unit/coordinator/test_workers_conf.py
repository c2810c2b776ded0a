"""The file of the workers' keys: what is written is read back, and nothing is lost when it is changed."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from aether_common.errors import ConfigError
from aether_common.names import Names
from aether_coordinator.accounts import make_key
from aether_coordinator.workers_conf import (
    WorkerKey,
    expired,
    locked,
    read_workers,
    worker_user,
    write_workers,
)
from nats_server import add_worker

NAMES = Names("r")
END = datetime(2030, 1, 31, 12, 0, 5, tzinfo=UTC)


def test_keys_with_and_without_an_end_are_read_back(tmp_path):
    path = tmp_path / "workers.conf"
    keys = [
        WorkerKey("w1", make_key().public, END),
        WorkerKey("w1", make_key().public),
        WorkerKey("until", make_key().public),
    ]
    write_workers(path, NAMES, keys)
    assert read_workers(path) == keys
    assert "# worker w1 until 2030-01-31T12:00:05Z\n" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    add_worker(path, NAMES, "w2", public := make_key().public)
    assert read_workers(path) == [*keys, WorkerKey("w2", public)]
    assert expired(keys, END) == keys[:1]
    assert expired(keys, END - timedelta(seconds=1)) == []


def test_a_user_has_exactly_its_permissions():
    text = worker_user(NAMES, WorkerKey("w1", "U" + "A" * 55))
    quoted = text.split('"')[1::2]
    assert quoted == [
        "WEBSOCKET",
        "aether.r.next.w-w1",
        "$JS.ACK.AETHER_r_JOBS.w-w1.>",
        "aether.r.replies.w1.*",
        "aether.r.art.get",
        "aether.r.art.meta.*",
        "aether.r.fleet.hb.w1",
        "aether.r.fleet.reg.w1",
        "aether.r.fleet.poll.w1",
        "_INBOX_w1.>",
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("# worker w2\n", "\n"), "line 5: each user needs the comment"),
        (lambda text: text.replace("# worker w1\n", "# mine\n"), "line 2: each user needs the comment"),
        (lambda text: text.replace("nkey: U", "nkey: X", 1), "each user needs the comment"),
        (
            lambda text: text.replace("# worker w1\n", "# worker w1 until tomorrow\n"),
            "w1 until 'tomorrow': write it as",
        ),
        (lambda text: "", None),
    ],
)
def test_what_would_be_lost_by_writing_is_refused(tmp_path, change, says):
    path = tmp_path / "workers.conf"
    write_workers(path, NAMES, [WorkerKey(name, make_key().public) for name in ("w1", "w2", "w3")])
    path.write_text(change(path.read_text()))
    if says is None:
        assert read_workers(path) == []
        return
    with pytest.raises(ConfigError, match=says):
        read_workers(path)


def test_a_thousand_users_are_read_and_written_in_a_tenth_of_a_second(tmp_path):
    path = tmp_path / "workers.conf"
    keys = [WorkerKey(f"w{number}", f"U{number:055d}".translate(str.maketrans("01", "AB"))) for number in range(1000)]
    keys = [key._replace(public=key.public.translate(str.maketrans("89", "CD"))) for key in keys]
    write_workers(path, NAMES, keys)
    began = time.process_time()
    add_worker(path, NAMES, "new", make_key().public)
    assert time.process_time() - began < 0.1
    assert len(read_workers(path)) == 1001


def test_one_process_changes_it_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("aether_coordinator.workers_conf.LOCK_S", 0.1)
    path = tmp_path / "workers.conf"
    with locked(path), pytest.raises(ConfigError, match="is being changed by another process"), locked(path):
        pass
    with locked(path):
        pass
