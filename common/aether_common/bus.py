"""The connection to nats-server: bounded connects, jittered reconnects, authorization errors said.

Workers connect by `wss://` (or `ws://` to loopback), the coordinator by `tls://` (or `nats://` to
loopback).
"""

import asyncio
import ipaddress
import random
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import nats.errors
from loguru import logger
from nats.aio.client import Client
from nats.aio.msg import Msg

from aether_common.errors import AuthorizationError, BusError, ConfigError

_SEED = re.compile(r"S[A-Z2-7]{57}")

CONNECT_TIMEOUT_S = 10.0
PING_INTERVAL_S = 20
MAX_OUTSTANDING_PINGS = 2
RECONNECT_S = (0.5, 2.0)
SAME_ATTEMPT_S = 0.3
"""Errors closer together than this, below the wait between attempts, belong to one attempt to connect."""


def check_url(url: str, schemes: dict[str, bool]) -> str:
    """Check a server URL. `schemes` maps the allowed ones to whether they are encrypted.

    Raises `ValueError`; plain schemes are accepted for loopback only.
    """
    parts = urlsplit(url)
    if parts.scheme not in schemes:
        raise ValueError(f"{url!r}: the scheme must be one of {', '.join(schemes)}")
    if not parts.hostname:
        raise ValueError(f"{url!r}: no host")
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

    def __init__(self, url: str, seed: str, inbox: str, name: str, ca_file: Path | None = None) -> None:
        self._url = url
        self._seed = seed
        self._inbox = inbox
        self._name = name
        self._ca_file = ca_file
        self._last_error: Exception | None = None
        self._refused_at: float | None = None
        self._on_reconnect: list[Callable[[], None]] = []
        self.client = Client()
        self.connected = asyncio.Event()
        self.refused = asyncio.Event()
        """Set when the server said twice that the credential is not, or no longer, good."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every reconnect; outstanding requests of before are lost."""
        self._on_reconnect.append(callback)

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect once. Raises `AuthorizationError` or `BusError` that names the server and the cause."""
        tls: ssl.SSLContext | None = None
        if urlsplit(self._url).scheme in ("wss", "tls"):
            tls = ssl.create_default_context(cafile=self._ca_file)
        attempt = asyncio.ensure_future(
            self.client.connect(
                servers=[self._url],
                name=self._name,
                tls=tls,
                nkeys_seed_str=self._seed,
                inbox_prefix=self._inbox,
                connect_timeout=5,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=MAX_OUTSTANDING_PINGS,
                max_reconnect_attempts=-1,
                # nats-py has no jitter: every client draws its own wait instead.
                reconnect_time_wait=random.uniform(*RECONNECT_S),  # type: ignore[arg-type]
                error_cb=self._error,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
            )
        )
        refused = asyncio.ensure_future(self.refused.wait())
        await asyncio.wait([attempt, refused], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        refused.cancel()
        if self.refused.is_set():
            attempt.cancel()
            raise self.refusal()
        if not attempt.done():
            attempt.cancel()
            cause = f": {self._last_error}" if self._last_error else ""
            raise BusError(f"no connection to nats-server at {self._url} within {timeout_s:.0f} s{cause}")
        if error := attempt.exception():
            raise BusError(f"no connection to nats-server at {self._url}: {error}") from error
        self._refused_at = None
        self.connected.set()

    def refusal(self) -> AuthorizationError:
        return AuthorizationError(
            f"nats-server at {self._url} refuses the key of {self._name}: it is unknown or revoked: "
            f"make one with `aether-coordinator worker add`"
        )

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
        self._last_error = error
        text = str(error).lower()
        if "authorization" in text or "authentication" in text:
            # A server that reloads its users refuses good keys for an instant: the next attempt decides.
            now = time.monotonic()
            if self._refused_at is None:
                self._refused_at = now
            elif now - self._refused_at > SAME_ATTEMPT_S:
                self.refused.set()
        else:
            logger.debug("nats: {}", error)

    async def _disconnected(self) -> None:
        if self.connected.is_set():
            logger.warning("connection to nats-server lost, reconnecting")
        self.connected.clear()

    async def _reconnected(self) -> None:
        self._refused_at = None
        logger.info("connected to nats-server again")
        self.connected.set()
        for callback in self._on_reconnect:
            callback()
