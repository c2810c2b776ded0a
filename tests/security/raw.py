"""A NATS client of bare protocol lines, so that no client library keeps an attacker from anything."""

import asyncio
import base64
import json
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import nkeys

TIMEOUT_S = 5.0


@dataclass(slots=True)
class Received:
    """A message, and the subscription that it came to."""

    sid: int
    subject: str
    reply: str
    status: str
    """Of a message with headers only, such as `503` or `404 No Messages`."""
    data: bytes


def sign(seed: str, nonce: str) -> str:
    return (
        base64.urlsafe_b64encode(nkeys.from_seed(bytearray(seed.encode())).sign(nonce.encode())).rstrip(b"=").decode()
    )


def public(seed: str) -> str:
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


@dataclass(eq=False)
class Raw:
    """One connection, over the websocket or over tcp. `open` it, `close` it; used as a context manager."""

    url: str
    seed: str = ""
    name: str = "raw"
    signature: str | None = None
    """Sent instead of the right one."""
    public: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    """Of the HTTP request of a websocket."""
    messages: list[Received] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    closed: bool = False
    nonce: str = ""
    _buffer: bytes = b""
    _pongs: int = 0
    _sid: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Task[None] | None = None
    _session: aiohttp.ClientSession | None = None
    _socket: aiohttp.ClientWebSocketResponse | None = None
    _writer: asyncio.StreamWriter | None = None
    _reader: asyncio.StreamReader | None = None

    # ---- connection --------------------------------------------------------------------------------

    async def open(self, **options: Any) -> Self:
        """Connect and wait for the server's word: a PONG, or an error after which `closed` is set."""
        if self.url.startswith("ws"):
            self._session = aiohttp.ClientSession()
            self._socket = await self._session.ws_connect(
                self.url, max_msg_size=0, headers=self.headers, protocols=("nats",)
            )
        else:
            host, port = self.url.removeprefix("nats://").split(":")
            self._reader, self._writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
        self._reading = asyncio.create_task(self._read())
        await self.until(lambda: self.nonce or self.closed)
        connect: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        connect |= {"name": self.name, "lang": "raw", "version": "0", "protocol": 1, **options}
        if self.seed:
            connect["nkey"] = self.public or public(self.seed)
            connect["sig"] = self.signature or sign(self.seed, self.nonce)
        await self.send(f"CONNECT {json.dumps(connect)}\r\n".encode())
        await self.ping()
        return self

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()
        if self._writer is not None:
            self._writer.close()
        self.closed = True

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None):
        await self.close()

    async def send(self, data: bytes) -> None:
        try:
            if self._socket is not None:
                await self._socket.send_bytes(data)
            elif self._writer is not None:
                self._writer.write(data)
                await self._writer.drain()
        except (ConnectionError, aiohttp.ClientError):
            self.closed = True
            self._news.set()

    async def until(self, condition: Any, timeout_s: float = TIMEOUT_S) -> bool:
        """Wait until `condition()` holds; False when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())
            except TimeoutError:
                return bool(condition())
        return True

    async def ping(self) -> bool:
        """A round trip: what was sent before was read by the server. False when the connection is over."""
        before = self._pongs
        await self.send(b"PING\r\n")
        await self.until(lambda: self._pongs > before or self.closed)
        return self._pongs > before

    # ---- protocol ----------------------------------------------------------------------------------

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        await self.send(line(subject, data, reply=reply, headers=headers))

    async def subscribe(self, subject: str, queue: str = "") -> int:
        """Returns the number of the subscription, which messages carry."""
        self._sid += 1
        await self.send(f"SUB {subject} {queue + ' ' if queue else ''}{self._sid}\r\n".encode())
        return self._sid

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        inbox: str,
        headers: dict[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Received | None:
        """Publish with a reply subject; the first answer on it, or None. A delivered job keeps its own subject."""
        sid = await self.subscribe(inbox)
        await self.publish(subject, data, reply=inbox, headers=headers)
        await self.until(lambda: self.closed or any(message.sid == sid for message in self.messages), timeout_s)
        await self.send(f"UNSUB {sid}\r\n".encode())
        return next((message for message in self.messages if message.sid == sid), None)

    async def _read(self) -> None:
        try:
            while data := await self._receive():
                self._buffer += data
                while await self._parse():
                    pass
                self._news.set()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        self.closed = True
        self._news.set()

    async def _receive(self) -> bytes:
        if self._socket is not None:
            message = await self._socket.receive()
            return message.data if message.type is aiohttp.WSMsgType.BINARY else b""
        assert self._reader is not None
        return await self._reader.read(1 << 16)

    async def _parse(self) -> bool:
        """Take one operation off the buffer, if a whole one is there."""
        head, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        operation, _, arguments = head.decode().partition(" ")
        if operation in ("MSG", "HMSG"):
            parts = arguments.split(" ")
            total = int(parts[-1])
            if len(rest) < total + 2:
                return False
            header_length = int(parts[-2]) if operation == "HMSG" else 0
            header, data = rest[:header_length], rest[header_length:total]
            status = header.partition(b"\r\n")[0].removeprefix(b"NATS/1.0").strip().decode()
            reply = parts[2] if len(parts) > (4 if operation == "HMSG" else 3) else ""
            self.messages.append(Received(int(parts[1]), parts[0], reply, status, data))
            rest = rest[total + 2 :]
        elif operation == "INFO":
            self.nonce = json.loads(arguments).get("nonce", "")
        elif operation == "PING":
            await self.send(b"PONG\r\n")
        elif operation == "PONG":
            self._pongs += 1
        elif operation == "-ERR":
            self.errors.append(arguments.strip("'"))
        self._buffer = rest
        return True


def line(subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None) -> bytes:
    """The protocol line of a publish."""
    target = f"{subject} {reply} " if reply else f"{subject} "
    if headers is None:
        return f"PUB {target}{len(data)}\r\n".encode() + data + b"\r\n"
    block = b"NATS/1.0\r\n" + b"".join(f"{key}: {value}\r\n".encode() for key, value in headers.items()) + b"\r\n"
    return f"HPUB {target}{len(block)} {len(block) + len(data)}\r\n".encode() + block + data + b"\r\n"
