"""Real vLLM (its CPU build, in the environment of this folder) on the tiny model, with adapters that differ."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from aether_worker.engine.vllm_engine import VllmEngine
from aether_worker.settings import VllmSettings, WorkerSettings
from peft import LoraConfig, get_peft_model
from requirements import VLLM_PYTHON
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM
from vllm_reference import Adapter, Reference

MAX_MODEL_LEN = 256
VERSIONS = range(6)
"""One more than the engine may have in a batch."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None]) -> Path:
    """The tiny model with two heads of 32 dimensions: vLLM on a CPU takes no smaller ones."""
    require("vllm")
    return make_tiny_model(tmp_path_factory.mktemp("vllm-model") / "tiny", heads=2)


@pytest.fixture(scope="session")
def adapters(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    """Random ones, far enough apart to give every token another logprob."""
    root = tmp_path_factory.mktemp("adapters")
    made: list[Adapter] = []
    for version in VERSIONS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(version)
            base = AutoModelForCausalLM.from_pretrained(vllm_model, dtype=torch.float32)
            model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        path = root / f"v{version}"
        model.save_pretrained(str(path), save_embedding_layers=False)
        made.append(Adapter(version, path))
    return made


@pytest.fixture(scope="session")
def settings(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    directory = tmp_path_factory.mktemp("vllm")
    return WorkerSettings(
        name="w1",
        run="test",
        url="ws://127.0.0.1:1",
        key_file=directory / "key",
        model=str(vllm_model),
        dtype="float32",
        slots=16,
        max_model_len=MAX_MODEL_LEN,
        state_dir=directory,
        vllm=VllmSettings(python=VLLM_PYTHON, extra_args=["--enforce-eager"], max_lora_rank=8),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(settings: WorkerSettings, vllm_model: Path, adapters: list[Adapter]) -> AsyncIterator[VllmEngine]:
    """Running, with the first two adapters."""
    engine = VllmEngine(settings, vllm_model)
    await engine.start()
    for adapter in adapters[:2]:
        await engine.load_adapter(adapter.version, adapter.digest, adapter.path)
    yield engine
    await engine.stop()


@pytest.fixture(scope="session")
def reference(vllm_model: Path, adapters: list[Adapter]) -> Reference:
    return Reference(vllm_model, adapters)
