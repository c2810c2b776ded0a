"""A TCP proxy between a worker and nats-server whose connections can be cut, delayed and silenced."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


class Proxy:
    """Forwards a free port of loopback to `target`, in a thread of its own."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._refusing = False
        self._delay_s = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._open.discard(writer)

    def cut(self) -> None:
        """Reset every connection and refuse new ones until `mend`."""

        async def cut() -> None:
            self._refusing = True
            for writer in list(self._open):
                writer.transport.abort()

        self._call(cut())

    def silence(self) -> None:
        """Keep connections open and let nothing through until `mend`."""

        async def silence() -> None:
            self._flowing.clear()

        self._call(silence())

    def delay(self, seconds: float) -> None:
        """Hold every piece of data so long, in both directions, until `mend`."""
        self._delay_s = seconds

    def mend(self) -> None:
        async def mend() -> None:
            self._refusing, self._delay_s = False, 0.0
            self._flowing.set()

        self._call(mend())

    def close(self) -> None:
        async def close() -> None:
            self._server.close()
            for writer in list(self._open):
                writer.transport.abort()

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
