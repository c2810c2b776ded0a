"""What may differ when a run is opened again."""

import json

import pytest
from aether_common.errors import ConfigError, RunDirectoryError
from aether_coordinator.ledger import Ledger
from aether_coordinator.opening import open_run
from run_directory import server_settings


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "state")
    yield ledger
    ledger.close()


def test_a_new_run_is_recorded_and_found_again(ledger, tmp_path):
    run = open_run(ledger, server_settings(tmp_path))
    assert (run.run, run.next_group, len(run.uuid)) == ("small", 1, 32)
    assert open_run(ledger, server_settings(tmp_path)) == run


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 9},
        {"retention": {"keep_steps": 5}},
        {"watchdog": {"after_s": 5.0}},
        {"episodes": {"max_concurrent": 3}},
        {"log_level": "DEBUG"},
        {"gateway": {"port": 1234}},
    ],
)
def test_what_may_change_is_recorded(ledger, tmp_path, change):
    run = open_run(ledger, server_settings(tmp_path))
    again = open_run(ledger, server_settings(tmp_path, **change))
    assert again.uuid == run.uuid
    (key,) = change
    assert json.loads(again.settings)[key] != json.loads(run.settings)[key]
    assert open_run(ledger, server_settings(tmp_path, **change)) == again


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 7}, "seed was 0 .* and is 7"),
        ({"batch": {"groups": 2, "group_size": 2, "max_policy_lag": 3}}, "batch.max_policy_lag was 0 .* and is 3"),
        ({"max_model_len": 512}, "max_model_len was 256 .* and is 512"),
        (
            {"train": [{"name": "train", "taskset": "other", "sampling": {"max_tokens": 8}}]},
            r"train.0.taskset was 'aether_lowercase' .* and is 'other'",
        ),
    ],
)
def test_what_must_not_change_is_refused_by_name(ledger, tmp_path, change, says):
    run = open_run(ledger, server_settings(tmp_path))
    with pytest.raises(ConfigError, match=says):
        open_run(ledger, server_settings(tmp_path, **change))
    assert open_run(ledger, server_settings(tmp_path)) == run


def test_the_state_of_another_run_is_refused(ledger, tmp_path):
    open_run(ledger, server_settings(tmp_path))
    with pytest.raises(RunDirectoryError, match="belongs to run 'small', not 'other'"):
        open_run(ledger, server_settings(tmp_path, run="other"))
