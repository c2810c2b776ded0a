"""From verifiers' traces to training samples: each sampled token is in one sample only.

A trace is a graph of messages; its branches share their prefix. The first branch that contains a
node trains its tokens, in later branches they are context.
"""

from typing import Any

import msgpack
from aether_common.arrays import pack_floats, pack_tokens
from aether_common.batch import Sample
from aether_common.errors import AetherError
from aether_common.wire import pack
from verifiers.v1 import WireEpisode

from aether_coordinator.records import EpisodeRecord, GroupRecord


class TraceError(AetherError):
    """A recorded trace cannot be turned into samples."""


def encode_episode(episode: Any) -> bytes:
    """verifiers' episode as msgpack; its JSON form would round logprobs to four decimals."""
    return pack(episode.model_dump(mode="python"))


def decode_episode(data: bytes) -> WireEpisode:
    """Raises `TraceError` for anything that is no recorded episode."""
    try:
        return WireEpisode.model_validate(msgpack.unpackb(data))
    except ValueError as error:
        raise TraceError(f"a recorded trace cannot be read: {str(error)[:500]}") from error


def trainable_traces(episode: Any) -> list[Any]:
    return [trace for trace in episode.traces if trace.agent.trainable]


def episode_reward(episode: Any) -> float:
    """Mean reward of the trainable agents."""
    traces = trainable_traces(episode)
    return sum(trace.reward for trace in traces) / len(traces) if traces else 0.0


def sampled_tokens(episode: Any) -> int:
    return sum(sum(node.mask) for trace in trainable_traces(episode) for node in trace.nodes)


def episode_samples(
    episode: Any, record: EpisodeRecord, group: GroupRecord, advantage: float, temperature: float
) -> list[Sample]:
    """One sample per branch that holds sampled tokens which no earlier branch trained.

    Raises `TraceError` when tokens, mask and logprobs of a branch differ in length.
    """
    samples: list[Sample] = []
    for trace in trainable_traces(episode):
        trained: set[int] = set()
        for branch in trace.branches:
            if not branch.trainable:
                continue
            tokens: list[int] = []
            sampled = bytearray()
            logprobs: list[float] = []
            for node in branch.nodes:
                if len(node.mask) != len(node.token_ids) or len(node.logprobs) != sum(node.mask):
                    raise TraceError(f"episode {record.id}: tokens, mask and logprobs of a message differ in length")
                fresh = id(node) not in trained
                trained.add(id(node))
                values = iter(node.logprobs)
                tokens += node.token_ids
                sampled += bytes(fresh and on for on in node.mask)
                logprobs += [next(values) if fresh and on else 0.0 for on in node.mask]
            if not any(sampled):
                continue
            samples.append(
                Sample(
                    source=group.source,
                    group=group.id,
                    episode=record.id,
                    version=group.version,
                    reward=record.reward,
                    temperature=temperature,
                    tokens=pack_tokens(tokens),
                    sampled=bytes(sampled),
                    logprobs=pack_floats(logprobs),
                    advantages=pack_floats([advantage if on else 0.0 for on in sampled]),
                )
            )
    return samples
