"""Settings of the trainer (`trainer.toml`). The defaults are the recipe that is known to learn."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from aether_common.identity import check_revision, is_local
from aether_common.settings import ModelName, Section, Settings
from pydantic import Field, field_validator, model_validator

Dtype = Literal["float32", "bfloat16"]


class ModelSettings(Section):
    """The frozen base model."""

    path: ModelName
    """Local directory (`/…`, `./…`, `~/…`) or hub repository."""
    revision: str | None = None
    """Full 40-hex commit of a hub repository; optional for a directory (`sha256:<64 hex>`), where it is checked."""
    dtype: Dtype = "bfloat16"
    """Dtype of the frozen weights in the trainer; float32 is faster on a CPU without bfloat16 arithmetic."""

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if self.revision is not None:
            check_revision(self.revision)
        if self.revision is None and not is_local(self.path):
            raise ValueError(
                f"path = {self.path!r} is no local directory, so revision must pin it: give the full 40-hex commit of "
                "the hub repository, or the path of a directory that exists"
            )
        return self


class LoraSettings(Section):
    """The trained adapter. It may not change during a run."""

    rank: int = Field(default=8, ge=1)
    """Rank r of every pair of matrices."""
    alpha: float = Field(default=16.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """`all-linear` (all linear layers but the output layer), or names of modules, for example ["q_proj", "v_proj"]."""
    serving_dtype: Dtype = "bfloat16"
    """Dtype of the adapters that workers get, and of the base model there; the trainer's own copy is float32."""
    initial_adapter: Path | None = None
    """Directory of a peft LoRA adapter with the same rank, alpha and modules to start from; unset: B = 0."""

    @field_validator("target_modules")
    @classmethod
    def _named(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError('names no module: use "all-linear" or a list of names')
        return value

    @field_validator("initial_adapter")
    @classmethod
    def _exists(cls, value: Path | None) -> Path | None:
        if value is not None and not (value / "adapter_config.json").is_file():
            raise ValueError(
                f"no adapter_config.json in {value}: give the directory of a peft adapter, or remove the key"
            )
        return value


class OptimizerSettings(Section):
    """AdamW on the LoRA weights."""

    learning_rate: float = Field(default=4e-4, ge=0, allow_inf_nan=False)
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Gradients are scaled down to this global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly; 0: none."""

    @field_validator("betas")
    @classmethod
    def _below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"{list(value)}: both must be at least 0 and below 1, for example [0.9, 0.95]")
        return value


class LossSettings(Section):
    """The trust region of the importance ratio r = p_trainer / p_sampler of each token."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """No gradient pushes r below 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0, allow_inf_nan=False)
    """No gradient pushes r above 1 + clip_high."""


class ComputeSettings(Section):
    """Where and how the step is computed. It may change between two starts."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of torch; more than free cores make everything slower."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens (padding included) in one forward and backward pass; a longer sequence is a pass of its own."""


class TrainerSettings(Settings):
    """`trainer.toml`."""

    PREFIX: ClassVar[str] = "AETHER_TRAINER_"

    model: ModelSettings
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossSettings = LossSettings()
    compute: ComputeSettings = ComputeSettings()
    seed: int = Field(default=0, ge=0)
    """Fixes the initial A matrices; nothing else in the trainer is random."""

    @model_validator(mode="after")
    def _serves_what_it_trains(self) -> Self:
        if self.model.dtype == "bfloat16" and self.lora.serving_dtype == "float32":
            raise ValueError(
                'model.dtype = "bfloat16" with lora.serving_dtype = "float32": the workers would sample from a more '
                'exact model than the one that is trained; set both to the same dtype, or model.dtype = "float32"'
            )
        return self
