"""Parts of a machine that not every machine has. Their tests are skipped, unless AETHER_REQUIRE demands the part.

AETHER_REQUIRE is a comma-separated list of parts, for example `node,docker`: where a part is named there, its
absence is a failure, so that a suite cannot silently be left out.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

NODE_PROJECT = Path(__file__).parent / "integration" / "nats_js"
VLLM_PYTHON = Path(__file__).parent / "vllm" / ".venv" / "bin" / "python"
"""Of vLLM's CPU build, which cannot share our environment."""


def require(part: str, missing: str | None = None) -> None:
    """Skip or fail the test when `part` is not there.

    `missing` says why it is not (empty: it is there); left out, the check of `PARTS` decides.
    """
    reason = PARTS[part]() if missing is None else missing
    if not reason:
        return
    if part in os.environ.get("AETHER_REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"{part} is required by AETHER_REQUIRE: {reason}", pytrace=False)
    pytest.skip(f"{part}: {reason}")


def _node() -> str:
    if shutil.which("node") is None:
        return "node is not on the PATH"
    if not (NODE_PROJECT / "node_modules" / "@nats-io" / "transport-node").is_dir():
        return f"its packages are not installed: npm ci --prefix {NODE_PROJECT}"
    return ""


def _docker() -> str:
    if shutil.which("docker") is None:
        return "docker is not on the PATH"
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else f"the daemon does not answer: {done.stderr.strip()[:200]}"


def _vllm() -> str:
    if not VLLM_PYTHON.exists():
        return f"its environment is not there: uv sync --project {VLLM_PYTHON.parents[2]}"
    return ""


PARTS: dict[str, Callable[[], str]] = {"node": _node, "docker": _docker, "vllm": _vllm}
"""Why a part is not there, empty where it is. Suites with other parts give `missing` themselves."""
