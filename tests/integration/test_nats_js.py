"""An independent client, the JavaScript packages of NATS, sees sense in what a run left in JetStream."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from aether_common.checkpoint import read_manifest
from aether_coordinator.embedded import answers, server_binary
from requirements import NODE_PROJECT

from .conftest import STEPS, FinishedRun


@pytest.fixture
def nats_url(finished_run: FinishedRun) -> Iterator[str]:
    """The nats-server of the finished run, started again on its directory."""
    directory = finished_run.run.run_root / "nats"
    ports = json.loads((directory / "ports.json").read_text())
    process = subprocess.Popen(
        [server_binary(), "-c", directory / "nats-server.conf"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 20
        while not answers(ports["port"]):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield f"nats://127.0.0.1:{ports['port']}"
    finally:
        process.terminate()
        process.wait(20)


def test_streams_bucket_and_objects_make_sense(
    require: Callable[..., None], finished_run: FinishedRun, request: pytest.FixtureRequest
) -> None:
    require("node")
    url = request.getfixturevalue("nats_url")
    root, uuid = finished_run.run.run_root, finished_run.status["run_uuid"]
    done = subprocess.run(
        ["node", NODE_PROJECT / "read_run.js", url, root / "nats" / "coordinator.nk", "tiny"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)

    streams = {stream["name"]: stream for stream in seen["streams"]}
    assert set(streams) == {
        "AETHER_tiny_JOBS",
        "AETHER_tiny_REPLIES",
        "KV_aether-tiny-policies",
        "OBJ_aether-tiny-artifacts",
    }
    for stream in streams.values():
        assert "run tiny" in stream["description"], stream
        assert stream["metadata"]["aether-run-uuid"] == uuid
        assert stream["storage"] == "file"
    for name in ("AETHER_tiny_JOBS", "AETHER_tiny_REPLIES"):
        assert (streams[name]["retention"], streams[name]["discard"]) == ("workqueue", "new")
        assert streams[name]["messages"] == 0, "everything was answered and acknowledged"

    manifest, _ = read_manifest(root, STEPS)
    policy = seen["policy"]
    assert seen["versions"][-1] == policy["version"] == STEPS
    assert (policy["run"], policy["run_uuid"], policy["adapter"]) == ("tiny", uuid, manifest.adapter)
    assert policy["files"] == [[entry.name, entry.size, entry.sha256] for entry in manifest.files]

    adapter = root / "checkpoints" / f"step_{STEPS:06d}" / "adapter"
    assert [found["name"] for found in seen["objects"]] == [manifest.adapter, *(f.sha256 for f in manifest.files)]
    for found in seen["objects"]:
        assert found["name_matches"] and found["digest_matches"], found
    sizes = [found["size"] for found in seen["objects"][1:]]
    assert sizes == [(adapter / entry.name).stat().st_size for entry in manifest.files]


def test_the_lock_file_names_no_registry() -> None:
    lock = json.loads((NODE_PROJECT / "package-lock.json").read_text())
    assert all("resolved" not in package for package in lock["packages"].values())
    assert all(package.get("integrity") for name, package in lock["packages"].items() if name)


def test_a_required_part_that_is_missing_fails(require: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AETHER_REQUIRE", "docker, node")
    with pytest.raises(pytest.fail.Exception, match="node is required by AETHER_REQUIRE: not here"):
        require("node", "not here")
    require("node", "")
    with pytest.raises(pytest.skip.Exception, match="vllm: no GPU"):
        require("vllm", "no GPU")
