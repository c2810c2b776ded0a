"""The coordinator's HTTP endpoints: who may call, and serving an application until cancelled.

They are for programs, mostly on this machine: a request must name a host that is ours (a web page
that re-binds its name to loopback does not) and has no origin (no browser sends it), and shows the
endpoint's secret where there is one.
"""

import asyncio
import hmac
import urllib.request
from collections.abc import Callable, Iterable

from aether_common.errors import AetherError, ConfigError
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

LOCAL = ("127.0.0.1", "localhost", "::1")
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of their family, and how this machine reaches them."""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""For requests to this machine: what `http_proxy` names must neither see nor answer them."""


def refuse(status: int, kind: str, message: str) -> web.Response:
    """An error answer in the shape of the OpenAI interface."""
    return web.json_response({"error": {"message": f"{kind}: {message}", "type": kind, "code": kind}}, status=status)


def guard(
    secret: str,
    on_refused: Callable[[str], None],
    *,
    hosts: Iterable[str] = (),
    open_reading: bool = False,
) -> Middleware:
    """A middleware that lets through who may call; `on_refused` is told why another may not.

    `hosts` are names of this endpoint besides loopback; with `open_reading` GET needs no secret.
    """
    known = {name.lower() for name in (*LOCAL, *hosts)}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = host_name(request.headers.get("Host", ""))
        if host not in known:
            on_refused(f"{_shown(request)}: the Host header names {host[:80]!r}")
            return refuse(403, "forbidden", "this endpoint is not called by that name (Host header)")
        if "Origin" in request.headers:
            on_refused(f"{_shown(request)}: from a web page of {request.headers['Origin'][:80]!r}")
            return refuse(403, "forbidden", "web pages may not use this endpoint (Origin header)")
        if not (open_reading and request.method == "GET") and not has_secret(request, secret):
            on_refused(f"{_shown(request)}: the secret is missing or wrong")
            return refuse(401, "unauthorized", "the secret is missing or wrong")
        return await handler(request)

    return check


def _shown(request: web.Request) -> str:
    return f"{request.method} {request.path[:80]} from {request.remote}"


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def has_secret(request: web.Request, secret: str) -> bool:
    """Whether the request shows the secret as bearer token; takes as long for every wrong one."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return scheme == "Bearer" and hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def port_in_use(setting: str, port: int) -> AetherError:
    return ConfigError(f"{setting} = {port}: the port is in use by another process: set another, or 0 for a free one")


async def serve_http(
    app: web.Application, port: int, setting: str, listening: Callable[[int], None], host: str = "127.0.0.1"
) -> None:
    """Serve `app` until cancelled; `listening` gets the port. Raises `ConfigError` when it cannot be had.

    `setting` is the table of settings that has `port`, and `host` unless it is loopback.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            if host != "127.0.0.1":
                raise ConfigError(f"{setting}.host = {host!r}, port {port}: cannot listen: {error.strerror}") from error
            raise port_in_use(f"{setting}.port", port) from error
        listening(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
