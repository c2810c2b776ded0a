"""The control endpoint: who may call it, on loopback and elsewhere."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aether_common.errors import AetherError, ConfigError
from aether_coordinator.control import Control, call, read_token
from aether_coordinator.settings import ControlSettings
from aether_coordinator.status import RunStatus
from pydantic import ValidationError

TOKEN = "0123456789abcdef" * 2


class Served:
    """A control endpoint that runs, and what it was asked."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.asked: list[str] = []
        self.refused: list[str] = []
        self.control = Control(
            root,
            ControlSettings.model_validate(settings),
            status=lambda: RunStatus(run="r", run_uuid="u", state="running"),
            pause=self._pause,
            workers=self._workers,
            on_refused=self.refused.append,
            websocket_url=None,
        )

    async def _pause(self, paused: bool) -> None:
        self.asked.append(f"pause {paused}")

    async def _workers(self) -> None:
        self.asked.append("workers")

    @property
    def endpoint(self) -> dict[str, Any]:
        return json.loads((self.root / "endpoint.json").read_text())

    async def ask(self, method: str, path: str, url: str = "", **headers: str) -> int:
        async with (
            aiohttp.ClientSession() as client,
            client.request(method, (url or self.endpoint["url"]) + path, headers=headers) as response,
        ):
            return response.status


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    tasks: list[asyncio.Task[None]] = []

    async def start(**settings: Any) -> Served:
        served = Served(tmp_path, **settings)
        tasks.append(asyncio.create_task(served.control.serve()))
        async with asyncio.timeout(10):
            while not (tmp_path / "endpoint.json").exists() and not tasks[-1].done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if tasks[-1].done():
            tasks[-1].result()
        return served

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def other_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        if not (found := probe.getsockname()[0]).startswith("127."):
            return found
    pytest.skip("this machine has no address but loopback")


async def test_on_loopback_the_status_is_open_and_changes_need_the_token(serve: Serve) -> None:
    served = await serve()
    assert (served.root / "endpoint.json").stat().st_mode & 0o777 == 0o600
    assert await served.ask("GET", "/status") == 200
    for path in ("/pause", "/resume", "/workers"):
        assert await served.ask("POST", path) == 401
        assert await served.ask("POST", path, **bearer("x" * 43)) == 401
        assert await served.ask("POST", path, **bearer("")) == 401
    assert served.asked == []
    token = served.endpoint["token"]
    for path in ("/pause", "/resume", "/workers"):
        assert await served.ask("POST", path, **bearer(token)) == 200
    assert served.asked == ["pause True", "pause False", "workers"]
    assert len(served.refused) == 9 and all("the secret is missing or wrong" in reason for reason in served.refused)


async def test_other_names_and_web_pages_are_refused(serve: Serve) -> None:
    served = await serve(allowed_hosts=["Run.Example"])
    token = served.endpoint["token"]
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "[::2]",
        "",
        "run.example.evil",
    ):
        assert await served.ask("GET", "/status", Host=host) == 403, host
        assert await served.ask("POST", "/pause", Host=host, **bearer(token)) == 403, host
    for host in ("localhost", "LOCALHOST:99", "[::1]:99", "127.0.0.1", "run.example:443", "RUN.EXAMPLE"):
        assert await served.ask("GET", "/status", Host=host) == 200, host
    for origin in ("http://127.0.0.1", "null", served.endpoint["url"]):
        assert await served.ask("POST", "/pause", Origin=origin, **bearer(token)) == 403
    assert served.asked == []
    assert "GET /status from 127.0.0.1: the Host header names 'evil.example'" in served.refused
    assert not any(token in reason for reason in served.refused)


async def test_elsewhere_everything_needs_the_token_of_the_file(serve: Serve, token_file: Path) -> None:
    address = other_address()
    served = await serve(host=address, token_file=token_file)
    url = served.endpoint["url"]
    assert url.startswith(f"http://{address}:") and served.endpoint["token"] == TOKEN
    assert await served.ask("GET", "/status") == 401
    assert await served.ask("GET", "/nothing") == 401
    assert await served.ask("GET", "/status", **bearer(TOKEN[:-1])) == 401
    assert await served.ask("GET", "/status", **bearer(TOKEN)) == 200
    assert await served.ask("GET", "/status", Host="evil.example", **bearer(TOKEN)) == 403
    # The command line finds address and token in endpoint.json.
    assert RunStatus.model_validate_json(await asyncio.to_thread(call, served.root, "/status")).run == "r"
    await asyncio.to_thread(call, served.root, "/workers", post=True)
    assert served.asked == ["workers"]


async def test_all_addresses_are_called_by_their_names_only(serve: Serve, token_file: Path) -> None:
    served = await serve(host="0.0.0.0", token_file=token_file, allowed_hosts=[other_address()])
    assert served.endpoint["url"].startswith("http://127.0.0.1:")
    port = served.endpoint["url"].rsplit(":", 1)[1]
    assert await served.ask("GET", "/status", **bearer(TOKEN)) == 200
    assert await served.ask("GET", "/status", url=f"http://{other_address()}:{port}", **bearer(TOKEN)) == 200
    assert await served.ask("GET", "/status", Host="other.example", **bearer(TOKEN)) == 403


@pytest.mark.parametrize("host", ["::", "[::]"])
async def test_all_addresses_of_ipv6_are_reached_by_it(serve: Serve, token_file: Path, host: str) -> None:
    served = await serve(host=host, token_file=token_file)
    assert served.endpoint["url"].startswith("http://[::1]:")
    assert await served.ask("GET", "/status", **bearer(TOKEN)) == 200


async def test_a_bad_address_is_told(serve: Serve, token_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"control.host = '192.0.2.1', port 0: cannot listen"):
        await serve(host="192.0.2.1", token_file=token_file)


def test_another_address_demands_a_token() -> None:
    for host in ("0.0.0.0", "10.1.2.3", "run.example", "::"):
        with pytest.raises(ValidationError, match=r"lets other machines ask: set control\.token_file"):
            ControlSettings(host=host)
    for host in ("127.0.0.1", "localhost", "::1", "[::1]"):
        assert ControlSettings(host=host).token_file is None


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (TOKEN, 0o644, "is readable by others: chmod 600"),
        (TOKEN[:31], 0o600, "holds no token of at least 32 characters"),
        (f"{TOKEN} {TOKEN}", 0o600, "holds no token"),
        (TOKEN + "ä", 0o600, "holds no token"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_token_files(tmp_path: Path, text: str | None, mode: int, says: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=says) as caught:
        read_token(path)
    assert TOKEN[:31] not in str(caught.value) and "control.token_file" in str(caught.value)


def test_no_coordinator_is_told(tmp_path: Path) -> None:
    for left_behind in (None, "", "{}", '{"url": "http://127.0.0.1:1", "token": "t"}', '{"url": 1, "token": "t"}'):
        if left_behind is not None:
            (tmp_path / "endpoint.json").write_text(left_behind)
        with pytest.raises(AetherError, match="no coordinator answers on"):
            call(tmp_path, "/status")


def test_another_program_at_the_port_is_no_coordinator(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        (tmp_path / "endpoint.json").write_text(json.dumps({"url": url, "token": "t"}))

        def speak() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"220 mail.example\r\n")
                connection.recv(4096)

        speaking = threading.Thread(target=speak)
        speaking.start()
        with pytest.raises(AetherError, match="no coordinator answers on"):
            call(tmp_path, "/status")
        speaking.join()
