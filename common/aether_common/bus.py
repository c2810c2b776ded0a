"""The connection to nats-server: bounded connects, jittered reconnects, authorization errors said.

Workers connect by `wss://` (or `ws://` to loopback), the coordinator by `tls://` (or `nats://` to
loopback).
"""

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import nats.errors
from loguru import logger
from nats.aio.msg import Msg

from aether_common.client import RECONNECT_S, ResilientClient, is_authorization
from aether_common.errors import AuthorizationError, BusError, ConfigError
from aether_common.tls import Tls, explain

_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_SEED = re.compile(r"S[A-Z2-7]{57}")

CONNECT_TIMEOUT_S = 10.0
PING_INTERVAL_S = 20
MAX_OUTSTANDING_PINGS = 2
SAME_ATTEMPT_S = 0.3
"""Errors closer together than this, below the wait between attempts, belong to one attempt to connect."""


def check_url(url: str, schemes: dict[str, bool]) -> str:
    """Check a server URL. `schemes` maps the allowed ones to whether they are encrypted.

    Raises `ValueError`; plain schemes are accepted for loopback only.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    if parts.scheme not in schemes:
        raise ValueError(f"{url!r}: the scheme must be one of {', '.join(schemes)}")
    if not parts.hostname:
        raise ValueError(f"{url!r}: no host")
    if "@" in parts.netloc:
        raise ValueError("no user and password in the url: the key file says who connects")
    if not schemes[parts.scheme] and not is_loopback(parts.hostname):
        encrypted = ", ".join(scheme for scheme, secure in schemes.items() if secure)
        raise ValueError(f"{url!r}: unencrypted connections are accepted to loopback only: use {encrypted}")
    return url


WORKER_SCHEMES = {"wss": True, "ws": False}
COORDINATOR_SCHEMES = {"tls": True, "nats": False}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(name: str) -> str:
    """A DNS name or an IP address, as it stands in a certificate and a URL. Raises `ValueError`."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if len(name) > 253 or not _HOST.fullmatch(name):
            raise ValueError(
                f"{name!r} is no host name and no IP address: give the name alone, without scheme and port"
            ) from None
        return name.lower()


