"""The training batch: what the coordinator cuts and the trainer trains, one file per step.

A batch file is a msgpack map; its bytes depend only on the recorded groups, so the same groups give
the same digest. The trainer computes the digest of the file that it read and names it in the
checkpoint's manifest.
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgpack

from aether_common.arrays import unpack_floats, unpack_tokens
from aether_common.digests import sha256_bytes
from aether_common.errors import MessageError
from aether_common.wire import pack

FORMAT = 1


def batch_path(run_root: Path, step: int) -> Path:
    """Where the batch of `step` (1, 2, …) lies in a run directory."""
    return run_root / "batches" / f"step_{step:06d}.msgpack"


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence to train on. All arrays have one entry per token (T of them).

    Each sampled token of an episode is marked in exactly one sample.
    """

    source: str
    group: int
    episode: str
    version: int
    """Policy version that all sampled tokens came from."""
    reward: float
    """The episode's reward, for metrics only."""
    temperature: float
    tokens: bytes
    """uint32 token ids, 4·T bytes."""
    sampled: bytes
    """One byte per token: 1 where the policy sampled it and it is trained, else 0."""
    logprobs: bytes
    """float32 sampling logprobs (temperature included), 4·T bytes; 0 where not sampled."""
    advantages: bytes
    """float32 advantage per token, 4·T bytes; 0 where not sampled."""

    def check(self) -> None:
        """Raises `MessageError` unless all arrays are bytes and have the same length."""
        if not all(isinstance(data, bytes) for data in (self.tokens, self.sampled, self.logprobs, self.advantages)):
            raise MessageError(f"sample of episode {self.episode}: an array is no bytes")
        length = len(self.tokens) // 4
        if len(self.tokens) != 4 * length or len(self.sampled) != length:
            raise MessageError(f"sample of episode {self.episode}: tokens and mask differ in length")
        if len(self.logprobs) != 4 * length or len(self.advantages) != 4 * length:
            raise MessageError(f"sample of episode {self.episode}: logprobs or advantages differ in length")

    def token_ids(self) -> list[int]:
        return unpack_tokens(self.tokens)

    def logprob_values(self) -> list[float]:
        return unpack_floats(self.logprobs)

    def advantage_values(self) -> list[float]:
        return unpack_floats(self.advantages)

    def sampled_count(self) -> int:
        return self.sampled.count(1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that one optimizer step needs."""

    run: str
    step: int
    samples: list[Sample]

    def encode(self) -> bytes:
        return pack(
            {
                "format": FORMAT,
                "run": self.run,
                "step": self.step,
                "samples": [asdict(sample) for sample in self.samples],
            }
        )


def decode_batch(data: bytes) -> Batch:
    """Read a batch. Raises `MessageError` for anything that is none."""
    try:
        body: Any = msgpack.unpackb(data)
        if body["format"] != FORMAT:
            raise MessageError(f"batch format {body['format']!r} is not {FORMAT}: use the release that wrote it")
        names = [field.name for field in fields(Sample)]
        samples = [Sample(**{name: sample[name] for name in names}) for sample in body["samples"]]
        for sample in samples:
            sample.check()
        return Batch(run=body["run"], step=body["step"], samples=samples)
    except MessageError:
        raise
    except Exception as error:
        raise MessageError(f"not a batch: {error!r}") from error


def read_batch(path: Path) -> tuple[Batch, str]:
    """The batch in a file and the SHA-256 of the file."""
    data = path.read_bytes()
    return decode_batch(data), sha256_bytes(data)
