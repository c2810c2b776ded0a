"""Messages between coordinator and trainer: JSON lines on the trainer's stdin and stdout.

They are hints only: what counts are the batch files and the checkpoints. The trainer exits when its
stdin closes.
"""

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from aether_common.identity import ModelIdentity


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    def encode(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class BatchReady(_Line):
    """To the trainer: look for the next batch."""

    type: Literal["batch"] = "batch"
    step: int


class Stop(_Line):
    """To the trainer: finish the step in progress, then exit 0."""

    type: Literal["stop"] = "stop"


class Ready(_Line):
    """From the trainer: model loaded, newest complete checkpoint, identity of the base model."""

    type: Literal["ready"] = "ready"
    step: int
    identity: ModelIdentity


class Progress(_Line):
    """From the trainer: the step in progress and the share of its tokens that is done (0..1)."""

    type: Literal["progress"] = "progress"
    step: int
    share: float


class Mismatch(_Line):
    """How far the sampler's logprobs of an episode are from the trainer's, over its tokens with a gradient.

    The k3 estimate of KL(sampler ‖ trainer) per token (Schulman 2020): (r - 1) - log r, r = p_trainer / p_sampler.
    """

    lag: int
    """Steps that the trainer's policy is ahead of the sampler's: only equal ones compare."""
    tokens: int
    total: float
    """Sum of k3 over the tokens."""
    largest: float


class CheckpointWritten(_Line):
    """From the trainer: checkpoint `step` is complete; metrics of the step, mismatch by episode."""

    type: Literal["checkpoint"] = "checkpoint"
    step: int
    metrics: dict[str, float] = {}
    mismatch: dict[str, Mismatch] = {}


class Failed(_Line):
    """From the trainer: why it is about to exit."""

    type: Literal["failed"] = "failed"
    message: str


ToTrainer = Annotated[BatchReady | Stop, Field(discriminator="type")]
FromTrainer = Annotated[Ready | Progress | CheckpointWritten | Failed, Field(discriminator="type")]
_to_trainer: TypeAdapter[ToTrainer] = TypeAdapter(ToTrainer)
_from_trainer: TypeAdapter[FromTrainer] = TypeAdapter(FromTrainer)


def decode_to_trainer(line: bytes) -> BatchReady | Stop | None:
    """The message in a line, None if it is none of ours."""
    return _decode(_to_trainer, line)


def decode_from_trainer(line: bytes) -> Ready | Progress | CheckpointWritten | Failed | None:
    """The message in a line, None if it is none of ours (for example a library's print)."""
    return _decode(_from_trainer, line)


def _decode[T](adapter: TypeAdapter[T], line: bytes) -> T | None:
    try:
        return adapter.validate_python(json.loads(line))
    except (ValueError, RecursionError):
        return None
