"""Retention: what old steps leave behind is deleted, never what the kept steps need.

Kept are the batches, traces, journal and checkpoints of the newest steps; the small records of
groups, episodes, batches and policies stay for good. The newest checkpoint, and those of policies
in use, are never deleted.
"""

import shutil
from pathlib import Path

from aether_common.batch import batch_path
from aether_common.checkpoint import checkpoint_path
from aether_common.files import TEMPORARY

from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import BatchRecord, EpisodeRecord, GroupRecord


def first_kept(newest: int, keep: int | None, in_use: set[int]) -> int:
    """The lowest step that is kept, `newest` being the newest complete checkpoint.

    A kept step N needs checkpoint N-1 to be trained again, so that one stays as well.
    """
    if keep is None:
        return 0
    return max(0, min([newest - keep, *in_use]))


def forget_traces(ledger: Ledger, groups: list[tuple[GroupRecord, list[EpisodeRecord]]]) -> list[Write]:
    """Deletes trace and journal of groups that are over; trace files are left to `remove_traces`."""
    writes: list[Write] = []
    for group, episodes in groups:
        prefix = f"g{group.id:08d}-".encode()
        writes += [Write("journal", key, None) for key, _ in ledger.scan("journal", prefix)]
        for episode in episodes:
            if episode.trace:
                writes.append(Write("traces", episode.trace.encode(), None))
    return writes


def remove_traces(traces: Path, writes: list[Write]) -> None:
    """Delete the trace files of what `forget_traces` gave, after its commit: before, a record still names them."""
    for write in writes:
        if write.database == "traces":
            (traces / f"{write.key.decode()}.msgpack").unlink(missing_ok=True)


def remove_step_files(run_root: Path, record: BatchRecord) -> None:
    """Delete batch file and checkpoint of a step; a checkpoint disappears in one rename."""
    batch_path(run_root, record.step).unlink(missing_ok=True)
    checkpoint = checkpoint_path(run_root, record.step)
    if checkpoint.is_dir():
        doomed = checkpoint.with_name(f"{TEMPORARY}old-{checkpoint.name}")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
