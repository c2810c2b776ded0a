"""The control endpoint: `GET /status`, and `POST /pause`, `/resume` and `/workers` (look at their files again).

On loopback the status is open to local programs, and what changes the run needs the token of
`endpoint.json`, which only the user of the run can read. With a configured token everything needs it.
"""

import http.client
import json
import os
import secrets
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

from aether_common.bus import in_url
from aether_common.errors import AetherError, ConfigError
from aether_common.files import write_durably
from aiohttp import web

from aether_coordinator.loopback import ANY, OPENER, guard, serve_http
from aether_coordinator.settings import ControlSettings
from aether_coordinator.status import RunStatus

ENDPOINT = "endpoint.json"
MIN_TOKEN = 32


class Control:
    """Serves the endpoint and tells its address in the run directory. Raises `ConfigError` for a bad token file."""

    def __init__(
        self,
        run_root: Path,
        settings: ControlSettings,
        *,
        status: Callable[[], RunStatus],
        pause: Callable[[bool], Awaitable[None]],
        workers: Callable[[], Awaitable[None]],
        on_refused: Callable[[str], None],
        websocket_url: str | None,
    ) -> None:
        self._run_root = run_root
        self._settings = settings
        self._status = status
        self._pause = pause
        self._workers = workers
        self._on_refused = on_refused
        self._websocket_url = websocket_url
        self._token = read_token(settings.token_file) if settings.token_file else secrets.token_urlsafe(32)

    async def serve(self) -> None:
        """Listen until cancelled."""
        settings = self._settings
        check = guard(
            self._token,
            self._on_refused,
            hosts=(settings.host, *settings.allowed_hosts),
            open_reading=settings.token_file is None,
        )
        app = web.Application(middlewares=[check], client_max_size=1 << 16)
        app.router.add_get("/status", self._get_status)
        app.router.add_post("/pause", self._post_pause)
        app.router.add_post("/resume", self._post_resume)
        app.router.add_post("/workers", self._post_workers)
        try:
            await serve_http(app, settings.port, "control", self._tell, settings.host)
        finally:
            (self._run_root / ENDPOINT).unlink(missing_ok=True)

    def _tell(self, port: int) -> None:
        host = ANY.get(self._settings.host, self._settings.host)
        url = f"http://{in_url(host)}:{port}"
        endpoint = {
            "pid": os.getpid(),
            "url": url,
            "status_url": f"{url}/status",
            "token": self._token,
            "websocket_url": self._websocket_url,
        }
        write_durably(self._run_root / ENDPOINT, json.dumps(endpoint).encode(), mode=0o600)

    async def _get_status(self, _: web.Request) -> web.Response:
        return web.Response(text=self._status().model_dump_json(), content_type="application/json")

    async def _post_pause(self, _: web.Request) -> web.Response:
        await self._pause(True)
        return web.json_response({"paused": True})

    async def _post_resume(self, _: web.Request) -> web.Response:
        await self._pause(False)
        return web.json_response({"paused": False})

    async def _post_workers(self, _: web.Request) -> web.Response:
        await self._workers()
        return web.json_response({})


def read_token(path: Path) -> str:
    """The token in a file. Raises `ConfigError` when it is missing, open to others or too short."""
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"control.token_file = '{path}': cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"control.token_file = '{path}': is readable by others: chmod 600 {path}")
    if len(token) < MIN_TOKEN or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(
            f"control.token_file = '{path}': holds no token of at least {MIN_TOKEN} characters: write one with "
            f"`openssl rand -hex 32 > {path}`"
        )
    return token


def call(run_root: Path, path: str, *, post: bool = False) -> bytes:
    """Ask the coordinator that runs on `run_root`. Raises `AetherError` when none answers."""
    try:
        endpoint = json.loads((run_root / ENDPOINT).read_text())
        request = urllib.request.Request(
            endpoint["url"] + path,
            method="POST" if post else "GET",
            headers={"Authorization": f"Bearer {endpoint['token']}"},
        )
        with OPENER.open(request, timeout=10) as response:
            return response.read()
    except PermissionError:
        raise AetherError(f"{run_root / ENDPOINT} cannot be read: ask as the user of the run") from None
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        # No file, nobody there, or what a killed coordinator left behind, and another program on its port.
        raise AetherError(
            f"no coordinator answers on {run_root} ({error}): start it with `aether-coordinator run server.toml`"
        ) from None
