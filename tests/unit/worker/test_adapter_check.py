"""What an adapter may contain."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from aether_worker.adapter_check import AdapterCheck, AdapterError
from safetensors.torch import save_file

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


def write(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(good() if tensors is None else tensors, directory / "adapter_model.safetensors")
    return directory


def good(dtype: torch.dtype = torch.float32, rank: int = 2, module: str = LAYER) -> dict[str, torch.Tensor]:
    return {
        f"{module}.lora_A.weight": torch.zeros(rank, 8, dtype=dtype),
        f"{module}.lora_B.weight": torch.zeros(8, rank, dtype=dtype),
    }


def test_good_ones(tmp_path: Path, tiny_model: Path) -> None:
    AdapterCheck("float32", 2)(write(tmp_path))
    AdapterCheck("bfloat16")(write(tmp_path, good(torch.bfloat16)))
    # What peft itself writes.
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "lm_head"]))
    model.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=False)
    AdapterCheck("float32", 8)(tmp_path / "peft")


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {}, "holds no tensors"),
        (good(torch.bfloat16), {}, "has dtype BF16, this worker serves float32"),
        (good(rank=3), {}, "which does not fit rank 2"),
        (good(module=LAYER.replace("q_proj", "k_proj")), {}, "k_proj is not in target_modules"),
        (good(module="model.layers.0.q_proj"), {}, "is no part of a LoRA"),
        (good() | {f"{LAYER}.base_layer.weight": torch.zeros(2, 2)}, {}, "is no part of a LoRA"),
        (good() | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, {}, "is no part of a LoRA"),
        ({f"{LAYER}.lora_A.weight": torch.zeros(2, 8)}, {}, "only one of lora_A and lora_B"),
        (None, {"r": 9}, "does not fit rank 9|above vllm.max_lora_rank = 4"),
        (None, {"r": 5}, "its rank 5 is above vllm.max_lora_rank = 4"),
        (None, {"r": "2"}, "no LoRA"),
        (None, {"target_modules": None}, "no LoRA"),
        (None, {"peft_type": "IA3"}, "peft_type = 'IA3' cannot be served"),
        (None, {"use_dora": True}, "use_dora = True cannot be served"),
        (None, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (None, {"bias": "all"}, "bias = 'all'"),
    ],
)
def test_bad_ones(
    tmp_path: Path, tensors: dict[str, torch.Tensor] | None, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        AdapterCheck("float32", 4)(write(tmp_path, tensors, **config))


def test_files_that_are_none(tmp_path: Path) -> None:
    write(tmp_path)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    whole = weights.read_bytes()
    for content in (b"", b"1234567", pickle.dumps({"a": 1}) * 9, whole[:-1], whole + b"x", whole[:40], b"\xff" * 64):
        weights.write_bytes(content)
        with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is no (whole )?safetensors file"):
            AdapterCheck("float32")(tmp_path)
    nested = b"[" * 100_000
    weights.write_bytes(len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(AdapterError, match="is no safetensors file"):
        AdapterCheck("float32")(tmp_path)
    weights.write_bytes(whole)
    for text in ("", "[]", "{", '{"r": 2}', "null", "[" * 100_000):
        config.write_text(text)
        with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
            AdapterCheck("float32")(tmp_path)
