"""What verifiers' finished episodes are taken for: data, infrastructure, or a failure of the task."""

import pytest
import verifiers.v1 as vf
from aether_chat.harness import CONTEXT_EXHAUSTED
from aether_coordinator.gateway import OpenEpisode
from aether_coordinator.journal import Claims
from aether_coordinator.records import EpisodeRecord, GroupRecord
from aether_coordinator.rollout import _judge
from aether_coordinator.samples import decode_episode
from aether_coordinator.settings import TrainSource
from run_directory import episode_of, node
from verifiers.v1.trace import Error

SOURCE = TrainSource.model_validate({"name": "s", "taskset": "t"})


def opened(**changes: object) -> OpenEpisode:
    group = GroupRecord(id=1, kind="train", source="s", task=0, version=0, size=2)
    record = EpisodeRecord(group=1, index=0)
    episode = OpenEpisode(record=record, group=group, adapter="a", source=SOURCE, claims=Claims(record.id, 0))
    for name, value in changes.items():
        setattr(episode, name, value)
    return episode


def finished(reward: float = 1.0, **trace: object) -> vf.Episode:
    """An episode of one turn that ended well, unless `trace` says otherwise."""
    episode = episode_of([node(None, [5, 6], 0), node(0, [7, 2], 2)], **trace)
    episode.ok = episode.traces[0].ok = "errors" not in trace
    episode.traces[0].record_reward("r", reward, 1.0)
    return episode


def failed(kind: str, message: str = "why") -> vf.Episode:
    return finished(errors=[Error(type=kind, message=message)], stop_condition="error")


def test_a_finished_episode():
    outcome = _judge(finished(0.5), opened())
    assert (outcome.kind, outcome.reward, outcome.tokens, outcome.truncated) == ("done", 0.5, 2, False)
    assert decode_episode(outcome.trace).traces[0].reward == 0.5


@pytest.mark.parametrize("limit", [{"stop_condition": "max_turns"}, {"stop_condition": "max_total_tokens"}])
def test_what_the_policy_used_up_is_truncated_and_scored(limit):
    outcome = _judge(finished(1.0, **limit), opened())
    assert (outcome.kind, outcome.truncated, outcome.reward) == ("done", True, 1.0)


def test_used_up_context_and_stage_deadlines_are_truncations():
    for change in ({"stop_condition": CONTEXT_EXHAUSTED}, {"is_timeout": True}):
        assert _judge(finished(1.0, **change), opened()).truncated


@pytest.mark.parametrize(
    "kind", ["ProviderError", "SandboxError", "InterceptionError", "TunnelError", "ToolsetError", "HarnessError"]
)
def test_infrastructure_is_tried_again(kind):
    outcome = _judge(failed(kind), opened())
    assert (outcome.kind, outcome.error, outcome.trace) == ("infrastructure", f"{kind}: why", b"")


def test_what_the_gateway_noted_is_the_reason():
    outcome = _judge(failed("TaskError"), opened(failure="three workers lost"))
    assert (outcome.kind, outcome.error) == ("infrastructure", "three workers lost")


@pytest.mark.parametrize(
    "episode", [failed("TaskError"), failed("ValueError"), failed("ProviderError", f"{CONTEXT_EXHAUSTED}: too long")]
)
def test_the_tasks_own_failure_is_data(episode):
    outcome = _judge(episode, opened())
    assert outcome.kind == "failed" and outcome.error


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_fails_the_episode(reward):
    outcome = _judge(finished(reward), opened())
    assert (outcome.kind, outcome.error) == ("failed", f"the reward is {reward}")


def test_an_episode_without_sampled_tokens_is_no_sample():
    episode = episode_of([node(None, [5], 0)])
    episode.ok = episode.traces[0].ok = True
    assert _judge(episode, opened()).error == "the episode has no sampled token"
