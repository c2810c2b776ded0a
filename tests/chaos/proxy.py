"""A TCP proxy between a worker and nats-server whose connections can be cut, delayed and silenced.

    python tests/chaos/proxy.py PORT [--delay SECONDS]      # prints its port; ends with its standard input

It delays, and does not throttle: what is on its way is bounded by memory only.
"""

import argparse
import asyncio
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

PIECE = 1 << 18
PIECES = 512
"""On their way in one direction of one connection."""


class Proxy:
    """Forwards a free port of `host` to `target` on loopback, in a thread of its own."""

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        self._target, self._host = target, host
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refusing = False
        self._delay_s = 0.0
        self._cut_at: int | None = None
        self._flowing = {True: asyncio.Event(), False: asyncio.Event()}
        """To clients, and to the target."""
        for flowing in self._flowing.values():
            flowing.set()
        self.accepted = 0
        """Connections so far."""
        self.received = 0
        """Bytes that went from the target to clients."""
        self.was_cut = threading.Event()
        """Set when `cut_after` has cut."""
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, self._host, 0, limit=PIECE)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target, limit=PIECE)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far_writer}
        for source, sink, to_client in ((reader, far_writer, False), (far_reader, writer, True)):
            pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)
            for work in (self._take(source, pieces, to_client), self._give(pieces, sink, to_client)):
                task = self._loop.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _take(
        self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]], to_client: bool
    ) -> None:
        data = b"-"
        while data:
            try:
                data = await reader.read(PIECE)
            except OSError:
                data = b""
            if to_client:
                self.received += len(data)
                if self._cut_at is not None and self.received >= self._cut_at:
                    self._cut_at = None
                    self._abort_all()
                    self.was_cut.set()
                    return
            await pieces.put((self._loop.time() + self._delay_s, data))

    async def _give(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, to_client: bool
    ) -> None:
        """An empty piece is the end: of the other side, told like everything else, after the delay."""
        with suppress(OSError):
            while True:
                due, data = await pieces.get()
                if (wait := due - self._loop.time()) > 0:
                    await asyncio.sleep(wait)
                await self._flowing[to_client].wait()
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._open.discard(writer)

    def _abort_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()
        self._open.clear()

    def cut(self) -> None:
        """Reset every connection and refuse new ones until `mend`."""

        async def cut() -> None:
            self._refusing = True
            self._abort_all()

        self._call(cut())

    def cut_after(self, more: int) -> None:
        """Reset every connection, once, when so many more bytes came from the target; new ones are welcome."""
        self.was_cut.clear()
        self._cut_at = self.received + more

    def silence(self, *, to_target: bool = True) -> None:
        """Keep connections open, accept new ones, and let nothing through until `mend`; to clients only, if asked."""

        async def silence() -> None:
            self._flowing[True].clear()
            if to_target:
                self._flowing[False].clear()

        self._call(silence())

    def delay(self, seconds: float) -> None:
        """Hold every piece of data so long, in both directions, until `mend`."""
        self._delay_s = seconds

    def mend(self) -> None:
        async def mend() -> None:
            self._refusing, self._delay_s = False, 0.0
            for flowing in self._flowing.values():
                flowing.set()

        self._call(mend())

    def close(self) -> None:
        async def close() -> None:
            self._server.close()
            self._abort_all()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=int)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, in each direction")
    options = parser.parse_args()
    proxy = Proxy(options.target)
    proxy.delay(options.delay)
    print(proxy.port, flush=True)
    sys.stdin.read()
    proxy.close()


if __name__ == "__main__":
    main()
