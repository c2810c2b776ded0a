"""What the server sends, taken apart: a replacement for nats-py's parser that copies a payload once, not three times.

nats-py appends everything to one buffer, cuts a message out of its front and then copies header and payload again; an
adapter's chunks make up most of what a worker ever receives.
"""

import json
from typing import Any

from nats.errors import ProtocolError

MAX_LINE = 1 << 20
"""An INFO line is the longest; everything else is far below."""
CRLF = b"\r\n"


class Parser:
    """Calls the client's `_process_…` methods in the order of the stream, which may be cut anywhere."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.reset()

    def reset(self) -> None:
        """Begin a new connection."""
        self._line = b""
        """The beginning of a line that is not complete."""
        self._message: tuple[int, bytes, bytes, int, int] | None = None
        """Subscription, subject, reply, header's length and payload's length of the message that comes."""
        self._pieces: list[bytes] = []
        self._missing = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take the next piece of the stream. Raises `ProtocolError`."""
        at = 0
        while at < len(data):
            if self._message is not None:
                at = await self._body(data, at)
                continue
            end = data.find(CRLF, at)
            if end < 0 and not (self._line.endswith(b"\r") and data.startswith(b"\n", at)):
                self._line += data[at:]
                if len(self._line) > MAX_LINE:
                    raise ProtocolError("nats: a line without an end")
                return
            if self._line.endswith(b"\r") and data.startswith(b"\n", at):
                line, at = self._line[:-1], at + 1
            else:
                line, at = self._line + data[at:end] if self._line else data[at:end], end + 2
            self._line = b""
            await self._command(line)

    async def _command(self, line: bytes) -> None:
        operation, *words = line.split() or [b""]
        if operation in (b"MSG", b"HMSG"):
            self._begin(operation, words)
        elif operation == b"PING":
            await self._client._process_ping()
        elif operation == b"PONG":
            await self._client._process_pong()
        elif operation == b"-ERR":
            await self._client._process_err(line[4:].strip().decode(errors="replace").lower())
        elif operation == b"INFO":
            try:
                info = json.loads(line[4:])
            except ValueError:
                raise ProtocolError("nats: malformed INFO") from None
            await self._client._process_info(info)
        elif operation != b"+OK":
            raise ProtocolError("nats: unknown protocol")

    def _begin(self, operation: bytes, words: list[bytes]) -> None:
        """`[H]MSG subject subscription [reply] [header's length] length`: a message comes."""
        try:
            subject, subscription, *reply, total = words
            header = int(reply.pop()) if operation == b"HMSG" else 0
            payload = int(total) - header
            if header < 0 or payload < 0 or len(reply) > 1:
                raise ValueError
            self._message = int(subscription), subject, reply[0] if reply else b"", header, payload
        except (ValueError, IndexError):
            raise ProtocolError("nats: malformed MSG") from None
        self._pieces = []
        self._missing = header + payload + len(CRLF)

    async def _body(self, data: bytes, at: int) -> int:
        """Take what belongs to the message in progress; returns where it ends in `data`."""
        assert self._message is not None
        subscription, subject, reply, header, payload = self._message
        if len(data) - at >= self._missing and not self._pieces:
            # Whole, the usual case.
            start, end = at + header, at + header + payload
            head, body, after = data[at:start], data[start:end], end + len(CRLF)
        else:
            piece = data[at : at + self._missing]
            self._pieces.append(piece)
            self._missing -= len(piece)
            if self._missing:
                return len(data)
            head, body = self._joined(header, payload)
            after = at + len(piece)
        self._message, self._pieces = None, []
        await self._client._process_msg(subscription, subject, reply, body, head)
        return after

    def _joined(self, header: int, payload: int) -> tuple[bytes, bytes]:
        """Header and payload from the pieces, the payload copied once."""
        beginning = b""
        while len(beginning) < header:
            beginning += self._pieces.pop(0)
        views = [memoryview(beginning)[header:], *map(memoryview, self._pieces)]
        surplus = len(CRLF)
        while surplus:
            cut = min(surplus, len(views[-1]))
            surplus -= cut
            views[-1] = views[-1][: len(views[-1]) - cut]
            if surplus:
                views.pop()
        return beginning[:header], b"".join(views)
