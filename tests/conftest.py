"""What several suites share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import requirements
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def require() -> Callable[..., None]:
    """`require(part)`: the test needs that part of the machine, see `requirements`."""
    return requirements.require


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model, to be read only."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model") / "tiny")
