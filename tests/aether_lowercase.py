"""A verifiers taskset that the tiny model learns in a dozen steps: reward is the share of lower-case letters."""

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["LowercaseTaskset"]


class LowercaseConfig(vf.TasksetConfig):
    count: int = 16
    first: int = 0
    turns: int = 1
    slow_every: int = 0
    """Every so many-th task is slow; 0: none."""
    slow_s: float = 3.0
    """How long the environment of a slow task works after the answer, in seconds."""


class LowercaseData(vf.TaskData):
    sleep_s: float = 0.0


class LowercaseTask(vf.Task[LowercaseData, vf.State, vf.TaskConfig]):
    async def finalize(self, trace: vf.Trace, runtime: Any) -> None:
        await asyncio.sleep(self.data.sleep_s)

    @vf.reward
    async def lowercase(self, trace: vf.Trace) -> float:
        reply = trace.assistant_messages[-1].content or ""
        return sum("a" <= letter <= "z" for letter in reply) / max(len(reply), 1)


class LowercaseTaskset(vf.Taskset[LowercaseTask, LowercaseConfig]):
    def load(self) -> Iterator[LowercaseTask]:
        for number in range(self.config.first, self.config.first + self.config.count):
            slow = self.config.slow_every and number % self.config.slow_every == 0
            sleep_s = self.config.slow_s if slow else 0.0
            data = LowercaseData(name=f"task {number}", prompt=f"say {number}", sleep_s=sleep_s)
            yield LowercaseTask(data, self.config.task)
