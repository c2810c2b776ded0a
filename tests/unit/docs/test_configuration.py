"""docs/configuration.md says what the settings classes say."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_up_to_date() -> None:
    text = runpy.run_path(str(DOCS / "configuration.py"))["render"]()
    if (DOCS / "configuration.md").read_text(encoding="utf-8") != text:
        pytest.fail("the settings have changed: rewrite the page with `uv run python docs/configuration.py`", False)
