"""What the preflight says of the state directory, and what a full disk does to notes in it."""

import errno
import os
from collections import namedtuple
from pathlib import Path

import nkeys
import pytest
from aether_common.errors import ConfigError, DiskError
from aether_worker import preflight, reach
from aether_worker.settings import WorkerSettings

MIB = 1 << 20
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    key = tmp_path / "key"
    key.write_bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    key.chmod(0o600)
    return WorkerSettings(
        name="w1",
        run="test",
        url="ws://127.0.0.1:1",
        key_file=key,
        model=str(tmp_path),
        engine="null",
        adapter_cache_mib=10,
        state_dir=tmp_path / "state",
    )


async def test_what_the_cache_holds_already_is_not_needed_again(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = preflight.MIN_FREE_MIB + 7
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: Usage(0, 0, free * MIB))
    with pytest.raises(ConfigError, match=rf"has {free} MiB free and holds 0 MiB, less than adapter_cache_mib = 10"):
        await preflight._state_dir(settings)
    # It is no reason not to run.
    await preflight.before_run(settings)
    (settings.state_dir / "adapters").mkdir()
    (settings.state_dir / "adapters" / "one").write_bytes(b"0" * 3 * MIB)
    assert f"{free} MiB free" in await preflight._state_dir(settings)


def test_a_full_disk_does_not_keep_a_worker_from_its_run(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskError("the disk is full") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(reach, "write_durably", full)
    reach.remember_accepted(settings)
