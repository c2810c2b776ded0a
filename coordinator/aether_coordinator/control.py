"""The control endpoint: `GET /status`, `POST /pause` and `POST /resume`, on loopback.

The status is open to local programs; what changes the run needs the token of `endpoint.json`, which
only the user of the run can read.
"""

import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aether_common.errors import AetherError
from aether_common.files import write_durably
from aiohttp import web

from aether_coordinator.loopback import OPENER, check_local, check_secret, serve_loopback
from aether_coordinator.status import RunStatus

ENDPOINT = "endpoint.json"


class Control:
    """Serves the endpoint and tells its address in the run directory."""

    def __init__(
        self,
        run_root: Path,
        *,
        status: Callable[[], RunStatus],
        pause: Callable[[bool], Awaitable[None]],
        websocket_url: str | None,
    ) -> None:
        self._run_root = run_root
        self._status = status
        self._pause = pause
        self._websocket_url = websocket_url
        self._token = secrets.token_urlsafe(32)

    async def serve(self, port: int) -> None:
        """Listen until cancelled."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/status", self._get_status)
        app.router.add_post("/pause", self._post_pause)
        app.router.add_post("/resume", self._post_resume)
        try:
            await serve_loopback(app, port, "control.port", self._tell)
        finally:
            (self._run_root / ENDPOINT).unlink(missing_ok=True)

    def _tell(self, port: int) -> None:
        url = f"http://127.0.0.1:{port}"
        endpoint = {
            "pid": os.getpid(),
            "url": url,
            "status_url": f"{url}/status",
            "token": self._token,
            "websocket_url": self._websocket_url,
        }
        write_durably(self._run_root / ENDPOINT, json.dumps(endpoint).encode(), mode=0o600)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        refused = check_local(request)
        if refused is None and request.method != "GET":
            refused = check_secret(request, self._token)
        return refused if refused is not None else await handler(request)

    async def _get_status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._status().model_dump_json(), content_type="application/json")

    async def _post_pause(self, _: web.Request) -> web.Response:
        await self._pause(True)
        return web.json_response({"paused": True})

    async def _post_resume(self, _: web.Request) -> web.Response:
        await self._pause(False)
        return web.json_response({"paused": False})


def call(run_root: Path, path: str, *, post: bool = False) -> bytes:
    """Ask the coordinator that runs on `run_root`. Raises `AetherError` when none answers."""
    try:
        endpoint = json.loads((run_root / ENDPOINT).read_text())
        request = urllib.request.Request(
            endpoint["url"] + path,
            method="POST" if post else "GET",
            headers={"Authorization": f"Bearer {endpoint['token']}"} if post else {},
        )
        with OPENER.open(request, timeout=10) as response:
            return response.read()
    except (FileNotFoundError, urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise AetherError(
            f"no coordinator answers on {run_root} ({error}): start it with `aether-coordinator run server.toml`"
        ) from None
