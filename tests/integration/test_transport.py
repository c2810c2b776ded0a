"""The way between a worker and nats-server: TLS, verified names, client certificates, headers, refused keys."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aether_common.bus import Bus
from aether_common.errors import AuthorizationError, BusError, ConfigError
from aether_common.tls import Tls
from aether_coordinator import certificates
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from loguru import logger
from nats_server import NatsServer, free_port

W1 = "w1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats", hosts=["localhost"]) as started:
        started.add_worker(W1)
        time.sleep(0.1)
        yield started


def bus_to(server: NatsServer, url: str | None = None, tls: Tls | None = None, headers: Any = None) -> Bus:
    seed = (server.directory / f"{W1}.seed").read_text()
    return Bus(url or server.worker_url, seed, server.names.inbox(W1), W1, tls or server.tls, headers)


async def why_not(bus: Bus) -> str:
    """The message of a connect that fails: after an attempt or two, not after the time-out of 10 s."""
    began = time.monotonic()
    try:
        with pytest.raises(BusError) as caught:
            await bus.connect()
    finally:
        await bus.close()
    assert time.monotonic() - began < 8, str(caught.value)
    return str(caught.value)


async def works(bus: Bus) -> bool:
    """A request reaches the other account; nobody answers there."""
    with pytest.raises(BusError, match="no responders"):
        await bus.request("aether.test.fleet.hb.w1", b"", 5)
    return True


async def test_tls_with_the_verified_name(server: NatsServer) -> None:
    assert server.worker_url == f"wss://localhost:{server.websocket_port}"
    bus = bus_to(server)
    await bus.connect()
    assert await works(bus)
    await bus.close()
    # What newer versions of Python demand of certificates.
    bus = bus_to(server)
    assert bus._context is not None
    bus._context.verify_flags |= ssl.VERIFY_X509_STRICT
    await bus.connect()
    await bus.close()
    by_address = bus_to(server, f"wss://127.0.0.1:{server.websocket_port}/with/a/path")
    await by_address.connect()
    await by_address.close()


async def test_another_authority(server: NatsServer, tmp_path: Path) -> None:
    certificates.make_authority(tmp_path, "other")
    assert "from no authority that this system trusts" in await why_not(bus_to(server, tls=Tls()))
    ca_file = tmp_path / "ca.pem"
    assert f"from another authority than that of tls.ca_file = '{ca_file}'" in await why_not(
        bus_to(server, tls=Tls(ca_file))
    )


async def test_a_certificate_for_another_name(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats", hosts=["localhost"]) as server:
        certificates.make_authority(server.directory, "test")
        _issue_for(server.directory, ["somewhere.example"], days=10)
        server.restart()
        server.add_worker(W1)
        await asyncio.sleep(0.1)
        assert "is for another name than 'localhost'" in await why_not(bus_to(server))
        by_address = f"wss://127.0.0.1:{server.websocket_port}"
        assert "is for another name than '127.0.0.1'" in await why_not(bus_to(server, by_address))


async def test_an_expired_certificate_is_renewed_by_replacing_the_files(server: NatsServer) -> None:
    running = bus_to(server)
    await running.connect()
    certificates.issue(server.directory, ["localhost"], days=-1)
    server.reload()
    await asyncio.sleep(0.2)
    assert "has expired: renew it on the server" in await why_not(bus_to(server))
    assert await works(running)
    certificates.issue(server.directory, ["localhost"])
    server.reload()
    await asyncio.sleep(0.2)
    bus = bus_to(server)
    await bus.connect()
    await bus.close()
    await running.close()


async def test_a_port_without_tls_and_the_other_way_round(server: NatsServer) -> None:
    assert "does not speak TLS at that port" in await why_not(bus_to(server, f"wss://localhost:{server.port}"))
    plain = f"ws://localhost:{server.websocket_port}"
    assert "does not accept a plain WebSocket (HTTP 400): is it a TLS port (wss://)?" in await why_not(
        bus_to(server, plain)
    )
    # A coordinator that was told to use TLS does not go on without.
    bus = Bus(f"tls://localhost:{server.port}", server.coordinator.seed, "_INBOX", "coordinator", server.tls)
    with pytest.raises(BusError, match="offers no TLS at that port"):
        await bus.connect(2)
    await bus.close()


async def test_nobody_listens_and_nobody_answers(server: NatsServer) -> None:
    bus = bus_to(server, f"wss://localhost:{free_port()}")
    with pytest.raises(BusError, match=r"within 1 s: .*Connect"):
        await bus.connect(1)
    await bus.close()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        bus = bus_to(server, f"wss://localhost:{port}")
        began = time.monotonic()
        with pytest.raises(BusError, match="within 1 s"):
            await bus.connect(1)
        await bus.close()
        assert time.monotonic() - began < 8  # nats-py alone: a minute and more.


async def test_a_client_certificate(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.mkdir()
    certificates.make_authority(clients, "clients")
    certificate, key = _client_certificate(clients)
    with NatsServer(tmp_path / "nats", hosts=["localhost"], client_ca=clients / "ca.pem") as server:
        server.add_worker(W1)
        await asyncio.sleep(0.1)
        bus = bus_to(server, tls=Tls(server.directory / "ca.pem", certificate, key))
        await bus.connect()
        assert await works(bus)
        await bus.close()
        assert "demands a client certificate: set tls.certificate and tls.private_key" in await why_not(bus_to(server))
        other = tmp_path / "other"
        other.mkdir()
        certificates.make_authority(other, "other")
        pair = _client_certificate(other)
        refused = await why_not(bus_to(server, tls=Tls(server.directory / "ca.pem", *pair)))
        assert f"refuses the client certificate tls.certificate = '{pair[0]}'" in refused


def test_bad_files_are_named(tmp_path: Path) -> None:
    certificates.make_authority(tmp_path, "test")
    certificates.issue(tmp_path, ["localhost"])
    text = tmp_path / "text"
    text.write_text("text")
    ca, pair = tmp_path / "ca.pem", (tmp_path / "server.pem", tmp_path / "server.key")
    for tls, message in (
        (Tls(tmp_path / "none"), f"tls.ca_file = '{tmp_path / 'none'}' cannot be read: No such file"),
        (Tls(text), f"tls.ca_file = '{text}' holds no PEM certificate"),
        (Tls(ca, tmp_path / "none", pair[1]), f"tls.certificate = '{tmp_path / 'none'}' cannot be read"),
        (Tls(ca, pair[0], text), f"tls.private_key = '{text}' cannot be used: no unencrypted PEM pair"),
        (Tls(ca, pair[0], tmp_path / "ca.key"), "cannot be used: they do not belong together"),
        (Tls(text, table="nats"), "nats.ca_file = "),
    ):
        with pytest.raises(ConfigError) as caught:
            tls.context()
        assert message in str(caught.value)


async def test_a_proxy_that_ends_tls_gets_its_headers_and_they_are_never_told(tmp_path: Path) -> None:
    certificates.make_authority(tmp_path, "proxy")
    certificates.issue(tmp_path, ["localhost"])
    tls = Tls(tmp_path / "ca.pem")
    with NatsServer(tmp_path / "nats") as server:
        server.add_worker(W1)
        await asyncio.sleep(0.1)
        async with proxy(server.worker_url, "secret-7", tmp_path) as url:
            bus = bus_to(server, url, tls, {"X-Token": "secret-7"})
            await bus.connect()
            assert await works(bus)
            await bus.close()
            refused = await why_not(bus_to(server, url, tls, {"X-Token": "secret-8"}))
            assert "answers HTTP 403 instead of opening a WebSocket: the proxy wants other [headers]" in refused
            assert "secret" not in refused


async def test_revoked_while_connected_is_refused_at_once(server: NatsServer) -> None:
    server.add_worker("w2")
    await asyncio.sleep(0.1)
    bus, other = bus_to(server), server.worker_bus("w2")
    await bus.connect()
    await other.connect()
    began = time.monotonic()
    server.revoke_worker(W1)
    with pytest.raises(AuthorizationError, match=r"refuses the key of w1.*revoked"):
        await asyncio.wait_for(bus.raise_when_refused(), 5)
    # Within a second (0.05 s was measured), and one more for a machine that is busy.
    assert time.monotonic() - began < 2
    assert other.connected.is_set()
    assert not other.refused.is_set()
    await bus.close()
    await other.close()


async def test_one_refusal_while_connecting_is_not_the_end(server: NatsServer) -> None:
    """A server that comes back before its workers.conf is whole refuses a good key once."""
    bus = bus_to(server)
    await bus.connect()
    again = asyncio.Event()
    bus.on_reconnect(again.set)
    users = server.workers_conf.read_text()
    server.kill()
    server.workers_conf.write_text("users: []\n")
    server.start()
    while bus._refused_at is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    server.workers_conf.write_text(users)
    server.reload()
    await asyncio.wait_for(again.wait(), 15)
    assert not bus.refused.is_set()
    assert await works(bus)
    # A key that stays unknown is refused at the second attempt.
    server.kill()
    server.workers_conf.write_text("users: []\n")
    server.start()
    with pytest.raises(AuthorizationError):
        await asyncio.wait_for(bus.raise_when_refused(), 15)
    await bus.close()


async def test_another_error_of_the_server_is_followed_by_a_reconnect(server: NatsServer) -> None:
    bus = bus_to(server)
    await bus.connect()
    again = asyncio.Event()
    bus.on_reconnect(again.set)
    # More than the account's limit, less than the client's own check.
    bus.client._max_payload = 1 << 30
    await bus.client.publish("aether.test.replies.w1.j1", bytes(9 << 20))
    await asyncio.wait_for(again.wait(), 15)
    assert await works(bus)
    await bus.close()


async def test_a_reconnect_survives_what_nats_py_does_not_expect(server: NatsServer) -> None:
    bus = bus_to(server)
    await bus.connect()
    again = asyncio.Event()
    bus.on_reconnect(again.set)
    calls = 0
    flush = bus.client.flush

    async def failing(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise RuntimeError("Concurrent call to receive() is not allowed")
        await flush(*arguments)

    bus.client.flush = failing  # type: ignore[method-assign]
    server.restart()
    await asyncio.wait_for(again.wait(), 20)
    assert calls == 3
    assert await works(bus)
    await bus.close()


async def test_a_server_that_comes_back_with_an_expired_certificate_is_told(server: NatsServer) -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="WARNING", format="{message}")
    bus = bus_to(server)
    await bus.connect()
    again = asyncio.Event()
    bus.on_reconnect(again.set)
    server.kill()
    certificates.issue(server.directory, ["localhost"], days=-1)
    server.start()
    for _ in range(200):
        if any("has expired" in line for line in lines):
            break
        await asyncio.sleep(0.05)
    certificates.issue(server.directory, ["localhost"])
    server.reload()
    await asyncio.wait_for(again.wait(), 15)
    logger.remove(sink)
    assert sum("has expired" in line for line in lines) == 1
    await bus.close()


# ---- what the tests need -------------------------------------------------------------------------


@asynccontextmanager
async def proxy(upstream: str, token: str, certificate: Path) -> AsyncGenerator[str]:
    """The URL of a proxy that ends TLS and demands a header."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "server.pem", certificate / "server.key")

    async def relay(request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-Token") != token:
            raise web.HTTPForbidden
        inner = web.WebSocketResponse(max_msg_size=0)
        await inner.prepare(request)
        async with aiohttp.ClientSession() as session, session.ws_connect(upstream, max_msg_size=0) as outer:

            async def pump(source: Any, target: Any) -> None:
                async for message in source:
                    await target.send_bytes(message.data)
                await target.close()

            await asyncio.gather(pump(inner, outer), pump(outer, inner))
        return inner

    app = web.Application()
    app.router.add_get("/nats", relay)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield f"wss://127.0.0.1:{runner.addresses[0][1]}/nats"
    await runner.cleanup()


def _issue_for(directory: Path, names: list[str], days: int) -> None:
    """A server certificate for these names alone."""
    _signed(directory, "server", [x509.DNSName(name) for name in names], ExtendedKeyUsageOID.SERVER_AUTH, days)


def _client_certificate(directory: Path) -> tuple[Path, Path]:
    return _signed(directory, "client", [x509.DNSName(W1)], ExtendedKeyUsageOID.CLIENT_AUTH, 10)


def _signed(
    directory: Path, stem: str, names: list[x509.GeneralName], usage: x509.ObjectIdentifier, days: int
) -> tuple[Path, Path]:
    """An independent way to a certificate from the authority in `directory`."""
    authority = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
    signer = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, stem)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    certificate, private = directory / f"{stem}.pem", directory / f"{stem}.key"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, private
