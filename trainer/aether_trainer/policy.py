"""The policy: a frozen base model with a trained LoRA adapter in float32.

The adapter leaves as a directory in peft's format whose bytes depend only on the weights and the settings.
"""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import peft
import torch
from aether_common.checkpoint import ADAPTER_FILES
from aether_common.errors import ConfigError, TrainerError
from aether_common.identity import is_local, resolve_model
from loguru import logger
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from aether_trainer.settings import LoraSettings, TrainerSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIG_FILE, WEIGHTS_FILE = ADAPTER_FILES


@dataclass(frozen=True, slots=True)
class Policy:
    """`model` computes with the adapter; `weights` are the adapter's float32 parameters under peft's file names."""

    model: PreTrainedModel
    config: peft.LoraConfig
    weights: dict[str, nn.Parameter]
    target_modules: list[str]


def choose_device(name: str) -> torch.device:
    """Raises `ConfigError` when a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('compute.device = "cuda": torch finds no usable GPU here: install a driver or set "cpu"')
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_policy(settings: TrainerSettings, device: torch.device) -> Policy:
    """Load the base model and give it an adapter: the initial one, else A random by the seed and B = 0."""
    transformers_logging.disable_progress_bar()
    path = resolve_model(settings.model.path, settings.model.revision)
    try:
        base: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[settings.model.dtype], local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise TrainerError(f"model {settings.model.path!r}: transformers cannot load {path}: {error}") from error
    base = cast(PreTrainedModel, base.to(device))
    frozen = base.num_parameters()
    _check_head(base, settings.model.path)

    target_modules = _target_modules(base, settings.lora)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora.rank,
        lora_alpha=int(alpha) if (alpha := settings.lora.alpha).is_integer() else alpha,  # pyright: ignore
        target_modules=target_modules,
        base_model_name_or_path=settings.model.path,
        revision=None if is_local(settings.model.path) else settings.model.revision,
    )
    torch.manual_seed(settings.seed)
    try:
        # peft keeps the adapter in float32 whatever the dtype of the base is.
        wrapped = peft.get_peft_model(base, config)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: peft cannot adapt this model: {error}") from error
    # No dropout anywhere: the logprobs must be those that were sampled from.
    wrapped.eval()
    weights = {
        name.replace(".default", ""): parameter
        for name, parameter in sorted(wrapped.named_parameters())
        if parameter.requires_grad
    }
    policy = Policy(base, config, weights, target_modules)
    if settings.lora.initial_adapter is not None:
        _start_from(policy, settings.lora.initial_adapter)
    trained = sum(weight.numel() for weight in weights.values())
    logger.info(f"{settings.model.path}: {frozen:,} parameters, {trained:,} trained beside them, on {device}")
    return policy


def _target_modules(base: PreTrainedModel, lora: LoraSettings) -> list[str]:
    """The names of the adapted modules, sorted; `all-linear` written out, so that every reader means the same."""
    head = base.get_output_embeddings()
    linear = {name: module for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    if lora.target_modules == "all-linear":
        return sorted({name.rpartition(".")[2] for name, module in linear.items() if module is not head})
    for target in lora.target_modules:
        matches = [module for name, module in linear.items() if name == target or name.endswith(f".{target}")]
        if not matches:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"lora.target_modules: the model has no linear layer {target!r}: it has {', '.join(known)}"
            )
        if head in matches and base.config.tie_word_embeddings:
            raise ConfigError(
                f"lora.target_modules: {target!r} shares its weights with the input embedding in this model, which "
                "vLLM cannot serve with an adapter: remove it"
            )
    return sorted(set(lora.target_modules))


def _check_head(base: PreTrainedModel, name: str) -> None:
    """The forward pass applies the output layer itself, only where logits are needed: make sure it may."""
    tokens_1t = torch.arange(1, 5, device=base.device)[None]
    head: Any = base.get_output_embeddings()
    decoder: Any = base.get_decoder()
    with torch.no_grad():
        expected = base(input_ids=tokens_1t, use_cache=False).logits
        actual = head(decoder(input_ids=tokens_1t, use_cache=False).last_hidden_state)
    if not torch.allclose(expected, actual, rtol=1e-5, atol=1e-5):
        raise TrainerError(
            f"model {name!r}: its logits are not those of its output layer (scaled or capped), which the trainer does "
            "not support: choose another base model"
        )


def _start_from(policy: Policy, directory: Path) -> None:
    """Copy the weights of a peft adapter. Raises `ConfigError` unless it has the configured shape."""
    try:
        config = peft.LoraConfig.from_pretrained(str(directory))
        tensors = load_file(directory / WEIGHTS_FILE)
    except Exception as error:
        raise ConfigError(
            f"lora.initial_adapter = {str(directory)!r}: no readable peft LoRA adapter: {error}"
        ) from error
    for key in (
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "bias",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
    ):
        theirs, ours = getattr(config, key, None), getattr(policy.config, key)
        if theirs != ours:
            raise ConfigError(
                f"lora.initial_adapter = {str(directory)!r}: its {key} is {theirs!r}, here it is {ours!r}"
            )
    set_weights(policy, tensors, f"lora.initial_adapter = {str(directory)!r}")


def set_weights(policy: Policy, tensors: dict[str, Tensor], origin: str) -> None:
    """Copy tensors into the adapter. Raises `ConfigError` unless names and shapes are the same."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(weight.shape) for name, weight in policy.weights.items()}
    if different := sorted({name for name, _ in shapes.items() ^ expected.items()}):
        name = different[0]
        raise ConfigError(
            f"{origin}: {name} is {shapes.get(name, 'missing')}, expected {expected.get(name, 'nothing')}: "
            "adapter, base model and lora.target_modules must belong together"
        )
    with torch.no_grad():
        for name, weight in policy.weights.items():
            weight.copy_(tensors[name])


def write_adapter(policy: Policy, directory: Path, dtype: str) -> None:
    """Write the two files of a peft adapter; loadable with `PeftModel.from_pretrained`."""
    directory.mkdir()
    tensors = {name: weight.detach().to("cpu", DTYPES[dtype]).contiguous() for name, weight in policy.weights.items()}
    config = policy.config.to_dict() | {"inference_mode": True, "target_modules": policy.target_modules}
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    (directory / CONFIG_FILE).write_text(text + "\n")
    # Not save_file: it hides the cause of a full disk in an error of its own.
    (directory / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set):
        return sorted(cast(set[str], value))
    raise TypeError(f"not JSON: {value!r}")
