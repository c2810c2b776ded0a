"""The training loop: step = newest complete checkpoint + 1, from its batch file, to the next checkpoint."""

import time
from pathlib import Path

import torch
from aether_common.batch import Batch, batch_path, read_batch
from aether_common.checkpoint import complete_steps
from aether_common.crash import crash_point
from aether_common.errors import MessageError, RunDirectoryError, TrainerError
from aether_common.identity import compute_identity
from aether_common.pipe import CheckpointWritten, Progress, Ready
from loguru import logger

from aether_trainer.checkpoint import load_checkpoint, new_optimizer, skipped_in_a_row, write_checkpoint
from aether_trainer.link import Link
from aether_trainer.metrics import append_metrics, repair_metrics
from aether_trainer.policy import choose_device, load_policy
from aether_trainer.settings import TrainerSettings
from aether_trainer.step import Phases, train_step

MAX_SKIPPED = 3
"""Skipped updates in a row after which the run stops."""
PROGRESS_SECONDS = 0.25


def train(settings: TrainerSettings, run_root: Path, run: str, renderer: str, link: Link) -> None:
    """Train until the link says stop. The caller holds the lock of the checkpoint directory.

    Raises `TrainerError` after `MAX_SKIPPED` skipped updates in a row, `RunDirectoryError` for a batch or
    checkpoint that does not belong here or is damaged.
    """
    device = choose_device(settings.compute.device)
    torch.set_num_threads(settings.compute.threads)
    # The same batches in the same order give the same checkpoints, where the backend can promise it.
    torch.use_deterministic_algorithms(device.type == "cpu")
    identity = compute_identity(settings.model.path, settings.model.revision, settings.lora.serving_dtype, renderer)
    policy = load_policy(settings, device)
    optimizer = new_optimizer(policy, settings)

    if steps := complete_steps(run_root):
        newest = steps[-1]
        state = load_checkpoint(run_root, run, newest, policy, optimizer, settings, identity)
        updates = state.updates
        repair_metrics(run_root, newest, state.metrics)
    else:
        newest = updates = 0
        write_checkpoint(run_root, run, 0, policy, optimizer, settings, identity, updates=0)
    skipped = skipped_in_a_row(run_root, newest)
    logger.info(f"ready at checkpoint {newest}")
    link.send(Ready(step=newest, identity=identity))

    while not link.stopping:
        step, phases = newest + 1, Phases()
        path = batch_path(run_root, step)
        if not path.is_file():
            link.wait(1.0)
            continue
        with phases("load"):
            batch, digest = _read_batch(path, run, step, policy.model.config.get_text_config().vocab_size)
        crash_point("step.before_forward")
        with logger.contextualize(step=step):
            result = train_step(
                policy,
                optimizer,
                batch.samples,
                settings,
                step=step,
                updates=updates,
                phases=phases,
                progress=_reporter(link, step),
            )
            crash_point("step.after_update")
            updates += not result.skipped
            skipped = skipped + 1 if result.skipped else 0
            metrics = result.metrics | phases.seconds
            with phases("checkpoint"):
                manifest = write_checkpoint(
                    run_root,
                    run,
                    step,
                    policy,
                    optimizer,
                    settings,
                    identity,
                    updates=updates,
                    batch=digest,
                    metrics=metrics,
                    skipped=result.skipped,
                )
            newest = step
            metrics |= phases.seconds
            append_metrics(run_root, step, metrics)
            logger.info(
                f"reward {metrics['reward']:.3f}, {metrics['tokens_trained']:.0f} of {metrics['tokens_sampled']:.0f} "
                f"sampled tokens trained, {sum(phases.seconds.values()):.1f} s, adapter {manifest.adapter[:12]}"
            )
        link.send(CheckpointWritten(step=step, metrics=metrics, mismatch=result.mismatch))
        if skipped >= MAX_SKIPPED:
            raise TrainerError(
                f"the loss or its gradient was not finite in {skipped} steps in a row (up to step {step}): look for "
                "broken logprobs or rewards in the batches, or lower optimizer.learning_rate, then start again"
            )


def _reporter(link: Link, step: int):
    """A progress callback that spares the pipe: at most one line per `PROGRESS_SECONDS`."""
    last = 0.0

    def report(share: float) -> None:
        nonlocal last
        if share == 1.0 or time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            link.send(Progress(step=step, share=share))

    return report


def _read_batch(path: Path, run: str, step: int, vocabulary: int) -> tuple[Batch, str]:
    """The batch and its digest. Raises `RunDirectoryError` unless it can be trained in this step of this run."""
    try:
        batch, digest = read_batch(path)
        _check(batch, run, step, vocabulary)
    except (OSError, MessageError) as error:
        raise RunDirectoryError(f"batch {path}: {error}") from error
    return batch, digest


def _check(batch: Batch, run: str, step: int, vocabulary: int) -> None:
    if batch.run != run:
        raise MessageError(f"it belongs to run {batch.run!r}, not {run!r}: use the run's own run_root")
    if batch.step != step:
        raise MessageError(f"it is the batch of step {batch.step}: restore the file of step {step}")
    if not any(sample.sampled_count() for sample in batch.samples):
        raise MessageError("it has no sampled token, so there is nothing to train on")
    for sample in batch.samples:
        where = f"sample of group {sample.group}, episode {sample.episode}"
        if sample.sampled[:1] == b"\x01":
            raise MessageError(f"{where}: its first token is marked as sampled, but has no logprob")
        if sample.sampled_count() and not sample.temperature > 0:
            raise MessageError(f"{where}: temperature {sample.temperature} has no logprobs to train on")
        if (largest := max(sample.token_ids(), default=0)) >= vocabulary:
            raise MessageError(f"{where}: token id {largest} is not in the model's vocabulary of {vocabulary}")