def in_url(host: str) -> str:
    """A host as it stands in front of a port: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def read_seed(path: Path) -> str:
    """The nkey seed in a file. Raises `ConfigError` when it is missing, open to others or no seed."""
    if _SEED.fullmatch(path.name):
        raise ConfigError("a key file was given as the seed itself: write the seed to a file (chmod 600) and name that")
    try:
        mode = path.stat().st_mode
        seed = path.read_text().strip()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such key file: make one with `aether-coordinator worker add NAME`") from None
    except OSError as error:
        raise ConfigError(f"{path}: key file cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"{path}: the key file is readable by others: chmod 600 {path}")
    if not seed.startswith("SU"):
        raise ConfigError(f"{path}: holds no user nkey seed (it starts with SU)")
    return seed


class Bus:
    """One connection for the life of a process; it reconnects for ever except when refused."""

    def __init__(
        self,
        url: str,
        seed: str,
        inbox: str,
        name: str,
        tls: Tls = Tls(),  # noqa: B008 (frozen)
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers` go with the request that opens a WebSocket. Raises `ConfigError` for unusable files of `tls`."""
        self._url = url
        self._seed = seed
        self._inbox = inbox
        self._name = name
        self._tls = tls
        self._context = tls.context() if urlsplit(url).scheme in ("wss", "tls") else None
        self._headers = {key: [value] for key, value in headers.items()} if headers else None
        self._last_error: Exception | None = None
        self._established = False
        self._told = ""
        """The last cause that was logged, so that a long outage is not told again for every attempt."""
        self._refused_at: float | None = None
        self._on_reconnect: list[Callable[[], None]] = []
        self.client = ResilientClient(self._revoked)
        self.connected = asyncio.Event()
        self.refused = asyncio.Event()
        """Set when the server says that the credential is no longer good, or twice when connecting."""
        self._hopeless = asyncio.Event()
        """Set when the first connect fails for a reason that trying again does not cure."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every reconnect; outstanding requests of before are lost."""
        self._on_reconnect.append(callback)

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect once. Raises `AuthorizationError` or `BusError` that names the server and the cause."""
        attempt = asyncio.ensure_future(
            self.client.connect(
                servers=[self._url],
                name=self._name,
                tls=self._context,
                nkeys_seed_str=self._seed,
                inbox_prefix=self._inbox,
                connect_timeout=5,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=MAX_OUTSTANDING_PINGS,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_S,  # type: ignore[arg-type]
                ws_connection_headers=self._headers,
                error_cb=self._error,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
            )
        )
        given_up = [asyncio.ensure_future(event.wait()) for event in (self.refused, self._hopeless)]
        await asyncio.wait([attempt, *given_up], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for waiter in given_up:
            waiter.cancel()
        if self.refused.is_set():
            attempt.cancel()
            raise self.refusal()
        if not attempt.done():
            attempt.cancel()
            if self._hopeless.is_set():
                raise BusError(f"no connection to nats-server at {self._url}: {self._cause()}")
            cause = f": {self._cause()}" if self._last_error else ""
            raise BusError(f"no connection to nats-server at {self._url} within {timeout_s:.0f} s{cause}")
        if error := attempt.exception():
            raise BusError(f"no connection to nats-server at {self._url}: {error}") from error
        self._refused_at = None
        self._established = True
        self.connected.set()

    def _cause(self) -> str:
        """The last error, in words that say what to do where it is known."""
        error = self._last_error
        if error is None:
            return ""
        if isinstance(error, TimeoutError):
            return "no answer"
        return explain(error, self._url, self._tls) or str(error) or type(error).__name__

    @property
    def last_error(self) -> str:
        """What the server or the connection complained about last, empty if nothing."""
        return str(self._last_error or "")

    def refusal(self) -> AuthorizationError:
        remedy = "make one with `aether-coordinator worker add`"
        if urlsplit(self._url).scheme in COORDINATOR_SCHEMES:
            remedy = "key_file must hold the seed of the coordinator's key in that server's configuration"
        return AuthorizationError(
            f"nats-server at {self._url} refuses the key of {self._name}: it is unknown or revoked: {remedy}"
        )

    async def raise_when_refused(self) -> None:
        """Wait for ever, or until the server refuses the key: then raises `AuthorizationError`."""
        await self.refused.wait()
        raise self.refusal()

    async def close(self) -> None:
        """Close within 2 s; what is not flushed by then is dropped."""
        self.connected.clear()
        # `asyncio.wait_for` surfaced CancelledError here after a server kill.
        task = asyncio.ensure_future(self._close())
        await asyncio.wait([task], timeout=2)

    async def _close(self) -> None:
        await self.client.close()
        # A client that was refused, or never connected, counts as closed and keeps its websocket session.
        transport = getattr(self.client, "_transport", None)
        if transport:
            transport.close()
            await transport.wait_closed()

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Msg:
        """A request while connected. Raises `BusError` without responder, connection or answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.connected.wait()
                return await self.client.request(subject, payload, timeout=timeout_s)
        except (TimeoutError, nats.errors.Error) as error:
            raise BusError(f"no answer on {subject}: {error or type(error).__name__}") from error

    async def _error(self, error: Exception) -> None:
        """Told of every failed attempt to connect, of a lost connection, and of errors that the server reports."""
        self._last_error = error
        if is_authorization(str(error)):
            # A server that reloads its users refuses good keys for an instant: the next attempt decides.
            now = time.monotonic()
            if self.client.sent_away:
                self.refused.set()
            elif self._refused_at is None:
                self._refused_at = now
            elif now - self._refused_at > SAME_ATTEMPT_S:
                self.refused.set()
            return
        if not self._established:
            if explain(error, self._url, self._tls):
                self._hopeless.set()
        elif not isinstance(error, nats.errors.UnexpectedEOF) and (cause := self._cause()) != self._told:
            self._told = cause
            logger.warning("nats-server at {}: {}", self._url, cause)
        logger.debug("nats: {}", error)

    async def _revoked(self, text: str) -> None:
        logger.debug("nats: {}", text)
        self.refused.set()

    async def _disconnected(self) -> None:
        if self.connected.is_set() and not self.refused.is_set():
            logger.warning("connection to nats-server lost, reconnecting")
        self.connected.clear()

    async def _reconnected(self) -> None:
        self._refused_at = None
        self._told = ""
        logger.info("connected to nats-server again")
        self.connected.set()
        for callback in self._on_reconnect:
            callback()
