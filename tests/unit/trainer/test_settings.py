"""Settings: the documented recipe by default, and refusals that say what to do."""

from pathlib import Path

import pytest
from aether_common.errors import ConfigError
from aether_trainer.settings import TrainerSettings


def load(tmp_path: Path, text: str, overrides: list[str] | None = None) -> TrainerSettings:
    (tmp_path / "trainer.toml").write_text(text)
    return TrainerSettings.load(tmp_path / "trainer.toml", overrides)


def test_defaults(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AETHER_TRAINER_OPTIMIZER__WARMUP_STEPS", "3")
    settings = load(tmp_path, f'[model]\npath = "{tiny}"\n', ["lora.rank=4", "compute.device=cpu"])
    assert (settings.lora.rank, settings.lora.alpha, settings.lora.target_modules) == (4, 16, "all-linear")
    assert settings.optimizer.model_dump() == {
        "learning_rate": 4e-4,
        "betas": (0.9, 0.95),
        "weight_decay": 0,
        "max_grad_norm": 1.0,
        "warmup_steps": 3,
    }
    assert settings.compute.device == "cpu" and settings.seed == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[model]\npath = "nobody/nothing"\n', "give the full 40-hex commit"),
        ('[model]\npath = "TINY"\nrevision = "main"\n', "give the full 40-hex commit"),
        ('[model]\npath = "TINY"\ndtype = "int4"\n', "model.dtype"),
        ('[model]\npath = "TINY"\n[lora]\nrnak = 8\n', "unknown key lora.rnak: known here are alpha, "),
        ('[model]\npath = "TINY"\n[lora]\nserving_dtype = "float32"\n', "set both to the same dtype"),
        ('[model]\npath = "TINY"\n[lora]\ninitial_adapter = "nowhere"\n', "no adapter_config.json in"),
        ('[model]\npath = "TINY"\n[optimizer]\nbetas = [0.9, 1.0]\n', "below 1"),
        ("seed = 1\n", "key model is missing"),
    ],
)
def test_refusals_name_file_key_and_remedy(tmp_path: Path, tiny: Path, text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text.replace("TINY", str(tiny)))
    assert message in str(caught.value)
    assert str(tmp_path / "trainer.toml") in str(caught.value)
