"""The order and completeness of what a reading passes on, whatever breaks off."""

import pytest
from aether_common.errors import BusError
from aether_worker.artifacts import ObjectInfo, _Reading  # pyright: ignore[reportPrivateUsage]
from nats.aio.client import Client
from nats.aio.msg import Msg


def chunk(window: int, sequence: int) -> Msg:
    headers = {"Nats-Sequence": str(sequence)}
    return Msg(Client(), subject=f"inbox.{window}", data=bytes([sequence]) * 10, headers=headers)


def end(window: int) -> Msg:
    return Msg(Client(), subject=f"inbox.{window}", headers={"Status": "204"})


async def test_what_came_before_a_window_broke_off_is_passed_on_once() -> None:
    written = bytearray()

    async def write(pieces: list[bytes]) -> None:
        written.extend(b"".join(pieces))

    reading = _Reading("digest", ObjectInfo("nuid", size=40, chunks=4), write, rate=0.0)
    reading.begin()
    assert reading.next_window(1 << 20) is not None
    assert reading.next_window(1 << 20) is None
    for message in (chunk(0, 7), chunk(0, 8), end(0)):
        reading.take(message)
    with pytest.raises(BusError, match="ended early"):
        await reading.pass_on()
    assert (reading.chunks, reading.size) == (2, 20)
    reading.begin()
    window = reading.next_window(1 << 20)
    assert window is not None
    assert (window.start, window.count) == (9, 2)
    # The server looks from there on: one that was passed on already is not passed on again.
    for message in (chunk(window.number, 8), chunk(window.number, 9), chunk(window.number, 12)):
        reading.take(message)
    await reading.pass_on()
    assert bytes(written) == b"".join(bytes([n]) * 10 for n in (7, 8, 9, 12))
