import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from aether_common.errors import RunDirectoryError
from aether_common.identity import ModelIdentity
from aether_coordinator.demo_recipe import Recipe, changed_keys, recorded_ports
from aether_coordinator.settings import ServerSettings
from aether_trainer.settings import TrainerSettings
from aether_worker.settings import WorkerSettings

IDENTITY = ModelIdentity(
    repository='a "quoted" name',
    revision="sha256:" + "0" * 64,
    weights="1",
    config="2",
    tokenizer="3",
    chat_template="4",
    vocab_size=49152,
    dtype="float32",
    renderer="default",
)


def recipe(directory: Path, **changes: object) -> Recipe:
    base = Recipe(
        steps=14,
        workers=2,
        seed=5,
        model=str(directory),
        revision=None,
        identity=IDENTITY,
        engine="transformers",
        worker_python=None,
        port=4333,
        websocket_port=4334,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def write(directory: Path, made: Recipe) -> None:
    for name, text in made.files().items():
        (directory / name).write_text(text)


def test_the_files_are_valid_settings(tmp_path: Path) -> None:
    write(tmp_path, recipe(tmp_path))
    server = ServerSettings.load(tmp_path / "server.toml")
    assert (server.run_root, server.steps, server.seed) == (tmp_path, 14, 5)
    assert server.base_model == IDENTITY
    assert (server.batch.groups, server.batch.group_size, server.batch.max_policy_lag) == (8, 8, 1)
    assert server.trainer.config == tmp_path / "trainer.toml"
    train, (sampled, greedy) = server.train[0], server.eval
    assert train.taskset_args == {"split": "train", "seed": 5, "count": 512}
    assert sampled.taskset_args == greedy.taskset_args == {"split": "held_out", "seed": 5, "count": 64}
    assert [source.sampling.temperature for source in (train, sampled, greedy)] == [1.0, 1.0, 0.0]
    assert {source.sampling.max_tokens for source in (train, sampled, greedy)} == {8}
    assert (sampled.episodes_per_task, greedy.episodes_per_task) == (4, 1)

    trainer = TrainerSettings.load(tmp_path / "trainer.toml")
    assert (trainer.lora.rank, trainer.lora.alpha, trainer.optimizer.learning_rate) == (8, 16.0, 4e-4)
    assert (trainer.model.dtype, trainer.lora.serving_dtype, trainer.seed) == ("float32", "float32", 5)

    for number in (1, 2):
        worker = WorkerSettings.load(tmp_path / f"worker-{number}.toml")
        assert (worker.name, worker.run, worker.engine) == (f"worker-{number}", server.run, "transformers")
        assert worker.url == "ws://127.0.0.1:4334"
        assert worker.key_file == tmp_path / "workers" / f"worker-{number}.nk"
        assert worker.max_model_len == server.max_model_len
        assert worker.dtype == server.base_model.dtype


def test_workers_with_vllm_share_the_gpu(tmp_path: Path) -> None:
    made = recipe(
        tmp_path,
        engine="vllm",
        worker_python=tmp_path / "python",
        identity=IDENTITY.model_copy(update={"dtype": "bfloat16"}),
    )
    write(tmp_path, made)
    worker = WorkerSettings.load(tmp_path / "worker-1.toml")
    assert (worker.engine, worker.dtype, worker.vllm.python) == ("vllm", "bfloat16", tmp_path / "python")
    assert worker.vllm.gpu_memory_utilization * made.workers < 0.75
    assert TrainerSettings.load(tmp_path / "trainer.toml").compute.device == "auto"


def test_a_hub_model_is_pinned_everywhere(tmp_path: Path) -> None:
    commit = "ab" * 20
    identity = IDENTITY.model_copy(update={"revision": commit})
    write(tmp_path, recipe(tmp_path, model="some/model", revision=commit, identity=identity))
    assert ServerSettings.load(tmp_path / "server.toml").base_model.revision == commit
    assert TrainerSettings.load(tmp_path / "trainer.toml").model.revision == commit
    assert WorkerSettings.load(tmp_path / "worker-2.toml").revision == commit


def test_the_same_configuration_has_no_changes(tmp_path: Path) -> None:
    assert changed_keys(tmp_path, recipe(tmp_path).files()) == []
    write(tmp_path, recipe(tmp_path))
    (tmp_path / "worker-2.toml").unlink()
    assert changed_keys(tmp_path, recipe(tmp_path).files()) == []


def test_changes_are_named(tmp_path: Path) -> None:
    write(tmp_path, recipe(tmp_path))
    changed = changed_keys(tmp_path, recipe(tmp_path, steps=3, seed=6, workers=1).files())
    assert "server.toml: steps = 14, now 3" in changed
    assert "server.toml: train[0].taskset_args.seed = 5, now 6" in changed
    assert "trainer.toml: seed = 5, now 6" in changed
    assert "worker-2.toml: a worker that is not in this demo" in changed


def test_ports_are_taken_from_the_run_directory(tmp_path: Path) -> None:
    assert recorded_ports(tmp_path / "missing") is None
    (tmp_path / "logs").mkdir()
    assert recorded_ports(tmp_path) is None
    write(tmp_path, recipe(tmp_path))
    assert recorded_ports(tmp_path) == (4333, 4334)


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="choose another --run-root"):
        recorded_ports(tmp_path)
    (tmp_path / "server.toml").write_text('run = "other"\n')
    with pytest.raises(RunDirectoryError, match="choose another --run-root"):
        recorded_ports(tmp_path)


def test_paths_with_quotes_and_accents_survive(tmp_path: Path) -> None:
    strange = recipe(tmp_path, model='/tmp/ä "b" \\ 😀')
    assert tomllib.loads(strange.files()["server.toml"])["model"] == '/tmp/ä "b" \\ 😀'


def test_tls_is_part_of_the_recipe(tmp_path: Path) -> None:
    write(tmp_path, recipe(tmp_path, tls=True))
    assert ServerSettings.load(tmp_path / "server.toml").nats.self_signed == ["localhost"]
    worker = WorkerSettings.load(tmp_path / "worker-2.toml")
    assert worker.url == "wss://localhost:4334"
    assert worker.tls.ca_file == tmp_path / "nats" / "ca.pem"
    assert changed_keys(tmp_path, recipe(tmp_path, tls=True).files()) == []
    changed = changed_keys(tmp_path, recipe(tmp_path, workers=2).files())
    assert "server.toml: nats.self_signed = ['localhost'], now None" in changed
