"""Crash points: places around every durable step at which a test kills the process with -9.

Off unless the environment says otherwise: `AETHER_CRASH_POINTS` lists names, `AETHER_CRASH_DIR` names
a directory. A listed point kills the process the first time that it is reached in the run; a file of
its name in the directory remembers that it was.
"""

import os
import signal
from pathlib import Path

COORDINATOR = (
    "group.before_commit",
    "group.after_commit",
    "job.before_record",
    "job.before_publish",
    "job.after_publish",
    "reply.before_record",
    "reply.before_ack",
    "reply.after_ack",
    "episode.before_commit",
    "episode.after_commit",
    "score.before_commit",
    "score.after_commit",
    "batch.before_write",
    "batch.before_commit",
    "batch.before_rename",
    "batch.after_rename",
    "policy.before_put",
    "policy.before_commit",
    "policy.before_show",
    "policy.after_show",
    "evaluation.before_write",
    "evaluation.after_write",
)
TRAINER = (
    "step.before_forward",
    "step.after_update",
    "checkpoint.before_fsync",
    "checkpoint.after_rename",
)
WORKER = (
    "worker.after_pull",
    "adapter.before_rename",
    "adapter.after_rename",
    "worker.before_reply",
    "worker.before_ack",
    "worker.after_ack",
)
ALL = (*COORDINATOR, *TRAINER, *WORKER)

_armed = set(filter(None, os.environ.get("AETHER_CRASH_POINTS", "").split(",")))
_directory = Path(os.environ.get("AETHER_CRASH_DIR", "."))


def crash_point(name: str) -> None:
    """Die here if a test asks for it; otherwise nothing happens."""
    if name not in _armed:
        return
    _armed.discard(name)
    try:
        os.close(os.open(_directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
