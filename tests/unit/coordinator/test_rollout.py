"""What becomes of an attempt whose task does what no task should."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aether_coordinator.rollout import client_config, run_attempt
from aether_coordinator.settings import SamplingSettings


def episode_with(reward: object) -> Any:
    trace = SimpleNamespace(
        ok=True, errors=[], agent=SimpleNamespace(trainable=True), reward=reward, nodes=[],
        is_truncated=False, is_timeout=False, stop_condition=None,
    )  # fmt: skip
    return SimpleNamespace(ok=True, errors=[], traces=[trace], model_dump=lambda mode: {"info": object()})


@pytest.mark.parametrize(
    ("ended", "error"),
    [
        (RuntimeError("broken"), "RuntimeError: broken"),
        (episode_with(float("nan")), "the reward is nan"),
        (episode_with(1.0), "TypeError: can not serialize 'object' object"),
    ],
)
async def test_a_task_failure_is_data(ended: Any, error: str):
    async def run_slot(slot: object, context: object) -> Any:
        await asyncio.sleep(0)
        if isinstance(ended, Exception):
            raise ended
        return ended

    source: Any = SimpleNamespace(
        settings=SimpleNamespace(sampling=SamplingSettings()),
        env=SimpleNamespace(run_slot=run_slot, slots=lambda task: [task]),
        tasks=["task"],
    )
    episode: Any = SimpleNamespace(
        model="m",
        group=SimpleNamespace(task=0, kind="eval"),
        record=SimpleNamespace(id="e"),
        failure="",
        waited=lambda: 0.0,
    )
    gateway: Any = SimpleNamespace(port=1, open=lambda _: None, close=lambda _: None)
    client = client_config(gateway, "model", {"name": "default"})
    outcome = await run_attempt(episode, source, gateway, client, 5.0)
    assert (outcome.kind, outcome.error) == ("failed", error)
