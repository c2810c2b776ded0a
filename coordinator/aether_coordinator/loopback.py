"""HTTP on loopback: who may call, and serving an application until cancelled."""

import asyncio
import hmac
import urllib.request
from collections.abc import Callable

from aether_common.errors import AetherError, ConfigError
from aiohttp import web

LOCAL = ("127.0.0.1", "localhost", "[::1]")
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""For requests to this machine: what `http_proxy` names must neither see nor answer them."""


def refuse(status: int, kind: str, message: str) -> web.Response:
    """An error answer in the shape of the OpenAI interface."""
    return web.json_response({"error": {"message": f"{kind}: {message}", "type": kind, "code": kind}}, status=status)


def check_local(request: web.Request) -> web.Response | None:
    """An answer for callers that are no local program: another host name (DNS rebinding) or a browser's origin."""
    if request.host.rsplit(":", 1)[0] not in LOCAL or "Origin" in request.headers:
        return refuse(403, "forbidden", "only local programs may use this endpoint")
    return None


def check_secret(request: web.Request, secret: str) -> web.Response | None:
    """An answer for callers without the secret as bearer token."""
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), secret.encode()):
        return refuse(401, "unauthorized", "the secret is missing or wrong")
    return None


def port_in_use(setting: str, port: int) -> AetherError:
    return ConfigError(f"{setting} = {port}: the port is in use by another process: set another, or 0 for a free one")


async def serve_loopback(app: web.Application, port: int, setting: str, listening: Callable[[int], None]) -> None:
    """Serve `app` on 127.0.0.1 until cancelled; `listening` gets the port. Raises `ConfigError` when it is taken."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise port_in_use(setting, port) from error
        listening(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
