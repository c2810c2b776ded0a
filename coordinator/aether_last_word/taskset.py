"""Tasks, prompt and reward of the last-word taskset.

Invariants: a task is a function of (split, seed, index) alone; no held-out word occurs in a training
list or in an example turn.
"""

import random
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from aether_last_word.words import HELD_OUT_WORDS, TRAIN_WORDS

WORDS_PER_LIST = 4
SYSTEM_PROMPT = "Be brief."
EXAMPLES = (("red", "dog", "moon", "hat"), ("box", "sun", "pen", "cup"))
"""Two answered turns; without them a model this small babbles and no rollout earns a reward."""


def question(words: tuple[str, ...]) -> str:
    return f"last: {' '.join(words)}"


def conversation(words: tuple[str, ...]) -> vf.Messages:
    """The example turns, then the question about `words`."""
    messages: vf.Messages = []
    for example in EXAMPLES:
        messages += [vf.UserMessage(content=question(example)), vf.AssistantMessage(content=example[-1])]
    return [*messages, vf.UserMessage(content=question(words))]


def word_lists(split: Literal["train", "held_out"], seed: int) -> Iterator[tuple[str, ...]]:
    """Endless distinct words per list, lists drawn independently; the split is part of the seed."""
    words = TRAIN_WORDS if split == "train" else HELD_OUT_WORDS
    draw = random.Random(f"last-word/{split}/{seed}")
    while True:
        yield tuple(draw.sample(words, WORDS_PER_LIST))


class LastWordConfig(vf.TasksetConfig):
    """Which tasks are made."""

    split: Literal["train", "held_out"] = "train"
    """`train`, or `held_out`: lists of words that occur nowhere else."""
    seed: int = 0
    count: int = Field(512, ge=1, le=4096)
    """Number of tasks; no two have the same list."""


class LastWordData(vf.TaskData):
    answer: str
    """The whole of a right reply."""


class LastWordTask(vf.Task[LastWordData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        """1 if the reply is the answer and nothing else, ended by the model itself; else 0."""
        replies = trace.assistant_messages
        # `is_truncated` also holds at a turn limit, which a complete reply to the only turn may reach.
        stopped = bool(trace.calls) and trace.calls[-1].finish_reason == "stop"
        return float(stopped and bool(replies) and replies[-1].content == self.data.answer)


class LastWordTaskset(vf.Taskset[LastWordTask, LastWordConfig]):
    def load(self) -> Iterator[LastWordTask]:
        seen: set[tuple[str, ...]] = set()
        for words in word_lists(self.config.split, self.config.seed):
            if len(seen) == self.config.count:
                return
            if words in seen:
                continue
            seen.add(words)
            yield LastWordTask(
                LastWordData(  # pyright: ignore[reportCallIssue]  # its default is hidden in a positional Field
                    name=" ".join(words),
                    prompt=conversation(words),
                    system_prompt=SYSTEM_PROMPT,
                    answer=words[-1],
                ),
                self.config.task,
            )
