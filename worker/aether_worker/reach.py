"""The way to the run, taken apart: name, TCP, TLS, WebSocket, key, permissions, coordinator.

Each step raises an `AetherError` that says what to do; the steps after it are pointless then.
"""

import asyncio
import json
import socket
import ssl
import time
from urllib.parse import urlsplit

import aiohttp
import nkeys
from aether_common.bus import Bus, read_seed
from aether_common.errors import AuthorizationError, BusError, DiskError, IdentityError
from aether_common.files import write_durably
from aether_common.names import Names
from aether_common.tls import Tls, explain
from aether_common.wire import CLOCK_SKEW_S, Registration, RegistrationAnswer
from loguru import logger

from aether_worker.settings import WorkerSettings

STEP_S = 5.0
COORDINATOR_S = 5.0
EXPIRES_SOON_S = 14 * 86400.0
ACCEPTED = "accepted-key"
"""In the state directory: the public key that nats-server accepted last, so that a refusal can be told apart."""


def tls_of(settings: WorkerSettings) -> Tls:
    return Tls(settings.tls.ca_file, settings.tls.certificate, settings.tls.private_key)


def headers_of(settings: WorkerSettings) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in settings.headers.items()}


def bus_of(settings: WorkerSettings, seed: str) -> Bus:
    """The worker's connection, not connected yet. Raises `ConfigError` for unusable certificate files."""
    inbox = Names(settings.run).inbox(settings.name)
    return Bus(settings.url, seed, inbox, settings.name, tls_of(settings), headers_of(settings))


def address(settings: WorkerSettings) -> tuple[str, int]:
    """Host and port of the URL."""
    parts = urlsplit(settings.url)
    assert parts.hostname is not None
    return parts.hostname, parts.port or (443 if parts.scheme == "wss" else 80)


async def dns(settings: WorkerSettings) -> str:
    host, port = address(settings)
    try:
        async with asyncio.timeout(STEP_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise BusError(
            f"{host} has no address ({error or 'no answer'}): check the host in url, and DNS here"
        ) from error
    return f"{host} is {', '.join(sorted({str(entry[4][0]) for entry in found}))}"


async def tcp(settings: WorkerSettings) -> str:
    host, port = address(settings)
    began = time.monotonic()
    try:
        async with asyncio.timeout(STEP_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise BusError(f"{host}:{port} does not answer within {STEP_S:.0f} s: is a firewall in the way?") from None
    except ConnectionRefusedError:
        raise BusError(f"nothing listens at {host}:{port}: is nats-server running, is the port right?") from None
    except OSError as error:
        raise BusError(f"{host}:{port} cannot be reached: {error.strerror or error}") from error
    writer.close()
    return f"{host}:{port} answers in {1000 * (time.monotonic() - began):.0f} ms"


async def tls(settings: WorkerSettings) -> str:
    host, port = address(settings)
    if urlsplit(settings.url).scheme != "wss":
        return "none: plain WebSocket on loopback"
    context = tls_of(settings).context()
    try:
        async with asyncio.timeout(STEP_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    except TimeoutError:
        raise BusError(f"{host}:{port} does not answer a TLS handshake within {STEP_S:.0f} s") from None
    except (OSError, ssl.SSLError) as error:
        told = explain(error, settings.url, tls_of(settings)) or str(error)
        raise BusError(f"{host}:{port}: {told}") from error
    certificate = writer.get_extra_info("peercert") or {}
    version = writer.get_extra_info("ssl_object").version()
    writer.close()
    left = ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()
    soon = "; WARNING: renew it" if left < EXPIRES_SOON_S else ""
    return f"{version}, certificate for {host} good for {left / 86400:.0f} days{soon}"


async def websocket(settings: WorkerSettings) -> str:
    """A WebSocket, and a nats-server behind it: it speaks first."""
    context = tls_of(settings).context() if urlsplit(settings.url).scheme == "wss" else True
    url = settings.url.replace("wss:", "https:", 1).replace("ws:", "http:", 1)
    timeout = aiohttp.ClientTimeout(total=2 * STEP_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.ws_connect(url, headers=headers_of(settings), ssl=context) as connection,
        ):
            async with asyncio.timeout(STEP_S):
                greeting = await connection.receive()
            data = greeting.data if isinstance(greeting.data, bytes) else b""
    except TimeoutError:
        raise BusError("it opens a WebSocket, but no nats-server speaks there: check the path, and the proxy") from None
    except (aiohttp.ClientError, OSError) as error:
        told = explain(error, settings.url, tls_of(settings)) or str(error) or type(error).__name__
        raise BusError(f"{settings.url}: {told}") from error
    try:
        info = json.loads(data.removeprefix(b"INFO ").split(b"\r\n")[0]) if data.startswith(b"INFO ") else None
    except ValueError:
        info = None
    if not isinstance(info, dict):
        raise BusError(f"what answers at {settings.url} is no nats-server: check host, port and path")
    return f"nats-server {info.get('version', '?')} ({info.get('server_name', '?')})"


def public_key(settings: WorkerSettings) -> str:
    return bytes(nkeys.from_seed(bytearray(read_seed(settings.key_file).encode())).public_key).decode()


def remember_accepted(settings: WorkerSettings) -> None:
    """After a connect: this key was good. Only a later message tells by it, so a full disk ends nothing."""
    try:
        write_durably(settings.state_dir / ACCEPTED, public_key(settings).encode())
    except DiskError as error:
        logger.warning("it is not noted that the key was accepted: {}", error)


def explain_refusal(settings: WorkerSettings, error: AuthorizationError) -> AuthorizationError:
    """Whether a refused key was good before."""
    try:
        known = (settings.state_dir / ACCEPTED).read_text() == public_key(settings)
    except OSError:
        known = False
    if known:
        text = "was accepted before and is refused now: it was revoked, or replaced by `worker rotate`"
        remedy = f"ask the operator for another: `aether-coordinator worker add {settings.name}`"
    else:
        text = "is not known there"
        remedy = (
            f"does key_file = '{settings.key_file}' hold the seed that `aether-coordinator worker add {settings.name}` "
            "made for this run?"
        )
    return AuthorizationError(f"{settings.url}: the key {public_key(settings)[:12]}… {text}: {remedy} ({error})")


async def ask_coordinator(settings: WorkerSettings, bus: Bus, registration: Registration) -> tuple[str, str]:
    """What the coordinator thinks of this worker, which is not registered by it: (protocol and model, clock).

    Raises `IdentityError` when it would refuse, `BusError` when it cannot be asked.
    """
    subject = Names(settings.run).fleet("reg", settings.name)
    try:
        message = await bus.request(subject, registration.encode(), COORDINATOR_S)
    except BusError as error:
        if "permissions violation" in bus.last_error.lower():
            raise BusError(
                f"the key of {settings.name} may not publish {subject}: name and run must be those that "
                "`aether-coordinator worker add` printed"
            ) from error
        raise BusError(
            f"the coordinator of run {settings.run} does not answer: is it running? (a worker may start before it)"
        ) from error
    answer = RegistrationAnswer.decode(message.data)
    if not answer.accepted:
        raise IdentityError(f"the coordinator would refuse this worker: {answer.reason}")
    skew = answer.clock - time.time() if answer.clock else 0.0
    clock = f"{skew:+.1f} s from the coordinator's"
    if abs(skew) > CLOCK_SKEW_S:
        clock += "; WARNING: set this machine's clock (NTP)"
    return f"it would take this worker, protocol {answer.protocol}", clock
