import asyncio
from typing import Any

import pytest
import verifiers.v1 as vf
from aether_last_word import LastWordConfig, LastWordTask, LastWordTaskset
from aether_last_word.words import HELD_OUT_WORDS, TRAIN_WORDS
from pydantic import ValidationError
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config


def tasks(split: str, seed: int = 0, count: int = 512) -> list[LastWordTask]:
    config = resolve_env_config(
        {
            "taskset": {"id": "aether_last_word", "split": split, "seed": seed, "count": count},
            "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
        }
    )
    taskset = load_taskset(config.taskset)
    assert isinstance(taskset, LastWordTaskset)
    return list(taskset)


def messages(task: LastWordTask) -> list[tuple[str, str]]:
    assert isinstance(task.data.prompt, list)
    return [(message.role, str(message.content)) for message in task.data.prompt]


def test_verifiers_loads_the_prompt_that_is_known_to_learn() -> None:
    task = tasks("train", count=3)[0]
    question = task.data.name or ""
    assert task.data.system_prompt == "Be brief."
    assert messages(task) == [
        ("user", "last: red dog moon hat"),
        ("assistant", "hat"),
        ("user", "last: box sun pen cup"),
        ("assistant", "cup"),
        ("user", f"last: {question}"),
    ]
    assert len(question.split()) == 4
    assert task.data.answer == question.split()[-1]


def test_no_held_out_word_is_ever_trained_on() -> None:
    assert (len(TRAIN_WORDS), len(HELD_OUT_WORDS), len({*TRAIN_WORDS, *HELD_OUT_WORDS})) == (32, 11, 43)
    trained = {
        word
        for seed in range(3)
        for task in tasks("train", seed)
        for _, text in messages(task)
        for word in text.split()
    }
    asked = {word for seed in range(3) for task in tasks("held_out", seed) for word in messages(task)[-1][1].split()}
    assert trained == {"last:", *TRAIN_WORDS}
    assert asked == {"last:", *HELD_OUT_WORDS}


def test_tasks_depend_on_seed_and_split_alone_and_never_repeat() -> None:
    assert [task.data for task in tasks("train")] == [task.data for task in tasks("train")]
    assert [task.data.name for task in tasks("train", 1)] != [task.data.name for task in tasks("train", 2)]
    assert [task.data for task in tasks("train", count=7)] == [task.data for task in tasks("train", count=9)][:7]
    names = [task.data.name for task in tasks("held_out", count=4096)]
    assert len(set(names)) == 4096
    assert [task.data.idx for task in tasks("held_out", count=4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("reply", "finish", "reward"),
    [
        ("ANSWER", "stop", 1.0),
        ("ANSWER", "length", 0.0),
        (" ANSWER", "stop", 0.0),
        ("ANSWER.", "stop", 0.0),
        ("Answer: ANSWER", "stop", 0.0),
        ("hat", "stop", 0.0),
        ("", "stop", 0.0),
        (None, "stop", 0.0),
    ],
)
def test_only_the_exact_and_finished_reply_is_rewarded(reply: str | None, finish: Any, reward: float) -> None:
    task = tasks("held_out", count=1)[0]
    content = reply.replace("ANSWER", task.data.answer) if reply is not None else None
    trace = trace_of(task)
    trace.nodes.append(vf.MessageNode(message=vf.AssistantMessage(content=content), sampled=True))
    trace.calls.append(vf.ModelCall(node=0, finish_reason=finish))
    asyncio.run(task.score(trace))
    assert trace.reward == reward
    assert set(trace.rewards) == {"exact"}


def test_an_example_turn_is_no_reply() -> None:
    task = tasks("train", count=1)[0]
    trace = trace_of(task)
    trace.nodes.append(vf.MessageNode(message=vf.AssistantMessage(content=task.data.answer)))
    asyncio.run(task.score(trace))
    assert trace.reward == 0.0


def test_a_complete_reply_at_the_turn_limit_counts() -> None:
    task = tasks("train", count=1)[0]
    trace = trace_of(task)
    trace.nodes.append(vf.MessageNode(message=vf.AssistantMessage(content=task.data.answer), sampled=True))
    trace.calls.append(vf.ModelCall(node=0, finish_reason="stop"))
    trace.stop("max_turns")
    asyncio.run(task.score(trace))
    assert trace.reward == 1.0


@pytest.mark.parametrize("wrong", [{"split": "test"}, {"count": 0}, {"count": 8000}, {"words": 4}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LastWordConfig(**{"id": "aether_last_word", **wrong})


def trace_of(task: LastWordTask) -> Any:
    return vf.Trace(
        task=vf.TraceTask(type="LastWordTask", data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})),
    )
