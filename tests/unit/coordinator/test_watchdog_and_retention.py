"""What a stalled run waits for, and which steps are kept."""

from dataclasses import replace

import pytest
from aether_coordinator.retention import first_kept
from aether_coordinator.status import WorkerStatus
from aether_coordinator.watchdog import View, waits_for

IDLE = View(
    bus_connected=True,
    ledger_failing=False,
    paused=False,
    trainer_ready=True,
    trainer_busy=False,
    turns_waiting=0,
    turns_running=0,
    episodes_running=0,
    groups_open=0,
    scoring=0,
    workers=[WorkerStatus(name="w1", state="connected")],
)
LOST = WorkerStatus(name="w1", state="lost")
OTHER_MODEL = WorkerStatus(name="w2", state="incompatible", reason="it serves another model")
QUARANTINED = WorkerStatus(name="w3", state="quarantined", reason="8 failures")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ledger_failing": True}, "disk: "),
        ({"bus_connected": False}, "nats-server: not reachable"),
        ({"paused": True}, "you: the run is paused"),
        ({"trainer_busy": True}, "trainer: the next batch is there"),
        ({"trainer_busy": True, "trainer_ready": False}, "trainer: it is not ready"),
        ({"turns_waiting": 3, "workers": []}, "worker: no compatible worker is connected (none ever registered)"),
        (
            {"turns_running": 3, "workers": [LOST, OTHER_MODEL]},
            "worker: no compatible worker is connected (w1 is lost; w2 is incompatible: it serves another model",
        ),
        (
            {"workers": [QUARANTINED]},
            "you: worker w3 is quarantined (8 failures); repair it, then `aether-coordinator worker release w3`",
        ),
        ({"turns_waiting": 3, "turns_running": 8}, "slot: 3 turns wait"),
        ({"turns_running": 8, "episodes_running": 8}, "worker: 8 turns are being generated"),
        ({"episodes_running": 5}, "environment: 5 episodes run without asking"),
        ({"scoring": 2}, "scoring: 2 groups"),
        ({}, "nothing that is known"),
    ],
)
def test_the_cause_is_named(change, expected):
    (found,) = waits_for(replace(IDLE, **change))
    assert found.startswith(expected)


def test_the_cause_nearest_to_the_root_comes_first():
    view = replace(IDLE, bus_connected=False, ledger_failing=True, turns_waiting=1, workers=[LOST], scoring=1)
    assert [cause.split(":")[0] for cause in waits_for(view)] == ["disk", "nats-server", "worker", "scoring"]


@pytest.mark.parametrize(
    ("newest", "keep", "in_use", "first"),
    [
        (10, None, {9, 10}, 0),
        (10, 3, {9, 10}, 7),  # steps 8, 9, 10 and the checkpoint that step 8 is trained from
        (10, 3, {2, 10}, 2),
        (2, 3, {1, 2}, 0),
        (-1, 3, set(), 0),
    ],
)
def test_the_first_kept_step(newest, keep, in_use, first):
    assert first_kept(newest, keep, in_use) == first
