"""Connecting to what does not answer, being cut off, and what is published meanwhile."""

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aether_common import bus as bus_module
from aether_common import client as client_module
from aether_common.bus import Bus
from aether_common.errors import BusError
from aether_common.tls import Tls
from aether_common.wire import Reply, ReplyKind
from aether_coordinator import certificates
from aether_worker import artifacts as artifacts_module
from aether_worker.replies import Replies
from chaos.proxy import Proxy
from nats_server import NatsServer

from .conftest import WORKER, until

SEED = "SUAIO3FHUX5PNV2LQIIP7TZ3N4L7TX3W53MQGEIVYFIGA635OZCKEYHFLM"

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def upgrades_and_says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\n")
    await says_nothing(reader, writer)


async def begins_a_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"INFO {")
    await says_nothing(reader, writer)


@asynccontextmanager
async def peer(answer: Answer, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize(
    ("scheme", "answer", "encrypted"),
    [
        ("ws", says_nothing, False),
        ("ws", upgrades_and_says_nothing, False),
        ("wss", says_nothing, False),
        ("wss", says_nothing, True),
        ("wss", upgrades_and_says_nothing, True),
        ("nats", says_nothing, False),
        ("nats", begins_a_greeting, False),
        ("tls", says_nothing, False),
    ],
)
async def test_a_connect_to_a_silent_peer_is_bounded(
    tmp_path: Path, scheme: str, answer: Answer, encrypted: bool
) -> None:
    certificates.prepare(tmp_path, "test", ["localhost"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    tls = Tls(tmp_path / "ca.pem") if scheme in ("wss", "tls") else Tls()
    async with peer(answer, context if encrypted else None) as port:
        bus = Bus(f"{scheme}://localhost:{port}", SEED, "_INBOX_w1", WORKER, tls)
        began = time.monotonic()
        with pytest.raises(BusError, match=f"no connection to nats-server at {scheme}://localhost:{port}"):
            await bus.connect(1)
        await bus.close()
        assert time.monotonic() - began < 8  # nats-py alone: a minute and more.


def test_a_dead_link_is_noticed_within_a_minute() -> None:
    """(unanswered pings + 1) × interval: what the black hole test measures when it has the time."""
    assert (bus_module.MAX_OUTSTANDING_PINGS + 1) * bus_module.PING_INTERVAL_S <= 60


async def test_after_an_outage_it_tries_for_ever_and_never_in_step(
    server: NatsServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a link that dies without a word, then peers that accept and say nothing, then refusals, then it is back."""
    monkeypatch.setattr(bus_module, "PING_INTERVAL_S", 0.2)
    monkeypatch.setattr(client_module, "OPEN_S", 0.3)
    monkeypatch.setattr(bus_module, "RECONNECT_S", 0.05)
    drawn: list[tuple[float, float]] = []

    def short(least: float, most: float) -> float:
        drawn.append((least, most))
        return 0.01

    monkeypatch.setattr(random, "uniform", short)
    seed = (server.directory / f"{WORKER}.seed").read_text()
    bus = Bus(f"ws://127.0.0.1:{proxy.port}", seed, server.names.inbox(WORKER), WORKER)
    await bus.connect()
    drawn.clear()
    again = asyncio.Event()
    bus.on_reconnect(again.set)
    proxy.silence()
    await until(lambda: not bus.connected.is_set(), timeout=5)
    await until(lambda: len(drawn) >= 4)
    proxy.cut()
    await until(lambda: len(drawn) >= 8)
    assert set(drawn) == {(0, client_module.JITTER_S)}
    proxy.mend()
    await asyncio.wait_for(again.wait(), 10)
    assert bus.connected.is_set()
    await bus.client.flush()
    await bus.close()


async def test_replies_wait_for_the_connection_and_are_stored_once(
    server: NatsServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than nats-py buffers while it is away (2 MiB), and it would raise; ours are held."""
    monkeypatch.setattr(bus_module, "PING_INTERVAL_S", 0.2)
    monkeypatch.setattr(client_module, "OPEN_S", 0.5)
    monkeypatch.setattr(client_module, "JITTER_S", 0.1)
    monkeypatch.setattr(artifacts_module, "RETRY_S", (0.05, 0.2))
    core = server.coordinator_bus()
    await core.connect()
    js = core.client.jetstream()
    await js.add_stream(name=server.names.replies, subjects=[server.names.all_replies])
    seed = (server.directory / f"{WORKER}.seed").read_text()
    bus = Bus(f"ws://127.0.0.1:{proxy.port}", seed, server.names.inbox(WORKER), WORKER)
    await bus.connect()
    replies = Replies(bus, server.names)
    proxy.silence()
    await until(lambda: not bus.connected.is_set(), timeout=5)
    held = [
        asyncio.create_task(
            replies.publish(
                Reply(
                    job=f"job-{number}",
                    dispatch=0,
                    worker=WORKER,
                    incarnation="i",
                    kind=ReplyKind.OK,
                    tokens=bytes(100_000),
                )
            )
        )
        for number in range(40)
    ]
    done, _ = await asyncio.wait(held, timeout=0.3)
    assert not done
    assert (await js.stream_info(server.names.replies)).state.messages == 0
    proxy.mend()
    await asyncio.wait_for(asyncio.gather(*held), 15)
    state = (await js.stream_info(server.names.replies, subjects_filter=server.names.all_replies)).state
    assert state.messages == len(state.subjects or {}) == 40
    await bus.close()
    await core.close()
