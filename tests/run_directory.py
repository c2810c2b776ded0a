"""A small finished run directory without processes: real records, traces, batches and checkpoint manifests."""

import json
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aether_common.arrays import pack_floats, pack_tokens
from aether_common.batch import batch_path
from aether_common.checkpoint import ADAPTER_FILES, CheckpointManifest, checkpoint_path, read_manifest
from aether_common.digests import file_list_digest, list_files, sha256_bytes
from aether_common.identity import ModelIdentity
from aether_coordinator.batches import build_batch
from aether_coordinator.journal import TurnKey
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.opening import open_run
from aether_coordinator.records import (
    BatchRecord,
    EpisodeRecord,
    GroupRecord,
    PolicyRecord,
    TurnRecord,
    number_key,
)
from aether_coordinator.samples import encode_episode
from aether_coordinator.settings import ServerSettings
from verifiers.v1.episode import EnvInfo
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask

STEPS, GROUPS, SIZE = 4, 2, 2
IDENTITY = ModelIdentity(
    repository="m",
    revision="sha256:" + "0" * 64,
    weights="w",
    config="c",
    tokenizer="t",
    chat_template="x",
    vocab_size=259,
    dtype="float32",
    renderer="default",
)


def server_settings(root: Path, **changes: Any) -> ServerSettings:
    values: dict[str, Any] = {
        "run": "small",
        "run_root": root,
        "steps": STEPS,
        "model": "m",
        "base_model": IDENTITY,
        "max_model_len": 256,
        "train": [{"name": "train", "taskset": "aether_lowercase", "sampling": {"max_tokens": 8}}],
        "trainer": {"config": root / "trainer.toml"},
        "batch": {"groups": GROUPS, "group_size": SIZE, "max_policy_lag": 0},
    }
    return ServerSettings.model_validate({**values, **changes})


def node(parent: int | None, tokens: list[int], sampled: int) -> MessageNode:
    message = vf.AssistantMessage(content="x") if sampled else vf.UserMessage(content="x")
    mask = [False] * (len(tokens) - sampled) + [True] * sampled
    return MessageNode(
        parent=parent, message=message, sampled=sampled > 0, token_ids=tokens, mask=mask, logprobs=[-0.5] * sampled
    )


def episode_of(nodes: list[MessageNode], **trace: Any) -> vf.Episode:
    """A verifiers episode of one agent."""
    task = TraceTask(type="Task", data=vf.TaskData(prompt="x"), key="k", hash="h")
    agent = AgentInfo(config=vf.AgentConfig())
    return vf.Episode(env=EnvInfo(id="e"), task=task, traces=[vf.Trace(task=task, agent=agent, nodes=nodes, **trace)])


def write_checkpoint(root: Path, step: int, batch: str | None) -> str:
    """A complete checkpoint with files of no model; the adapter's digest."""
    directory = checkpoint_path(root, step)
    (directory / "adapter").mkdir(parents=True)
    for name in ADAPTER_FILES:
        (directory / "adapter" / name).write_bytes(f"{name} of step {step}".encode())
    files = list_files(directory / "adapter", ADAPTER_FILES)
    manifest = CheckpointManifest(
        run="small",
        step=step,
        batch=batch,
        parent=read_manifest(root, step - 1)[1] if step else None,
        adapter=file_list_digest(files),
        files=files,
        rank=8,
        alpha=16,
        target_modules=["q_proj"],
        dtype="float32",
    )
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return manifest.adapter


def make_run(root: Path, **changes: Any) -> ServerSettings:
    """Four synchronous steps of two groups of two episodes with two turns each."""
    settings = server_settings(root, **changes)
    ledger = Ledger(root / "state")
    run = open_run(ledger, settings)
    adapter = _policy(ledger, root, 0, None)
    number = 0
    for step in range(1, STEPS + 1):
        groups: list[GroupRecord] = []
        episodes: dict[int, list[EpisodeRecord]] = {}
        for _ in range(GROUPS):
            number += 1
            group = GroupRecord(id=number, kind="train", source="train", task=0, version=step - 1, size=SIZE)
            groups.append(group.scored())
            episodes[number] = [_episode(ledger, group, index, adapter) for index in range(SIZE)]
        data, tokens = build_batch(
            "small", step, groups, episodes, {"train": 1.0}, lambda digest: ledger.get("traces", digest.encode()) or b""
        )
        path = batch_path(root, step)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        record = BatchRecord(
            step=step,
            digest=sha256_bytes(data),
            groups=[group.id for group in groups],
            reward=0.5,
            tokens=tokens,
            lag=0.0,
        )
        batched = [group.batched(step) for group in groups]
        ledger.commit_now(
            Write("batches", number_key(step), record.encode()),
            *(Write("groups", group.key, group.encode()) for group in batched),
        )
        adapter = _policy(ledger, root, step, record.digest)
    ledger.commit_now(Write("run", b"run", run.with_(next_group=number + 1).encode()))
    ledger.close()
    return settings


def _policy(ledger: Ledger, root: Path, version: int, batch: str | None) -> str:
    adapter = write_checkpoint(root, version, batch)
    manifest = json.loads((checkpoint_path(root, version) / "manifest.json").read_text())
    record = PolicyRecord(
        version=version,
        adapter=adapter,
        files=manifest["files"],
        rank=8,
        alpha=16,
        target_modules=["q_proj"],
        dtype="float32",
        activated_s=0.0,
    )
    ledger.commit_now(Write("policies", number_key(version), record.encode()))
    return adapter


def _episode(ledger: Ledger, group: GroupRecord, index: int, adapter: str) -> EpisodeRecord:
    """An accepted episode, its trace and its two journaled answers."""
    answers = [[10 + group.id, 20 + index, 2], [30 + group.id, 2]]
    nodes = [node(None, [5, 6], 0), node(0, answers[0], 3), node(1, [7], 0), node(2, answers[1], 2)]
    trace = encode_episode(episode_of(nodes))
    record = EpisodeRecord(group=group.id, index=index).accepted(float(index), 5, False, sha256_bytes(trace))
    writes = [Write("episodes", record.key, record.encode()), Write("traces", record.trace.encode(), trace)]
    for turn, tokens in enumerate(answers):
        key = TurnKey(record.id, 0, f"{turn:064x}", 0)
        answer = TurnRecord(
            job=key.job("small", 0),
            worker="w1",
            dispatch=0,
            reply="e" * 64,
            version=group.version,
            adapter=adapter,
            tokens=pack_tokens(tokens),
            logprobs=pack_floats([-0.5] * len(tokens)),
            finish_reason="stop",
        )
        writes.append(Write("journal", key.journal, answer.encode()))
    ledger.commit_now(*writes)
    return record
