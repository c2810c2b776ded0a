"""A verifiers taskset of many turns: the environment answers every reply with the same short question."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["TalkEnv", "TalkTaskset"]

TURNS = 21


class TalkTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def talked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TalkEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(TURNS - 1):
                if segment.terminated:
                    break
                segment = await interaction.turn("and then?")


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self) -> Iterator[TalkTask]:
        yield TalkTask(vf.TaskData(name="talk", prompt="say something"), self.config.task)
