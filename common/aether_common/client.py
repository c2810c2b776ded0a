"""nats-py's client, with its silent ends closed: whatever happens, it is connected, reconnecting or refused.

nats-py 2.16 closes for good, without a callback, when the server reports an error on an established
connection; its reconnection ends with any error that it does not expect, and takes a WebSocket on which
it was refused for the next one; opening a WebSocket has no time limit; and `tls://` goes on unencrypted
when the server offers no TLS.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import ParseResult

import nats.errors
from aiohttp import WSMsgType
from nats.aio.client import Client
from nats.aio.transport import WebSocketTransport

from aether_common.parser import Parser

OPEN_S = 10.0
"""Bound of one attempt to open a connection, TLS and WebSocket included."""
RECONNECT_S = 0.5
"""Least wait between two attempts to connect."""
JITTER_S = 1.5
"""At most so much more before each reconnect, drawn anew, so that a fleet does not come back in step."""
SENT_AWAY = "Client Closed"
"""Why nats-server closes the WebSocket of a user that a reload removed; there is no -ERR."""
PONG = b"PONG\r\n"
AUTHORIZATION = ("authorization violation", "authentication expired", "authentication revoked")
"""The server's words for a credential that is not, or no longer, good."""


def is_authorization(text: str) -> bool:
    return any(words in text.lower() for words in AUTHORIZATION)


class JoinedFrames(WebSocketTransport):
    """nats-py sends a websocket frame, and makes a system call, for every command; this does for every flush.

    It also takes the first answer of the server for one line, and drops the account's limits behind it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._behind = b""
        self.farewell = ""
        """The reason that the server gave for closing."""

    def writelines(self, payload: list[bytes]) -> None:
        self.write(b"".join(payload))

    async def readline(self) -> bytes:
        if self._behind:
            frame, self._behind = self._behind, b""
            return frame
        assert self._ws is not None
        message = await self._ws.receive()
        if message.type is WSMsgType.BINARY:
            if message.data.startswith(PONG):
                self._behind = message.data[len(PONG) :]
                return PONG
            return message.data
        if message.type is WSMsgType.CLOSE:
            self.farewell = message.extra or ""
        if message.type is WSMsgType.ERROR:
            raise ConnectionError(f"websocket: {message.data}")
        return b""


class ResilientClient(Client):
    """`refused` is called when the server ends an established connection for want of authorization."""

    def __init__(self, refused: Callable[[str], Awaitable[None]]) -> None:
        super().__init__()
        self._ps = Parser(self)  # type: ignore[assignment]
        self._refused = refused
        self.sent_away = False
        """The server closed this connection alone, as it does when a key is revoked: the next attempt tells."""

    async def _process_err(self, err_msg: str) -> None:
        text = err_msg.strip("'")
        if is_authorization(text):
            await self._refused(text)
            await super()._process_err(err_msg)  # closes
        # Everything else is reported; the server closes the connection where it must, which leads to a reconnect.
        elif "stale connection" in text:
            await super()._process_err(err_msg)
        else:
            await self._error_cb(nats.errors.Error(f"nats: {text}"))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        assert self._current_server is not None
        if initial_connection and self._current_server.uri.scheme == "tls" and not info.get("tls_required"):
            raise nats.errors.Error("the server offers no TLS at that port")
        # Only the configured URL is dialled: gossiped ones would be unencrypted, and past the proxy.
        info.pop("connect_urls", None)
        await super()._process_info(info, initial_connection)
        self._max_payload = info.get("max_payload", self._max_payload)

    async def _connect_to_server(self, s: Any) -> None:
        uri: ParseResult = s.uri
        if self.is_reconnecting and not self.sent_away:
            await asyncio.sleep(random.uniform(0, JITTER_S))
        async with asyncio.timeout(OPEN_S):
            if uri.scheme in ("ws", "wss"):
                if self._transport is not None and bool(self._transport):
                    # Else a connection on which the server refused us would be taken for the new one.
                    self._transport.close()
                    await self._transport.wait_closed()
                self._transport = JoinedFrames(ws_headers=self.options["ws_connection_headers"])
            await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        self.sent_away = isinstance(self._transport, JoinedFrames) and self._transport.farewell == SENT_AWAY
        while True:
            try:
                # It begins by closing what is left of the old connection.
                return await super()._attempt_reconnect()
            except Exception as error:
                await self._error_cb(error)
                self._status = Client.RECONNECTING
                await asyncio.sleep(RECONNECT_S)
