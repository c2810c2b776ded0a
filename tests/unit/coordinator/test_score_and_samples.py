"""Advantages by hand, and samples of a trace with two turns and a branch."""

import verifiers.v1 as vf
from aether_common.arrays import unpack_floats, unpack_tokens
from aether_coordinator.records import EpisodeRecord, GroupRecord
from aether_coordinator.samples import decode_episode, encode_episode, episode_samples, sampled_tokens
from aether_coordinator.score import is_uniform, mean_centred
from verifiers.v1.episode import EnvInfo
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask


def test_advantages_are_centred_and_not_scaled():
    assert mean_centred([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert mean_centred([3.0, 0.0, 0.0]) == [2.0, -1.0, -1.0]
    assert is_uniform([0.3, 0.3]) and not is_uniform([0.3, 0.0])


def node(parent: int | None, tokens: list[int], sampled: int, role: str = "user") -> MessageNode:
    """A message whose last `sampled` tokens were sampled, with logprob -token/100."""
    message = vf.AssistantMessage(content="x") if role == "assistant" else vf.UserMessage(content="x")
    mask = [False] * (len(tokens) - sampled) + [True] * sampled
    logprobs = [-token / 100 for token, on in zip(tokens, mask, strict=True) if on]
    return MessageNode(
        parent=parent, message=message, sampled=sampled > 0, token_ids=tokens, mask=mask, logprobs=logprobs
    )


def episode(nodes: list[MessageNode]) -> vf.Episode:
    data = vf.TaskData(prompt="x")
    task = TraceTask(type="Task", data=data, key="k", hash="h")
    agent = AgentInfo(config=vf.AgentConfig())
    trace = vf.Trace(task=task, agent=agent, nodes=nodes)
    return vf.Episode(env=EnvInfo(id="e"), task=task, traces=[trace])


GROUP = GroupRecord(id=1, kind="train", source="s", task=0, version=4, size=2)
RECORD = EpisodeRecord(group=1, index=0, state="done", reward=1.0)


def test_each_sampled_token_is_in_one_sample():
    # 0 user [1 2] → 1 assistant [3 | 4 5] → 2 user [6] → 3 assistant [7 | 8]
    #                                      → 4 user [9] → 5 assistant [10 | 11]
    nodes = [
        node(None, [1, 2], 0),
        node(0, [3, 4, 5], 2, "assistant"),
        node(1, [6], 0),
        node(2, [7, 8], 1, "assistant"),
        node(1, [9], 0),
        node(4, [10, 11], 1, "assistant"),
    ]
    recorded = decode_episode(encode_episode(episode(nodes)))
    assert sampled_tokens(recorded) == 4
    first, second = episode_samples(recorded, RECORD, GROUP, advantage=0.5, temperature=1.0)
    assert unpack_tokens(first.tokens) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(first.sampled) == [0, 0, 0, 1, 1, 0, 0, 1]
    assert [round(value, 6) for value in unpack_floats(first.logprobs)] == [0, 0, 0, -0.04, -0.05, 0, 0, -0.08]
    assert unpack_floats(first.advantages) == [0, 0, 0, 0.5, 0.5, 0, 0, 0.5]
    assert unpack_tokens(second.tokens) == [1, 2, 3, 4, 5, 9, 10, 11]
    assert list(second.sampled) == [0, 0, 0, 0, 0, 0, 0, 1]
    assert (second.version, second.group, second.episode) == (4, 1, "g00000001-e000")


def test_logprobs_survive_the_recording_exactly():
    value = -0.12345678901234567
    nodes = [node(None, [1], 0), node(0, [2], 1, "assistant")]
    nodes[1].logprobs = [value]
    assert decode_episode(encode_episode(episode(nodes))).traces[0].nodes[1].logprobs == [value]
