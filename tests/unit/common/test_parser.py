"""Our parser against nats-py's own, on streams that are cut anywhere."""

import asyncio
import json
import random
from typing import Any

import pytest
from aether_common.parser import Parser
from nats.errors import ProtocolError
from nats.protocol.parser import Parser as Original


class Told:
    """Remembers what a parser calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        async def called(*arguments: Any) -> None:
            # The original has None for no header, ours an empty one: the client asks `if not headers`.
            self.calls.append((name, *(argument or b"" for argument in arguments)))

        return called


def stream_of(numbers: random.Random) -> bytes:
    def message() -> bytes:
        payload = numbers.randbytes(numbers.choice((0, 1, 2, 5, 300, 70_000)))
        header = b"NATS/1.0\r\nA: 1\r\n\r\n" if numbers.random() < 0.5 else b""
        reply = b"r.1 " if numbers.random() < 0.5 else b""
        if header:
            return b"HMSG a.b 7 %s%d %d\r\n%s%s\r\n" % (
                reply,
                len(header),
                len(header) + len(payload),
                header,
                payload,
            )
        return b"MSG a.b 7 %s%d\r\n%s\r\n" % (reply, len(payload), payload)

    others = [
        b"PING\r\n",
        b"PONG\r\n",
        b"+OK\r\n",
        b"-ERR 'Permissions Violation'\r\n",
        b"INFO %s\r\n" % json.dumps({"server_id": "x" * numbers.randrange(3000)}).encode(),
    ]
    return b"".join(numbers.choice(others) if numbers.random() < 0.3 else message() for _ in range(12))


@pytest.mark.parametrize("seed", range(30))
async def test_the_same_as_nats_py_wherever_the_stream_is_cut(seed: int) -> None:
    numbers = random.Random(seed)
    stream = stream_of(numbers)
    whole = seed % 3 == 0
    cuts = [] if whole else sorted(numbers.randrange(len(stream) + 1) for _ in range(numbers.choice((3, 40))))
    ours, theirs = Told(), Told()
    parser, original = Parser(ours), Original(theirs)
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        await parser.parse(stream[start:end])
        await original.parse(stream[start:end])
    assert ours.calls == theirs.calls


async def test_the_same_byte_by_byte() -> None:
    stream = b"PING\r\nHMSG s 1 14 17\r\nNATS/1.0\r\n\r\n..abc\r\nMSG s 2 0\r\n\r\nMSG s 3 r 2\r\n\r\n\r\nPONG\r\n"
    ours, theirs = Told(), Told()
    parser, original = Parser(ours), Original(theirs)
    for byte in stream:
        await parser.parse(bytes([byte]))
        await original.parse(bytes([byte]))
    assert ours.calls == theirs.calls
    assert ours.calls[-1] == ("_process_pong",)


@pytest.mark.parametrize(
    "stream",
    [b"HELLO\r\n", b"\r\n", b"MSG a x 3\r\n", b"MSG a 1\r\n", b"HMSG a 1 5 3\r\n", b"INFO {\r\n", b"MSG a 1 -3\r\n"],
)
async def test_what_is_no_protocol_is_an_error(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        await Parser(Told()).parse(stream)


async def test_a_line_without_an_end_is_an_error() -> None:
    parser = Parser(Told())
    with pytest.raises(ProtocolError):
        for _ in range(40):
            await parser.parse(b"x" * (1 << 16))


async def test_reset_forgets_a_message_that_was_cut_off() -> None:
    told = Told()
    parser = Parser(told)
    await parser.parse(b"MSG a 1 100\r\nabc")
    parser.reset()
    await parser.parse(b"PING\r\n")
    assert told.calls == [("_process_ping",)]
    await asyncio.sleep(0)
