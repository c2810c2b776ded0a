"""Checkpoints: policy 0, the chain, exact resumption, adapters that plain peft loads, refusals."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from aether_common.batch import Batch, batch_path
from aether_common.checkpoint import checkpoint_path, complete_steps, read_manifest, verify_adapter
from aether_common.digests import list_files, sha256_file
from aether_common.errors import ConfigError, IdentityError, RunDirectoryError
from aether_common.identity import compute_identity
from aether_common.pipe import CheckpointWritten, Progress, Ready
from aether_trainer.checkpoint import load_checkpoint, new_optimizer
from aether_trainer.metrics import metrics_path
from aether_trainer.policy import load_policy
from aether_trainer.settings import TrainerSettings
from aether_trainer.train import train
from safetensors.torch import load_file
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

MakeSettings = Callable[..., TrainerSettings]
WriteBatch = Callable[..., Batch]


def files_of(run_root: Path, step: int) -> list[tuple[str, str]]:
    """Name and digest of everything in a checkpoint that must not depend on the clock."""
    files = list_files(checkpoint_path(run_root, step))
    return [(file.name, file.sha256) for file in files if file.name != "state.json"]


@pytest.fixture
def trained(tmp_path: Path, make_settings: MakeSettings, write_batch: WriteBatch, link: Any) -> Path:
    """A run directory with batches 1–4 and their checkpoints, trained without interruption."""
    for step in range(1, 5):
        write_batch(tmp_path / "run", step)
    train(make_settings(), tmp_path / "run", "demo", "", link())
    return tmp_path / "run"


def test_chain_and_exact_resumption(
    trained: Path, tmp_path: Path, make_settings: MakeSettings, write_batch: WriteBatch, link: Any
):
    assert complete_steps(trained) == [0, 1, 2, 3, 4]
    adapters: set[str] = set()
    for step in range(5):
        manifest = verify_adapter(trained, step)
        adapters.add(manifest.adapter)
        assert manifest.batch == (sha256_file(batch_path(trained, step)) if step else None)
        assert manifest.parent == (read_manifest(trained, step - 1)[1] if step else None)
    assert len(adapters) == 5

    again = tmp_path / "again"
    for steps in ((1, 2), (3, 4)):
        for step in steps:
            write_batch(again, step)
        train(make_settings(), again, "demo", "", coordinator := link())
        assert isinstance(coordinator.news[0], Ready) and coordinator.news[0].step == steps[0] - 1
    for step in range(5):
        assert files_of(again, step) == files_of(trained, step)


def test_policy_0_is_the_base_model_and_the_last_loads_in_plain_peft(trained: Path, tiny: Path):
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokens = torch.tensor([[5, 9, 77, 120, 33]])
    plain = base(input_ids=tokens).logits
    logits: list[torch.Tensor] = []
    for step in (0, 4):
        directory = checkpoint_path(trained, step) / "adapter"
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), directory)
        logits.append(model(input_ids=tokens).logits)
    assert torch.equal(logits[0], plain)
    assert (logits[1] - plain).abs().max() > 1e-2

    directory = checkpoint_path(trained, 4) / "adapter"
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny)
    assert config["inference_mode"] is True and config["target_modules"] == sorted(config["target_modules"])


def test_the_adapter_computes_what_the_trainer_computes(trained: Path, tiny: Path, make_settings: MakeSettings):
    settings = make_settings()
    policy = load_policy(settings, torch.device("cpu"))
    identity = compute_identity(str(tiny), None, "float32")
    state = load_checkpoint(trained, "demo", 4, policy, new_optimizer(policy, settings), settings, identity)
    assert state.updates == 4 and state.metrics["learning_rate"] == 1e-2
    tokens = torch.tensor([[5, 9, 77, 120, 33]])
    directory = checkpoint_path(trained, 4) / "adapter"
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), directory)
    assert torch.equal(loaded(input_ids=tokens).logits, policy.model(input_ids=tokens).logits)


def test_serving_dtype_and_initial_adapter(
    trained: Path, tmp_path: Path, tiny: Path, make_settings: MakeSettings, link: Any
):
    start = checkpoint_path(trained, 4) / "adapter"
    lora = make_settings().lora.model_dump() | {"initial_adapter": start}
    train(make_settings(lora=lora | {"serving_dtype": "bfloat16"}), tmp_path / "served", "demo", "", link())
    served = checkpoint_path(tmp_path / "served", 0)
    tensors = load_file(served / "adapter" / "adapter_model.safetensors")
    masters = load_file(served / "state.safetensors")
    for name, tensor in load_file(start / "adapter_model.safetensors").items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(masters[f"weight.{name}"], tensor)
        assert torch.equal(tensors[name], tensor.to(torch.bfloat16))

    with pytest.raises(ConfigError, match=r"initial_adapter.*its r is 8, here it is 4"):
        load_policy(make_settings(lora=lora | {"rank": 4}), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"initial_adapter.*lm_head\.lora_A.*expected nothing"):
        load_policy(make_settings(lora=lora | {"target_modules": "all-linear"}), torch.device("cpu"))


def test_all_linear_is_written_out(make_settings: MakeSettings):
    policy = load_policy(make_settings(lora={}), torch.device("cpu"))
    assert policy.target_modules == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert len(policy.weights) == 2 * 2 * 7 and not any("lm_head" in name for name in policy.weights)
    assert all(weight.dtype == torch.float32 for weight in policy.weights.values())
    with pytest.raises(ConfigError, match=r"no linear layer 'q_porj': it has down_proj, "):
        load_policy(make_settings(lora={"target_modules": ["q_porj"]}), torch.device("cpu"))


def test_bfloat16_base_trains_in_float32(
    tiny: Path, tmp_path: Path, make_settings: MakeSettings, write_batch: Any, link: Any
):
    write_batch(tmp_path, 1)
    settings = make_settings(model={"path": str(tiny)}, lora={"target_modules": ["q_proj", "v_proj"]})
    train(settings, tmp_path, "demo", "", link())
    assert all(t.dtype == torch.float32 for t in load_file(checkpoint_path(tmp_path, 1) / "state.safetensors").values())
    assert read_manifest(tmp_path, 1)[0].adapter != read_manifest(tmp_path, 0)[0].adapter


def test_metrics_and_what_the_coordinator_hears(trained: Path, make_settings: MakeSettings, link: Any):
    lines = [json.loads(line) for line in metrics_path(trained).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for key in ("loss", "reward", "entropy", "kl", "clip_fraction", "grad_norm", "learning_rate", "tokens", "skipped"):
        assert all(isinstance(line[key], float) for line in lines), key
    assert lines[0]["tokens_sampled"] == 3 * (6 + 7 + 8 + 9) and lines[0]["reward"] == 0.25
    assert {"seconds_forward", "seconds_backward", "seconds_checkpoint"} <= lines[0].keys()

    # A crash between checkpoint and line, and in the middle of a line.
    text = metrics_path(trained).read_text()
    metrics_path(trained).write_text(text[: text.rindex('"loss"')])
    (checkpoint_path(trained, 4).parent / ".tmp-step_000005.1").mkdir()
    train(make_settings(), trained, "demo", "", coordinator := link())
    repaired = [json.loads(line) for line in metrics_path(trained).read_text().splitlines()]
    assert [line["step"] for line in repaired] == [1, 2, 3, 4] and repaired[3]["loss"] == lines[3]["loss"]
    assert [type(news) for news in coordinator.news] == [Ready]


def test_progress_then_checkpoint(tmp_path: Path, make_settings: MakeSettings, write_batch: WriteBatch, link: Any):
    write_batch(tmp_path, 1)
    train(make_settings(), tmp_path, "demo", "", coordinator := link())
    assert [type(news) for news in coordinator.news] == [Ready, Progress, Progress, CheckpointWritten]
    assert coordinator.news[2].share == 1.0 and coordinator.news[3].metrics["tokens"] > 0


def test_refuses_what_does_not_belong_to_the_run(trained: Path, tmp_path: Path, make_settings: MakeSettings, link: Any):
    def refused(error: type[Exception], match: str, run: str = "demo", **tables: Any) -> None:
        with pytest.raises(error, match=match):
            train(make_settings(**tables), trained, run, "", link())

    refused(RunDirectoryError, "belongs to run 'demo', not 'other'", run="other")
    lora = make_settings().lora.model_dump()
    refused(ConfigError, r"lora\.rank = 4: the run began with 8", lora=lora | {"rank": 4})
    refused(ConfigError, r"lora\.serving_dtype = 'bfloat16'", lora=lora | {"serving_dtype": "bfloat16"})
    other = make_tiny_model(tmp_path / "other", seed=1)
    refused(IdentityError, "weights: the run has", model={"path": str(other), "dtype": "float32"})
    state = checkpoint_path(trained, 4) / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    refused(RunDirectoryError, r"state\.safetensors is damaged: remove .*step_000004")
    shutil.rmtree(checkpoint_path(trained, 4))
    train(make_settings(), trained, "demo", "", link())
    assert complete_steps(trained) == [0, 1, 2, 3, 4]


def test_full_disk(tmp_path: Path, make_settings: MakeSettings, link: Any, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunDirectoryError, match="the disk is full: free space and start again"):
        train(make_settings(), tmp_path, "demo", "", link())
    assert not list((tmp_path / "checkpoints").iterdir())
