"""How a stream or consumer that is there differs from its declaration, and what may be corrected.

Everything that we declare is corrected, except what an operator chooses for the cluster: replicas,
placement and compression.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from aether_common.errors import ConfigError
from nats.js.api import ConsumerConfig, StreamConfig

OPERATORS = ("num_replicas", "placement", "compression")
NOT_COMPARED = ("name", "duplicate_window", *OPERATORS)
"""The server derives the window of duplicates, which we do not use, from the age."""

Config = dict[str, Any]
"""A configuration as the server writes it: plain JSON, times in nanoseconds."""


def plain(config: StreamConfig | ConsumerConfig) -> Config:
    return json.loads(json.dumps(config.as_dict()))


def drift(found: Config, wanted: Config) -> dict[str, tuple[Any, Any]]:
    """(what is there, what it should be) by field."""
    return {
        field: (found.get(field), wanted.get(field))
        for field in sorted(found.keys() | wanted.keys())
        if field not in NOT_COMPARED and _value(found.get(field)) != _value(wanted.get(field))
    }


def _value(value: Any) -> Any:
    """None for every way to write that a field is not set; without what the server adds to metadata."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if not key.startswith("_nats.")}
    return None if value in (0, -1, "", [], {}) else value


def with_operators_choice(found: Config, wanted: Config) -> Config:
    return wanted | {field: found[field] for field in OPERATORS if field in found}


def refuse_to_lose(name: str, changed: Mapping[str, tuple[Any, Any]], state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if smaller limits would not hold what is stored."""
    if "max_bytes" in changed:
        old, new = changed["max_bytes"]
        if 0 < new < state["bytes"]:
            raise ConfigError(
                f"nats.max_storage_mib is too small: stream {name} holds {_mib(state['bytes'])} (its limit was "
                f"{_mib(old) if old > 0 else 'none'}), and would get {_mib(new)}: raise it, or let the run use up what "
                "is stored first"
            )
    if "max_age" in changed and state["messages"]:
        old, new = (timedelta(microseconds=(value or 0) / 1000) for value in changed["max_age"])
        age = datetime.now(UTC) - datetime.fromisoformat(state["first_ts"])
        if timedelta() < new < age:
            raise ConfigError(
                f"episodes.turn_deadline_s is too short: stream {name} holds a message that is {_seconds(age)} old "
                f"(its limit was {_seconds(old) if old else 'none'}), and would keep them for {_seconds(new)}: raise "
                "it, or let the run use up what is stored first"
            )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _seconds(value: timedelta) -> str:
    return f"{value.total_seconds():.0f} s"
