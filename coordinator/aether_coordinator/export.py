"""`aether-coordinator export-batch`: a batch as JSON lines, for people who want to look."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from aether_common.batch import batch_path, read_batch
from aether_common.errors import RunDirectoryError


def batch_lines(run_root: Path, step: int) -> Iterator[str]:
    """One JSON object per sample, arrays written out. Raises `RunDirectoryError` when there is no such batch."""
    path = batch_path(run_root, step)
    if not path.is_file():
        raise RunDirectoryError(f"{path}: no such batch: it is not cut yet, or retention removed it")
    batch, _ = read_batch(path)
    for sample in batch.samples:
        line = asdict(sample) | {
            "tokens": sample.token_ids(),
            "sampled": list(sample.sampled),
            "logprobs": sample.logprob_values(),
            "advantages": sample.advantage_values(),
        }
        yield json.dumps({"step": batch.step, **line})
