"""What a run shows about itself: the JSON of `GET /status` and of `aether-coordinator status --json`."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

WorkerState = Literal["connected", "draining", "left", "lost", "incompatible", "quarantined", "revoked"]
RunState = Literal["starting", "running", "paused", "draining", "finished", "failed"]


def evaluation_path(run_root: Path, source: str, version: int) -> Path:
    """Where the results of a finished evaluation lie."""
    return run_root / "evals" / source / f"policy_{version:06d}.jsonl"


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class WorkerStatus(_Part):
    name: str
    state: WorkerState
    engine: str = ""
    slots: int = 0
    running: int = 0
    """Jobs in its hands: generating, or prefetched for the next free slot."""
    tokens_per_s: float = 0.0
    adapters: int = 0
    adapter_load_s: float | None = None
    """How long the newest adapter took to fetch and load."""
    last_seen_s: float = 0.0
    """Seconds since the last heartbeat."""
    reason: str = ""
    """Why it is incompatible, quarantined or revoked."""
    failures: int = 0
    """Since its last good answer; failures with one cause count once."""
    first_reply_s: float | None = None
    """From its registration to its first good answer."""
    mismatch: float | None = None
    """How far its logprobs are from the trainer's: mean k3 per token at its smallest lag."""
    mismatch_tail: float | None = None
    """The 95th percentile of its episodes' largest k3."""
    versions: dict[str, str] = {}
    """Of its packages, as it says."""


class StepStatus(_Part):
    """A finished training step, oldest first in `RunStatus.steps_done`."""

    step: int
    reward: float
    """Mean reward of the episodes in the batch."""
    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    """Sampled tokens in the batch."""
    lag: float = 0.0
    """Mean policy lag of the batch's groups."""
    finished_s: float = 0.0
    """Unix time."""


class EvaluationStatus(_Part):
    """One evaluation source at one policy version."""

    source: str
    version: int
    done: int
    total: int
    reward: float
    """Mean over the finished episodes."""


class Counters(_Part):
    """Totals since the run began (they survive a restart)."""

    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_dropped: int = 0
    replies: int = 0
    replies_duplicate: int = 0
    replies_refused: int = 0
    messages_bad: int = 0
    turns_replayed: int = 0
    turns_failed: int = 0
    jobs_reassigned: int = 0
    jobs_returned: int = 0
    episodes_failed: int = 0
    episodes_accepted: int = 0
    groups_dropped: int = 0
    groups_uniform: int = 0
    groups_trained: int = 0
    updates_skipped: int = 0


class RunStatus(_Part):
    run: str
    run_uuid: str
    state: RunState
    step: int = 0
    """Newest complete checkpoint."""
    steps: int = 0
    policy_version: int = -1
    """-1 until policy 0 is active."""
    step_share: float = 0.0
    """Share (0..1) of the step in progress: groups ready, then trained tokens."""
    waits_for: list[str] = []
    """What the run waits for, when no step was completed for `watchdog.after_s`."""
    groups_open: int = 0
    groups_ready: int = 0
    groups_per_batch: int = 0
    turns_waiting: int = 0
    turns_running: int = 0
    episodes_running: int = 0
    tokens_per_s: float = 0.0
    """Generated tokens per second over the last 30 s."""
    started_s: float = 0.0
    """Unix time at which the first group of the run was opened; 0 before."""
    steps_done: list[StepStatus] = []
    evaluations: list[EvaluationStatus] = []
    workers: list[WorkerStatus] = []
    counters: Counters = Counters()
    adapter: str = ""
    """Directory of the newest adapter (peft format)."""
