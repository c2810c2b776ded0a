"""A verifiers taskset that the tiny model learns in a dozen steps: reward is the share of lower-case letters."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LowercaseTaskset"]


class LowercaseConfig(vf.TasksetConfig):
    count: int = 16
    first: int = 0
    turns: int = 1


class LowercaseTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def lowercase(self, trace: vf.Trace) -> float:
        reply = trace.assistant_messages[-1].content or ""
        return sum("a" <= letter <= "z" for letter in reply) / max(len(reply), 1)


class LowercaseTaskset(vf.Taskset[LowercaseTask, LowercaseConfig]):
    def load(self) -> Iterator[LowercaseTask]:
        for number in range(self.config.first, self.config.first + self.config.count):
            data = vf.TaskData(name=f"task {number}", prompt=f"say {number}")
            yield LowercaseTask(data, self.config.task)
