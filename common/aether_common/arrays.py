"""Token ids and logprobs as they travel and rest: little-endian uint32 and float32 bytes."""

import sys
from array import array
from collections.abc import Iterable, Sequence

_BIG_ENDIAN = sys.byteorder == "big"


def _pack(code: str, values: Iterable[float]) -> bytes:
    items = array(code, values)
    if _BIG_ENDIAN:
        items.byteswap()
    return items.tobytes()


def _unpack(code: str, data: bytes) -> array:
    items = array(code)
    items.frombytes(data)
    if _BIG_ENDIAN:
        items.byteswap()
    return items


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids to 4 bytes each. Raises `OverflowError` for a negative or too large id."""
    return _pack("I", tokens)


def unpack_tokens(data: bytes) -> list[int]:
    """Raises `ValueError` when the length is no multiple of 4."""
    return _unpack("I", data).tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Floats rounded to float32, 4 bytes each."""
    return _pack("f", values)


def unpack_floats(data: bytes) -> list[float]:
    """Raises `ValueError` when the length is no multiple of 4."""
    return _unpack("f", data).tolist()
