"""Model identity: what must be equal on every machine for tokens and logprobs to mean the same.

The identity is computed from the files that are loaded, never from a name. A hub repository is
pinned by its 40-hex commit, a local directory by `sha256:` and the digest of its file list.
"""

import json
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from aether_common.digests import file_list_digest, list_files, sha256_bytes
from aether_common.errors import IdentityError

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
TEMPLATE_FILE = "chat_template.jinja"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCAL = re.compile(r"sha256:[0-9a-f]{64}")


class ModelIdentity(BaseModel):
    """The `[base_model]` table. Digests are SHA-256 in hex of canonical file lists."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    repository: str
    """Hub repository, or the base name of a local directory (informative)."""
    revision: str
    """40-hex commit, or `sha256:<64 hex>` of a local directory."""
    weights: str
    """Digest of the `*.safetensors` files."""
    config: str
    """Digest of `config.json` and `generation_config.json`."""
    tokenizer: str
    """Digest of the tokenizer's files."""
    chat_template: str
    """Digest of the chat template."""
    vocab_size: int
    """Token ids are below it."""
    dtype: str
    """Serving dtype (of the workers and the published adapters), for example bfloat16."""
    quantization: str = "none"
    """Quantisation of the served weights."""
    renderer: str = ""
    """Name of the `renderers` renderer, never auto-selected; empty where nothing is rendered (workers, trainer)."""


def check_revision(revision: str) -> str:
    """Raises `ValueError` unless the revision pins the model's content."""
    if not (_COMMIT.fullmatch(revision) or _LOCAL.fullmatch(revision)):
        raise ValueError(
            f"revision {revision!r} pins nothing: give the full 40-hex commit of a hub repository; for a local "
            "directory leave it out or give sha256:<64 hex>"
        )
    return revision


def is_local(model: str) -> bool:
    """Whether `model` names a directory rather than a hub repository."""
    return model.startswith(("/", "./", "../", "~")) or Path(model).is_dir()


def resolve_model(model: str, revision: str | None) -> Path:
    """The directory with the model's files: the local one, or the hub snapshot at a full commit.

    Raises `IdentityError` when the model does not exist or cannot be downloaded.
    """
    if is_local(model):
        path = Path(model).expanduser().resolve()
        if not (path / "config.json").is_file():
            raise IdentityError(f"model {model!r}: no config.json in {path}: give a model directory or hub repository")
        return path
    if revision is None or not _COMMIT.fullmatch(revision):
        raise IdentityError(
            f"model {model!r} is no directory here, so it is taken from the hub: its revision must be the full 40-hex "
            f"commit, not {revision!r}"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise IdentityError(f"model {model!r}: huggingface_hub is not installed here: give a directory") from error
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise IdentityError(
            f"model {model!r} at {revision}: cannot be downloaded ({type(error).__name__}: {str(error)[:200]}): "
            "check the name, the commit and the connection, or give a local directory"
        ) from error


def directory_revision(path: Path) -> str:
    """The revision of a local model directory: the digest of its regular files."""
    names = [file.name for file in path.iterdir() if file.is_file() and not file.name.startswith(".")]
    return f"sha256:{file_list_digest(list_files(path, names))}"


def compute_identity(
    model: str, revision: str | None, dtype: str, renderer: str = "", quantization: str = "none"
) -> ModelIdentity:
    """Compute the identity of the model's files. Raises `IdentityError` naming what is missing or differs."""
    path = resolve_model(model, revision)
    if is_local(model):
        actual = directory_revision(path)
        if revision not in (None, actual):
            raise IdentityError(
                f"model {model!r}: its files have revision {actual}, not {revision}: "
                "restore the directory or print the new identity with `aether-coordinator identity`"
            )
        revision = actual
    assert revision is not None
    names = {file.name for file in path.iterdir() if file.is_file()}
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights:
        raise IdentityError(f"model {model!r}: no *.safetensors file in {path}: convert the weights first")
    if not names.intersection(TOKENIZER_FILES):
        raise IdentityError(f"model {model!r}: no tokenizer file in {path}")
    config = json.loads((path / "config.json").read_text())
    text_config = config.get("text_config", config)
    return ModelIdentity(
        repository=model.rstrip("/").rsplit("/", 1)[-1] if is_local(model) else model,
        revision=revision,
        weights=file_list_digest(list_files(path, weights)),
        config=file_list_digest(list_files(path, names.intersection(CONFIG_FILES))),
        tokenizer=file_list_digest(list_files(path, names.intersection(TOKENIZER_FILES))),
        chat_template=sha256_bytes(_chat_template(path)),
        vocab_size=int(text_config["vocab_size"]),
        dtype=dtype,
        quantization=quantization,
        renderer=renderer,
    )


def _chat_template(path: Path) -> bytes:
    if (path / TEMPLATE_FILE).is_file():
        return (path / TEMPLATE_FILE).read_bytes()
    tokenizer_config = path / "tokenizer_config.json"
    template = json.loads(tokenizer_config.read_text()).get("chat_template") if tokenizer_config.is_file() else None
    return json.dumps(template).encode() if template is not None else b""


def differences(expected: ModelIdentity, actual: ModelIdentity) -> list[str]:
    """One line per field that differs, with both values. The repository's name is informative."""
    lines: list[str] = []
    for name in ModelIdentity.model_fields:
        left, right = getattr(expected, name), getattr(actual, name)
        if name == "repository" or (name == "renderer" and not right):
            continue
        if left != right:
            lines.append(f"{name}: the run has {left!r}, here it is {right!r}")
    return lines
