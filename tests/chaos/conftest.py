"""How much chaos: all of it for `pytest tests/chaos` and in CI, a sample in an ordinary run."""

import os

import pytest


@pytest.fixture(scope="session")
def chaos_scope(request: pytest.FixtureRequest) -> str:
    asked = any("chaos" in argument for argument in request.config.invocation_params.args)
    return "all" if asked or os.environ.get("CI") else "sample"
