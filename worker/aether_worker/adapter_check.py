"""Is a verified directory an adapter that the engine can serve? Read from its two files, without loading it.

Only safetensors: nothing that is downloaded is ever unpickled. What vLLM's LoRA cannot serve is refused here, by
name, and not by an engine that dies of it.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aether_common.errors import AetherError

DTYPES = {"float32": "F32", "bfloat16": "BF16"}
MAX_HEADER = 64 << 20
PREFIX = "base_model.model."


class AdapterError(AetherError):
    """An adapter cannot be had: not there, corrupt, or not what an adapter may contain."""


@dataclass(frozen=True, slots=True)
class AdapterCheck:
    """What an engine takes."""

    dtype: str
    max_rank: int | None = None
    """None: any."""

    def __call__(self, directory: Path) -> None:
        """Raises `AdapterError` that says what is wrong."""
        rank, targets = self._config(directory / "adapter_config.json")
        tensors = read_header(directory / "adapter_model.safetensors")
        if not tensors:
            raise AdapterError("adapter_model.safetensors holds no tensors")
        sides: dict[str, set[str]] = {}
        for name, tensor in tensors.items():
            module, _, side = name.removesuffix(".weight").rpartition(".")
            if not name.startswith(PREFIX) or not name.endswith(".weight") or side not in ("lora_A", "lora_B"):
                raise AdapterError(
                    f"tensor {name} is no part of a LoRA: expected {PREFIX}<module>.lora_A.weight or lora_B"
                )
            if module.rpartition(".")[2] not in targets:
                raise AdapterError(f"tensor {name}: {module.rpartition('.')[2]} is not in target_modules ({targets})")
            if tensor["dtype"] != DTYPES[self.dtype]:
                raise AdapterError(f"tensor {name} has dtype {tensor['dtype']}, this worker serves {self.dtype}")
            shape = tensor["shape"]
            if len(shape) != 2 or shape[0 if side == "lora_A" else 1] != rank:
                raise AdapterError(f"tensor {name} has shape {shape}, which does not fit rank {rank}")
            sides.setdefault(module, set()).add(side)
        if halves := [module for module, found in sides.items() if len(found) != 2]:
            raise AdapterError(f"module {halves[0]} has only one of lora_A and lora_B")

    def _config(self, path: Path) -> tuple[int, list[str]]:
        """Rank and target modules."""
        try:
            config: Any = json.loads(path.read_bytes())
            rank, targets = config["r"], config["target_modules"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise AdapterError(f"adapter_config.json cannot be read: {error!r}") from error
        refused = {
            "peft_type": config.get("peft_type") != "LORA",
            "use_dora": config.get("use_dora"),
            "bias": config.get("bias", "none") != "none",
            "modules_to_save": config.get("modules_to_save"),
            "rank_pattern": config.get("rank_pattern"),
            "alpha_pattern": config.get("alpha_pattern"),
        }
        for key, wrong in refused.items():
            if wrong:
                raise AdapterError(f"adapter_config.json: {key} = {config.get(key)!r} cannot be served")
        if not isinstance(rank, int) or rank < 1 or not isinstance(targets, list) or not targets:
            raise AdapterError(f"adapter_config.json: r = {rank!r}, target_modules = {targets!r}: no LoRA")
        if self.max_rank is not None and rank > self.max_rank:
            raise AdapterError(f"its rank {rank} is above vllm.max_lora_rank = {self.max_rank}: raise that setting")
        return rank, targets


def read_header(path: Path) -> dict[str, Any]:
    """Name → dtype, shape and offsets of the tensors in a safetensors file. Raises `AdapterError` if it is none.

    The format: length of the header (8 bytes, little-endian), the header (JSON), the data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(MAX_HEADER, size - 8):
            raise AdapterError(f"{path.name} is no safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [tensor["data_offsets"][1] for tensor in header.values()]
            whole = all(isinstance(tensor["shape"], list) and tensor["dtype"] for tensor in header.values())
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise AdapterError(f"{path.name} is no safetensors file: {error!r}") from error
    if not whole or max(ends, default=0) != size - 8 - length:
        raise AdapterError(f"{path.name} is no whole safetensors file")
    return header
