"""The checkpoint directory: the newest complete checkpoint is the truth about training.

`checkpoints/step_000007/` holds `manifest.json`, `adapter/` (peft's format, serving dtype) and
whatever the trainer needs to go on. It appears in one rename, so a directory with that name is
complete. Checkpoint N names batch N and checkpoint N-1.
"""

import json
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from aether_common.digests import FileEntry, file_list_digest, list_files, sha256_file
from aether_common.errors import RunDirectoryError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NAME = re.compile(r"step_(\d{6,})")


class CheckpointManifest(BaseModel):
    """`manifest.json`: what a checkpoint is, where it came from and what it contains."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: int = 1
    run: str
    step: int
    batch: str | None
    """SHA-256 of the batch file trained in this step; None for checkpoint 0."""
    parent: str | None
    """SHA-256 of the parent's manifest file; None for checkpoint 0."""
    adapter: str
    """Digest of the adapter (of its canonical file list)."""
    files: list[FileEntry]
    """The adapter's files."""
    rank: int
    alpha: float
    target_modules: list[str]
    dtype: str
    """Serving dtype of the adapter's weights."""
    skipped: bool = False
    """The update was skipped because the loss or a gradient was not finite."""


def checkpoints_directory(run_root: Path) -> Path:
    return run_root / "checkpoints"


def checkpoint_path(run_root: Path, step: int) -> Path:
    return checkpoints_directory(run_root) / f"step_{step:06d}"


def complete_steps(run_root: Path) -> list[int]:
    """The steps that have a complete checkpoint, ascending."""
    directory = checkpoints_directory(run_root)
    if not directory.is_dir():
        return []
    matches = [_NAME.fullmatch(path.name) for path in directory.iterdir() if (path / "manifest.json").is_file()]
    return sorted(int(match.group(1)) for match in matches if match)


def read_manifest(run_root: Path, step: int) -> tuple[CheckpointManifest, str]:
    """The manifest of a complete checkpoint and its SHA-256. Raises `RunDirectoryError` if it is damaged."""
    path = checkpoint_path(run_root, step) / "manifest.json"
    try:
        manifest = CheckpointManifest.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        cause = str(error).partition("\n")[0]
        raise RunDirectoryError(f"{path} cannot be read ({cause}): remove that checkpoint") from error
    return manifest, sha256_file(path)


def verify_adapter(run_root: Path, step: int) -> CheckpointManifest:
    """Recompute the digest of a checkpoint's adapter. Raises `RunDirectoryError` when it differs or is gone."""
    manifest, _ = read_manifest(run_root, step)
    directory = checkpoint_path(run_root, step) / "adapter"
    try:
        actual = file_list_digest(list_files(directory, ADAPTER_FILES))
    except OSError as error:
        raise RunDirectoryError(f"the adapter of checkpoint {step} is gone: remove the checkpoint ({error})") from error
    if actual != manifest.adapter:
        raise RunDirectoryError(f"the adapter in {directory} does not match its manifest: remove that checkpoint")
    return manifest
