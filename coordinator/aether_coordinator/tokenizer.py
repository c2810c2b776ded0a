"""The tokens that end a completion: what tokenizer and generation configuration name."""

import json
from pathlib import Path
from typing import Any


def stop_token_ids(model: Path) -> frozenset[int]:
    """End-of-sequence ids from `generation_config.json`, `config.json` and the tokenizer's files.

    The renderer's own stop tokens arrive with every request and are added there.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read(model / name).get("eos_token_id")
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, list):
            ids.update(value)
    token = _read(model / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    for added in _read(model / "tokenizer.json").get("added_tokens", []):
        if added["content"] == content:
            ids.add(added["id"])
    return frozenset(ids)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
