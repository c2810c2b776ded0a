"""Cutting a batch: the file of step N, its digest committed, then renamed; never rebuilt differently.

The bytes of a batch depend only on the recorded groups and traces.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from aether_common.batch import Batch, Sample, batch_path
from aether_common.crash import crash_point
from aether_common.digests import sha256_bytes, sha256_file
from aether_common.errors import RunDirectoryError
from aether_common.files import TEMPORARY, disk_error, fsync_directory
from loguru import logger

from aether_coordinator.groups import Groups
from aether_coordinator.lag import lag
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import BatchRecord, EpisodeRecord, GroupRecord, number_key
from aether_coordinator.samples import decode_episode, episode_samples
from aether_coordinator.score import mean_centred
from aether_coordinator.settings import ServerSettings
from aether_coordinator.status import Counters


def temporary_path(run_root: Path, step: int) -> Path:
    """Where a batch lies between its writing and its renaming."""
    path = batch_path(run_root, step)
    return path.with_name(f"{TEMPORARY}{path.name}")


def build_batch(
    run: str,
    step: int,
    groups: list[GroupRecord],
    episodes: dict[int, list[EpisodeRecord]],
    temperatures: Mapping[str, float],
    trace: Callable[[str], bytes],
) -> tuple[bytes, int]:
    """The bytes of a batch and its number of sampled tokens: a function of what is recorded."""
    samples: list[Sample] = []
    for group in groups:
        done = [episode for episode in episodes[group.id] if episode.state == "done"]
        advantages = mean_centred([episode.reward for episode in done])
        for episode, advantage in zip(done, advantages, strict=True):
            recorded = decode_episode(trace(episode.trace))
            samples += episode_samples(recorded, episode, group, advantage, temperatures[group.source])
    return Batch(run=run, step=step, samples=samples).encode(), sum(sample.sampled_count() for sample in samples)


class Batches:
    """The committed batches of the run."""

    def __init__(self, settings: ServerSettings, ledger: Ledger, groups: Groups, counters: Counters) -> None:
        self._settings = settings
        self._ledger = ledger
        self._groups = groups
        self._counters = counters
        self._temperatures = {source.name: source.sampling.temperature for source in settings.train}
        self.records: dict[int, BatchRecord] = {}
        (settings.run_root / "batches").mkdir(parents=True, exist_ok=True)

    @property
    def next_step(self) -> int:
        """The first step without a committed batch."""
        return max(self.records, default=0) + 1

    def load(self) -> None:
        """Read the committed batches and complete a rename that a crash left out."""
        for _, value in self._ledger.scan("batches"):
            record = BatchRecord.decode(value)
            self.records[record.step] = record
        if not self.records:
            return
        newest = self.records[max(self.records)]
        path = batch_path(self._settings.run_root, newest.step)
        if not path.is_file():
            self._rename(newest)
        elif sha256_file(path) != newest.digest:
            raise RunDirectoryError(f"{path} differs from the committed batch of step {newest.step}: restore the file")

    async def commit(self, groups: list[GroupRecord]) -> BatchRecord:
        """Write, commit and publish (as a file) the batch of the next step."""
        step = self.next_step
        episodes = {group.id: self._groups.of(group) for group in groups}
        data, tokens = await asyncio.to_thread(
            build_batch, self._settings.run, step, groups, episodes, self._temperatures, self._groups.trace
        )
        rewards = [episode.reward for group in groups for episode in episodes[group.id] if episode.state == "done"]
        record = BatchRecord(
            step=step,
            digest=sha256_bytes(data),
            groups=[group.id for group in groups],
            reward=sum(rewards) / len(rewards),
            tokens=tokens,
            lag=sum(lag(step, group.version) for group in groups) / len(groups),
        )
        crash_point("batch.before_write")
        await self._ledger.write_file(lambda: self._write_temporary(step, data))
        crash_point("batch.before_commit")
        batched = [group.batched(step) for group in groups]
        self._counters.groups_trained += len(groups)
        self._counters.tokens_trained += tokens
        await self._ledger.commit(
            Write("batches", number_key(step), record.encode()),
            *(Write("groups", group.key, group.encode()) for group in batched),
        )
        self.records[step] = record
        self._groups.forget(record.groups)
        crash_point("batch.before_rename")
        await self._ledger.write_file(lambda: self._rename(record))
        crash_point("batch.after_rename")
        logger.bind(step=step).info(
            "batch {}: {} groups, {} tokens, mean reward {:.3f}", step, len(groups), tokens, record.reward
        )
        return record

    def _write_temporary(self, step: int, data: bytes) -> None:
        path = temporary_path(self._settings.run_root, step)
        try:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            fsync_directory(path.parent)
        except OSError as error:
            raise disk_error(error, path) from error

    def _rename(self, record: BatchRecord) -> None:
        path, temporary = (
            batch_path(self._settings.run_root, record.step),
            temporary_path(self._settings.run_root, record.step),
        )
        try:
            if temporary.is_file() and sha256_file(temporary) == record.digest:
                temporary.rename(path)
            fsync_directory(path.parent)
        except OSError as error:
            raise disk_error(error, path) from error
        if not path.is_file() or sha256_file(path) != record.digest:
            raise RunDirectoryError(
                f"the committed batch of step {record.step} is missing: neither {path} nor {temporary} holds it"
            )
