"""Hypothesis strategies for what a decoder may be given: noise, mutated valid data, nesting, lies about lengths."""

import json
from collections.abc import Callable
from typing import Any

import msgpack
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

BOUNDED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NASTY_MSGPACK = [
    b"",
    b"\x91" * 100_000,
    b"\x81\xa1a" * 100_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x00",
    b"\xa2\xff\xfe",
    b"\xd6\xff\x00\x00\x00\x00",
]
NASTY_JSON = [
    b"",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"NaN",
    b"1" * 10_000,
    b'"\\ud800"',
    b"\xff\xfe",
    b'{"a":1e999}',
    b"-Infinity",
]


def _mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    """Some bytes changed, cut off, or put in."""

    def apply(changes: list[tuple[int, int]], end: int | None) -> bytes:
        data = bytearray(valid)
        for place, byte in changes:
            data[place % len(data)] = byte
        return bytes(data[:end])

    changes = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6)
    return st.builds(apply, changes, st.none() | st.integers(0, len(valid)))


def _wrong_fields(body: dict[str, Any], pack: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    """A valid map with a few fields replaced, removed or added."""
    changes = st.dictionaries(st.sampled_from([*body, "unknown"]), VALUES, max_size=4)
    removed = st.sets(st.sampled_from(list(body)), max_size=2)
    return st.builds(
        lambda changed, without: pack({key: value for key, value in {**body, **changed}.items() if key not in without}),
        changes,
        removed,
    )


def near_msgpack(valid: bytes) -> st.SearchStrategy[bytes]:
    body = msgpack.unpackb(valid)
    return (
        st.binary(max_size=200)
        | st.sampled_from(NASTY_MSGPACK)
        | _mutated(valid)
        | VALUES.map(msgpack.packb)
        | _wrong_fields(body, msgpack.packb)
    )


def _dumps(value: Any) -> bytes:
    return json.dumps(value, default=lambda data: data.hex()).encode()


def near_json(valid: bytes) -> st.SearchStrategy[bytes]:
    body = json.loads(valid)
    given = st.binary(max_size=200) | st.sampled_from(NASTY_JSON) | _mutated(valid) | VALUES.map(_dumps)
    return given | _wrong_fields(body, _dumps) if isinstance(body, dict) else given
