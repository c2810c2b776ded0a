"""The turn journal: every successful answer is paid for once.

Key = (episode, attempt, digest of prompt ids, normalised sampling and agent role). The k-th equal
request of an attempt takes the k-th answer: from the journal, from the job in flight, or from a new
job whose id and seed derive from the same hash. Errors are never journaled.
"""

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from aether_common.digests import canonical_json, is_digest, sha256_bytes
from aether_common.wire import Sampling

_EPISODE = re.compile(r"g\d{8,12}-e\d{3,6}", re.ASCII)


@dataclass(frozen=True)
class TurnKey:
    """Identifies the k-th equal request of an attempt."""

    episode: str
    attempt: int
    digest: str
    """SHA-256 of prompt ids, sampling and role."""
    count: int
    """k, from 0."""

    @cached_property
    def journal(self) -> bytes:
        """The key of the answer in the journal."""
        return f"{self.episode}/{self.attempt}/{self.digest}/{self.count:06d}".encode()

    @staticmethod
    def parse(journal: str) -> "TurnKey":
        """The key that `journal` writes. Raises `ValueError` for anything else."""
        episode, attempt, digest, count = journal.split("/")
        key = TurnKey(episode, int(attempt), digest, int(count))
        known = _EPISODE.fullmatch(episode) and is_digest(digest) and min(key.attempt, key.count) >= 0
        if not known or key.journal.decode() != journal:
            raise ValueError(f"not a key of the turn journal: {journal[:200]!r}")
        return key

    def job(self, run: str, seed: int) -> str:
        """The job id: 32 hex digits of H(run, key, k)."""
        return self._hash("job", run, seed).hex()[:32]

    def job_seed(self, run: str, seed: int) -> int:
        """The job's sampling seed, 63 bits, from the same hash."""
        return int.from_bytes(self._hash("seed", run, seed)[:8], "big") >> 1

    def _hash(self, purpose: str, run: str, seed: int) -> bytes:
        return hashlib.sha256(f"{purpose}\n{run}\n{seed}\n".encode() + self.journal).digest()


def request_digest(prompt: bytes, sampling: Sampling, role: str) -> str:
    """`prompt` holds uint32 token ids."""
    return sha256_bytes(_request_head(sampling, role) + b"\n" + prompt)


@lru_cache(maxsize=1024)
def _request_head(sampling: Sampling, role: str) -> bytes:
    return canonical_json({"sampling": sampling.model_dump(mode="json"), "role": role})


@dataclass(slots=True)
class Claims:
    """The claims of one attempt of an episode: which of the equal answers are taken."""

    episode: str
    attempt: int
    _taken: dict[str, set[int]] = field(default_factory=dict)

    def claim(self, digest: str) -> TurnKey:
        """Take the first unclaimed k of this request."""
        taken = self._taken.setdefault(digest, set())
        count = 0
        while count in taken:
            count += 1
        taken.add(count)
        return TurnKey(self.episode, self.attempt, digest, count)

    def release(self, key: TurnKey) -> None:
        """The request failed: a repeated one takes the same k."""
        self._taken.get(key.digest, set()).discard(key.count)
