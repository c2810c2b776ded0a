"""Transitions of the records: the allowed ones, and errors that name the record."""

import pytest
from aether_coordinator.records import EpisodeRecord, GroupRecord, StateError, TurnRecord, episode_id


def group(**changes: object) -> GroupRecord:
    return GroupRecord(id=7, kind="train", source="s", task=3, version=1, size=4).with_(**changes)


def test_a_train_group_goes_from_open_over_ready_to_batched():
    batched = group().scored().batched(step=5)
    assert (batched.state, batched.step) == ("batched", 5)


def test_an_evaluation_group_is_done_when_scored():
    assert group(kind="eval").scored().state == "done"


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda: group().batched(1),
        lambda: group().scored().scored(),
        lambda: group().scored().batched(1).batched(2),
        lambda: group().scored().batched(1).dropped("late"),
    ],
)
def test_impossible_transitions_name_the_group(forbidden):
    with pytest.raises(StateError, match="group 7"):
        forbidden()


def test_an_episode_is_accepted_once():
    episode = EpisodeRecord(group=1, index=2)
    accepted = episode.accepted(0.5, 10, False, "abc")
    assert (accepted.state, accepted.reward, accepted.tokens) == ("done", 0.5, 10)
    for again in (
        lambda: accepted.accepted(1.0, 1, False, "x"),
        lambda: accepted.again("x"),
        lambda: accepted.failed("x"),
    ):
        with pytest.raises(StateError, match="g00000001-e002"):
            again()


def test_a_failed_attempt_counts():
    assert EpisodeRecord(group=1, index=0).again("lost").again("lost").attempt == 2


def test_records_survive_their_encoding():
    record = TurnRecord(
        job="j",
        worker="w",
        dispatch=1,
        reply="r",
        version=2,
        adapter="a",
        tokens=b"1234",
        logprobs=b"1234",
        finish_reason="stop",
    )
    assert TurnRecord.decode(record.encode()) == record
    assert episode_id(12, 3) == "g00000012-e003"
