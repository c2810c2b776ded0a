"""Bad batches, skipped updates, warm-up, and learning."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aether_common.arrays import pack_floats, pack_tokens
from aether_common.batch import Batch, Sample, batch_path
from aether_common.checkpoint import complete_steps, read_manifest
from aether_common.errors import RunDirectoryError, TrainerError
from aether_common.pipe import CheckpointWritten
from aether_trainer.settings import OptimizerSettings, TrainerSettings
from aether_trainer.step import learning_rate
from aether_trainer.train import train

MakeSettings = Callable[..., TrainerSettings]
WriteBatch = Callable[..., Batch]


def write(run_root: Path, batch: Batch) -> None:
    batch_path(run_root, batch.step).write_bytes(batch.encode())


def broken(sample: Sample) -> Sample:
    """A worker's logprob that is no number, on a token with an advantage."""
    logprobs = sample.logprob_values()
    logprobs[-1] = float("nan")
    return replace(sample, logprobs=pack_floats(logprobs))


def test_not_finite_is_skipped_and_three_in_a_row_stop(
    tmp_path: Path, make_settings: MakeSettings, write_batch: WriteBatch, link: Any
):
    batches = {step: write_batch(tmp_path, step) for step in range(1, 7)}
    for step in (2, 4, 5, 6):
        first, *others = batches[step].samples
        write(tmp_path, replace(batches[step], samples=[broken(first), *others]))
    coordinator = link()
    with pytest.raises(TrainerError, match=r"not finite in 3 steps in a row \(up to step 6\)"):
        train(make_settings(), tmp_path, "demo", "", coordinator)
    manifests = [read_manifest(tmp_path, step)[0] for step in complete_steps(tmp_path)]
    assert [manifest.skipped for manifest in manifests] == [False, False, True, False, True, True, True]
    digests = [manifest.adapter for manifest in manifests]
    assert digests[2] == digests[1] and digests[3] == digests[4] == digests[5] == digests[6]
    assert len({digests[0], digests[1], digests[3]}) == 3
    told = {news.step: news.metrics for news in coordinator.news if isinstance(news, CheckpointWritten)}
    assert told[2]["skipped"] == 1.0 and "loss" not in told[2] and "loss" in told[3]
    assert all(CheckpointWritten(step=step, metrics=metrics).encode() for step, metrics in told.items())

    # Started again by hand, one more skipped update stops it, a good one counts from 0.
    write(tmp_path, replace(batches[6], step=7))
    write(tmp_path, replace(batches[2], step=8, samples=[broken(sample) for sample in batches[2].samples]))
    train(make_settings(), tmp_path, "demo", "", link())
    assert complete_steps(tmp_path)[-1] == 8


def first_sampled(batch: Batch) -> Batch:
    first, *others = batch.samples
    return replace(batch, samples=[replace(first, sampled=b"\x01" + first.sampled[1:]), *others])


def unknown_token(batch: Batch) -> Batch:
    first, *others = batch.samples
    return replace(batch, samples=[replace(first, tokens=pack_tokens([259, *first.token_ids()[1:]])), *others])


def nothing_sampled(batch: Batch) -> Batch:
    return replace(batch, samples=[replace(sample, sampled=bytes(len(sample.sampled))) for sample in batch.samples])


def cold(batch: Batch) -> Batch:
    return replace(batch, samples=[replace(sample, temperature=0.0) for sample in batch.samples])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda batch: replace(batch, run="other"), "belongs to run 'other', not 'demo'"),
        (first_sampled, "group 0, episode 0-0: its first token is marked as sampled"),
        (unknown_token, "token id 259 is not in the model's vocabulary of 259"),
        (nothing_sampled, "no sampled token"),
        (cold, "temperature 0.0"),
    ],
)
def test_bad_batches(
    tmp_path: Path,
    make_settings: MakeSettings,
    write_batch: WriteBatch,
    link: Any,
    damage: Callable[[Batch], Batch],
    message: str,
):
    write(tmp_path, damage(write_batch(tmp_path, 1)))
    with pytest.raises(RunDirectoryError) as caught:
        train(make_settings(), tmp_path, "demo", "", link())
    assert message in str(caught.value) and str(batch_path(tmp_path, 1)) in str(caught.value)
    assert complete_steps(tmp_path) == [0]


def test_batch_of_another_step_and_no_batch(
    tmp_path: Path, make_settings: MakeSettings, write_batch: WriteBatch, link: Any
):
    batch_path(tmp_path, 1).parent.mkdir()
    batch_path(tmp_path, 1).write_bytes(write_batch(tmp_path, 2).encode())
    with pytest.raises(RunDirectoryError, match="it is the batch of step 2: restore the file of step 1"):
        train(make_settings(), tmp_path, "demo", "", link())
    batch_path(tmp_path, 1).write_bytes(b"no msgpack")
    with pytest.raises(RunDirectoryError, match=r"step_000001\.msgpack: not a batch"):
        train(make_settings(), tmp_path, "demo", "", link())


def test_warm_up():
    warm = OptimizerSettings(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(warm, updates) for updates in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(OptimizerSettings(learning_rate=1.0), 0) == 1.0


def test_rewarded_tokens_become_likelier(
    tmp_path: Path, make_settings: MakeSettings, make_sample: Callable[..., Sample], link: Any
):
    """Four steps on fixed completions: r of the good one rises, so the loss falls and kl grows from almost 0."""
    prompt = list(range(10, 20))
    good = make_sample(prompt + [100] * 4, [0] * 10 + [1] * 4, 1.0)
    bad = make_sample(prompt + [200] * 4, [0] * 10 + [1] * 4, -1.0)
    batch_path(tmp_path, 1).parent.mkdir()
    for step in range(1, 5):
        write(tmp_path, Batch(run="demo", step=step, samples=[good, bad]))
    train(make_settings(), tmp_path, "demo", "", coordinator := link())
    told = [news.metrics for news in coordinator.news if isinstance(news, CheckpointWritten)]
    assert abs(told[0]["loss"]) < 0.2 and told[0]["kl"] < 0.05
    assert told[3]["loss"] < told[0]["loss"] - 0.2 and told[3]["clip_fraction"] > 0.4
