"""What several suites share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import requirements
from tiny_model import make_tiny_model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `long` run in CI, and where their file is named; an ordinary run ends within ten minutes."""
    if os.environ.get("CI"):
        return
    named = [str(argument) for argument in config.invocation_params.args]
    for item in items:
        if item.get_closest_marker("long") and not any(item.path.name in argument for argument in named):
            item.add_marker(pytest.mark.skip(reason=f"long: runs in CI, or as pytest {item.path.name}"))


@pytest.fixture(scope="session")
def require() -> Callable[..., None]:
    """`require(part)`: the test needs that part of the machine, see `requirements`."""
    return requirements.require


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model, to be read only."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model") / "tiny")
