"""`verify` on a small valid run, and on the same run broken in one way per invariant."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from aether_common.batch import batch_path
from aether_common.checkpoint import checkpoint_path
from aether_coordinator.cli import app
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import (
    BatchRecord,
    DispatchRecord,
    EpisodeRecord,
    GroupRecord,
    RunRecord,
    TurnRecord,
    number_key,
)
from aether_coordinator.retention import forget_traces, remove_step_files
from aether_coordinator.verify import verify
from run_directory import GROUPS, SIZE, STEPS, make_run
from typer.testing import CliRunner

Break = Callable[[Ledger, Path], None]


def change(ledger: Ledger, database: str, kind: type, key: bytes, **changes: object) -> None:
    recorded = ledger.get(database, key)
    assert recorded is not None
    ledger.commit_now(Write(database, key, kind.decode(recorded).with_(**changes).encode()))


def first_key(ledger: Ledger, database: str) -> bytes:
    return next(key for key, _ in ledger.scan(database))


def same_trace_twice(ledger: Ledger, root: Path) -> None:
    trace = EpisodeRecord.decode(ledger.get("episodes", b"g00000001-e000") or b"").trace
    change(ledger, "episodes", EpisodeRecord, b"g00000001-e001", trace=trace)


def stray_episode(ledger: Ledger, root: Path) -> None:
    stray = EpisodeRecord(group=1, index=SIZE)
    ledger.commit_now(Write("episodes", stray.key, stray.encode()))


def episode_still_running(ledger: Ledger, root: Path) -> None:
    change(ledger, "episodes", EpisodeRecord, b"g00000001-e000", state="running")


def group_in_two_batches(ledger: Ledger, root: Path) -> None:
    change(ledger, "batches", BatchRecord, number_key(2), groups=[1, 4])


def group_says_another_batch(ledger: Ledger, root: Path) -> None:
    change(ledger, "groups", GroupRecord, number_key(1), step=3)


def group_record_gone(ledger: Ledger, root: Path) -> None:
    ledger.commit_now(Write("groups", number_key(1), None))


def answered_and_still_out(ledger: Ledger, root: Path) -> None:
    key = first_key(ledger, "journal")
    record = DispatchRecord(
        job="j",
        worker="w",
        dispatch=0,
        journal=key,
        kind="train",
        version=0,
        adapter="a",
        max_tokens=8,
        group=1,
        seed=0,
    )
    ledger.commit_now(Write("dispatches", b"j", record.encode()))


def one_job_for_two_turns(ledger: Ledger, root: Path) -> None:
    (_, first), (key, _) = list(ledger.scan("journal"))[:2]
    change(ledger, "journal", TurnRecord, key, job=TurnRecord.decode(first).job)


def batch_record_gone(ledger: Ledger, root: Path) -> None:
    ledger.commit_now(Write("batches", number_key(2), None))


def policy_record_gone(ledger: Ledger, root: Path) -> None:
    ledger.commit_now(Write("policies", number_key(2), None))


def checkpoint_gone(ledger: Ledger, root: Path) -> None:
    checkpoint_path(root, 2).rename(root / "elsewhere")


def batch_file_changed(ledger: Ledger, root: Path) -> None:
    path = batch_path(root, 3)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def batch_file_gone(ledger: Ledger, root: Path) -> None:
    batch_path(root, 3).unlink()


def batch_of_strangers(ledger: Ledger, root: Path) -> None:
    path = batch_path(root, 3)
    path.write_bytes(path.read_bytes().replace(b"g00000005-e000", b"g00000099-e000"))


def trace_changed(ledger: Ledger, root: Path) -> None:
    digest = EpisodeRecord.decode(ledger.get("episodes", b"g00000001-e000") or b"").trace
    ledger.commit_now(Write("traces", digest.encode(), b"\xc1"))


def trace_gone(ledger: Ledger, root: Path) -> None:
    digest = EpisodeRecord.decode(ledger.get("episodes", b"g00000001-e000") or b"").trace
    ledger.commit_now(Write("traces", digest.encode(), None))


def reward_changed(ledger: Ledger, root: Path) -> None:
    change(ledger, "episodes", EpisodeRecord, b"g00000001-e001", reward=7.0)


def edit_manifest(root: Path, step: int, **changes: object) -> None:
    path = checkpoint_path(root, step) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def checkpoint_of_another_batch(ledger: Ledger, root: Path) -> None:
    edit_manifest(root, STEPS, batch="0" * 64)


def checkpoint_of_another_parent(ledger: Ledger, root: Path) -> None:
    edit_manifest(root, STEPS, parent="0" * 64)


def manifest_damaged(ledger: Ledger, root: Path) -> None:
    (checkpoint_path(root, STEPS) / "manifest.json").write_bytes(b"[" * 100_000)


def adapter_changed(ledger: Ledger, root: Path) -> None:
    (checkpoint_path(root, 2) / "adapter" / "adapter_config.json").write_text("{}")


def adapter_gone(ledger: Ledger, root: Path) -> None:
    (checkpoint_path(root, 2) / "adapter" / "adapter_config.json").unlink()


def too_old_for_its_batch(ledger: Ledger, root: Path) -> None:
    change(ledger, "groups", GroupRecord, number_key(GROUPS * STEPS), version=0)


def answer_gone(ledger: Ledger, root: Path) -> None:
    ledger.commit_now(Write("journal", first_key(ledger, "journal"), None))


def answer_of_another_adapter(ledger: Ledger, root: Path) -> None:
    change(ledger, "journal", TurnRecord, first_key(ledger, "journal"), adapter="b" * 64)


def answer_of_nobody(ledger: Ledger, root: Path) -> None:
    change(ledger, "journal", TurnRecord, first_key(ledger, "journal"), worker="")


BREAKS: list[tuple[Break, str, str]] = [
    (same_trace_twice, "episodes accepted once", "same trace"),
    (stray_episode, "episodes accepted once", "belongs to no group"),
    (episode_still_running, "groups complete", "still runs"),
    (group_in_two_batches, "groups in one batch", "group 1 is in 2 batches"),
    (group_says_another_batch, "groups in one batch", "batch 1 holds group 1"),
    (group_record_gone, "groups in one batch", "whose record says None"),
    (group_record_gone, "lag bounded", "group 1"),
    (answered_and_still_out, "jobs answered once", "answered and still out"),
    (one_job_for_two_turns, "jobs answered once", "answers 2 turns"),
    (batch_record_gone, "steps gapless", "batch 2 is missing"),
    (policy_record_gone, "steps gapless", "policy 2 is missing"),
    (checkpoint_gone, "steps gapless", "checkpoint 2 is missing"),
    (batch_file_changed, "batches unchanged", "batch 3 differs"),
    (batch_file_gone, "batches unchanged", "batch 3 cannot be read"),
    (batch_of_strangers, "samples traced", "g00000099-e000"),
    (trace_changed, "batches rebuilt", "batch 1 cannot be built again"),
    (trace_gone, "batches rebuilt", "batch 1 cannot be built again"),
    (reward_changed, "batches rebuilt", "batch 1 built again has another digest"),
    (checkpoint_of_another_batch, "checkpoints chained", "names batch 000"),
    (checkpoint_of_another_parent, "checkpoints chained", "another parent"),
    (manifest_damaged, "checkpoints chained", "manifest.json"),
    (adapter_changed, "policies published", "step_000002"),
    (adapter_gone, "policies published", "checkpoint 2"),
    (checkpoint_gone, "policies published", "policy 2 has no checkpoint"),
    (too_old_for_its_batch, "lag bounded", "lag 3 in batch 4 (max 0)"),
    (answer_gone, "samples traced", "come from no reply"),
    (answer_of_another_adapter, "samples traced", "another adapter"),
    (answer_of_nobody, "samples traced", "another adapter"),
]


def test_a_valid_run(tmp_path):
    make_run(tmp_path)
    findings = verify(tmp_path)
    assert [(finding.invariant, finding.first) for finding in findings if finding.violations] == []
    assert all(finding.checked for finding in findings), "every invariant looked at something"
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 0 and result.output.count(" ok\n") == len(findings)


@pytest.mark.parametrize(("break_", "invariant", "says"), BREAKS, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_broken_is_named(tmp_path, break_, invariant, says):
    make_run(tmp_path)
    ledger = Ledger(tmp_path / "state")
    break_(ledger, tmp_path)
    ledger.close()
    found = {finding.invariant: finding for finding in verify(tmp_path)}[invariant]
    assert found.violations and says in found.first
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    assert f"{invariant:<24}" in result.output and "VIOLATIONS, first: " in result.output


def test_everything_is_traced_after_retention(tmp_path):
    make_run(tmp_path)
    ledger = Ledger(tmp_path / "state")
    old = BatchRecord.decode(ledger.get("batches", number_key(1)) or b"")
    groups = [GroupRecord.decode(ledger.get("groups", number_key(number)) or b"") for number in old.groups]
    episodes = [
        (group, [EpisodeRecord.decode(v) for _, v in ledger.scan("episodes", f"g{group.id:08d}-".encode())])
        for group in groups
    ]
    writes = forget_traces(ledger, episodes)
    run = RunRecord.decode(ledger.get("run", b"run") or b"").with_(retained_from=2)
    ledger.commit_now(*writes, Write("run", b"run", run.encode()))
    remove_step_files(tmp_path, old)
    assert len(list(ledger.scan("journal"))) == (STEPS - 1) * GROUPS * SIZE * 2
    assert len(list(ledger.scan("traces"))) == (STEPS - 1) * GROUPS * SIZE
    ledger.close()
    assert not batch_path(tmp_path, 1).exists() and not checkpoint_path(tmp_path, 1).exists()
    assert checkpoint_path(tmp_path, 0).is_dir(), "policy 0 is the beginning of the chain"
    assert [finding for finding in verify(tmp_path) if finding.violations] == []
