"""Sources: configured verifiers tasksets, and the deterministic order in which tasks are drawn.

Train sources share the groups by weight (the one that is furthest behind its share is next); each
draws its tasks in a seeded order, another one in every epoch.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from aether_common.errors import ConfigError, TasksetError
from verifiers.v1 import Env, Task

from aether_coordinator.settings import SourceSettings, TrainSource

CHAT_HARNESS = "aether_chat"


class Source:
    """A loaded taskset with its environment."""

    def __init__(self, settings: SourceSettings, env: Env[Any], tasks: list[Task]) -> None:
        self.settings = settings
        self.env = env
        self.tasks = tasks


def load_source(settings: SourceSettings) -> Source:
    """Import the taskset and its environment. Raises `TasksetError` that names source and cause."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    harness = {"id": CHAT_HARNESS if settings.harness == "chat" else settings.harness, **settings.harness_args}
    config = {
        "taskset": {"id": settings.taskset, **settings.taskset_args},
        "agent": {"harness": harness, "runtime": settings.runtime, "max_turns": settings.max_turns},
    }
    try:
        env = load_environment(resolve_env_config(config))
        view = env.taskset if settings.limit is None else env.taskset.take(settings.limit)
        if not view.bounded:
            raise ConfigError(f"source {settings.name!r}: taskset {settings.taskset!r} is infinite: set limit")
        tasks = list(view)
    except ConfigError:
        raise
    except Exception as error:
        raise TasksetError(
            f"source {settings.name!r}: taskset {settings.taskset!r} cannot be loaded: "
            f"{type(error).__name__}: {error}: check the id and taskset_args, "
            "and that its package is installed in the coordinator's environment"
        ) from error
    if not tasks:
        raise TasksetError(f"source {settings.name!r}: taskset {settings.taskset!r} has no tasks")
    return Source(settings, env, tasks)


async def serve(sources: Sequence[Source], stack: AsyncExitStack) -> None:
    """Start what the environments share (interception servers, tool servers) until the stack closes."""
    for source in sources:
        try:
            await stack.enter_async_context(source.env.serving())
        except Exception as error:
            raise TasksetError(
                f"source {source.settings.name!r}: its environment does not start: {type(error).__name__}: {error}"
            ) from error


def next_source(sources: Sequence[TrainSource], drawn: Mapping[str, int]) -> TrainSource:
    """The source that is furthest behind its share; the earlier configured one on a tie."""
    return min(sources, key=lambda source: drawn.get(source.name, 0) / source.weight)


def task_at(position: int, count: int, *, seed: int, name: str, shuffle: bool) -> int:
    """Index of the task that a source of `count` tasks draws at `position` (0, 1, …)."""
    epoch, offset = divmod(position, count)
    if not shuffle:
        return offset
    order = list(range(count))
    random.Random(f"{seed}/{name}/{epoch}").shuffle(order)
    return order[offset]
