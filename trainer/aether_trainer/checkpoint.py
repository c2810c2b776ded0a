"""Checkpoints: written in one rename after every step; loading one goes on exactly where it was left.

Beside what every reader knows (`aether_common.checkpoint`) a checkpoint holds `state.safetensors` (the float32
weights and AdamW's two moments) and `state.json` (updates, digest of that file, identity of the base model,
metrics of the step).
"""

import json
from pathlib import Path
from typing import Any

import torch
from aether_common.checkpoint import (
    ADAPTER_FILES,
    CheckpointManifest,
    checkpoint_path,
    read_manifest,
)
from aether_common.crash import crash_point
from aether_common.digests import file_list_digest, list_files, sha256_bytes
from aether_common.errors import ConfigError, IdentityError, RunDirectoryError
from aether_common.files import write_directory_durably
from aether_common.identity import ModelIdentity, differences
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load, save
from torch.optim import AdamW

from aether_trainer.policy import Policy, set_weights, write_adapter
from aether_trainer.settings import TrainerSettings

STATE, TENSORS = "state.json", "state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainerState(BaseModel):
    """`state.json`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    updates: int
    """Optimizer updates so far: steps without the skipped ones."""
    tensors: str
    """SHA-256 of `state.safetensors`."""
    identity: ModelIdentity
    """The base model."""
    metrics: dict[str, float]
    """Metrics of the step, empty at step 0."""


def new_optimizer(policy: Policy, settings: TrainerSettings) -> AdamW:
    """AdamW over the weights in the order of their names, moments at 0 instead of absent."""
    parameters = list(policy.weights.values())
    optimizer = AdamW(
        parameters,
        lr=settings.optimizer.learning_rate,
        betas=settings.optimizer.betas,
        weight_decay=settings.optimizer.weight_decay,
    )
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0)} | moments
    return optimizer


def write_checkpoint(
    run_root: Path,
    run: str,
    step: int,
    policy: Policy,
    optimizer: AdamW,
    settings: TrainerSettings,
    identity: ModelIdentity,
    *,
    updates: int,
    batch: str | None = None,
    metrics: dict[str, float] | None = None,
    skipped: bool = False,
) -> CheckpointManifest:
    """Write checkpoint `step` after its parent. Raises `RunDirectoryError` when the disk refuses it."""
    parent = read_manifest(run_root, step - 1)[1] if step else None
    manifests: list[CheckpointManifest] = []

    def fill(directory: Path) -> None:
        write_adapter(policy, directory / "adapter", settings.lora.serving_dtype)
        tensors = {f"weight.{name}": weight.detach() for name, weight in policy.weights.items()}
        for name, weight in policy.weights.items():
            tensors |= {f"{moment}.{name}": optimizer.state[weight][moment] for moment in _MOMENTS}
        data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
        (directory / TENSORS).write_bytes(data)
        state = TrainerState(updates=updates, tensors=sha256_bytes(data), identity=identity, metrics=metrics or {})
        (directory / STATE).write_text(state.model_dump_json(indent=2))
        files = list_files(directory / "adapter", ADAPTER_FILES)
        manifest = CheckpointManifest(
            run=run,
            step=step,
            batch=batch,
            parent=parent,
            adapter=file_list_digest(files),
            files=files,
            rank=settings.lora.rank,
            alpha=settings.lora.alpha,
            target_modules=policy.target_modules,
            dtype=settings.lora.serving_dtype,
            skipped=skipped,
        )
        (directory / "manifest.json").write_text(manifest.model_dump_json(indent=2))
        manifests.append(manifest)
        crash_point("checkpoint.before_fsync")

    write_directory_durably(checkpoint_path(run_root, step), fill)
    crash_point("checkpoint.after_rename")
    return manifests[0]


def load_checkpoint(
    run_root: Path,
    run: str,
    step: int,
    policy: Policy,
    optimizer: AdamW,
    settings: TrainerSettings,
    identity: ModelIdentity,
) -> TrainerState:
    """Continue from checkpoint `step`.

    Raises `RunDirectoryError` when it is of another run or damaged, `ConfigError` when the adapter's settings
    changed since, `IdentityError` when the base model did.
    """
    directory = checkpoint_path(run_root, step)
    manifest, _ = read_manifest(run_root, step)
    if manifest.run != run:
        raise RunDirectoryError(f"{directory} belongs to run {manifest.run!r}, not {run!r}: choose another run_root")
    ours = {
        "rank": settings.lora.rank,
        "alpha": settings.lora.alpha,
        "target_modules": policy.target_modules,
        "dtype": settings.lora.serving_dtype,
    }
    for key, value in ours.items():
        if getattr(manifest, key) != value:
            setting = "serving_dtype" if key == "dtype" else key
            raise ConfigError(
                f"lora.{setting} = {value!r}: the run began with {getattr(manifest, key)!r} ({directory}): "
                "set it back, or start a new run (with lora.initial_adapter)"
            )
    try:
        state = TrainerState.model_validate(json.loads((directory / STATE).read_bytes()))
        data = (directory / TENSORS).read_bytes()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{directory} is damaged ({error}): remove it to go on from the one before") from error
    if sha256_bytes(data) != state.tensors:
        raise RunDirectoryError(f"{directory / TENSORS} is damaged: remove {directory} to go on from the one before")
    if lines := differences(state.identity, identity):
        raise IdentityError("the base model is not the one that the run began with:\n" + "\n".join(lines))

    tensors = load(data)
    set_weights(policy, {name: tensors[f"weight.{name}"] for name in policy.weights}, str(directory))
    for name, weight in policy.weights.items():
        entry: dict[str, Any] = optimizer.state[weight]
        entry["step"].fill_(float(state.updates))
        for moment in _MOMENTS:
            entry[moment].copy_(tensors[f"{moment}.{name}"])
    return state


def skipped_in_a_row(run_root: Path, step: int) -> int:
    """How many checkpoints up to and including `step` skipped their update."""
    count = 0
    while step - count > 0 and read_manifest(run_root, step - count)[0].skipped:
        count += 1
    return count
