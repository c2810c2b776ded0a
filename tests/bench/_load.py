"""The load generator of a benchmark, a process of its own: calls to the gateway, as the train client makes them.

It must be cheap, so that the figures are the gateway's: requests are made before, answers are hardly looked at.
"""

import sys
from pathlib import Path

# This folder would hide the standard library's `queue`.
if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import cast
from urllib.parse import SplitResult, urlsplit

from bench._loops import PROMPT_TOKENS
from bench._product import VOCABULARY


class LoadGenerator:
    """This process's end of the pipe to `generate_load`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self._seeds = itertools.count()

    async def send(self, url: str, secret: str, models: list[str], count: int, in_flight: int) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        command = {"url": url, "secret": secret, "models": models, "count": count, "in_flight": in_flight}
        self._process.stdin.write(json.dumps({**command, "seed": next(self._seeds)}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load generator ended")
        return json.loads(line)


# ---- the process ---------------------------------------------------------------------------------


async def generate_load() -> None:
    """Commands come as JSON lines on stdin, figures go as JSON lines to stdout."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await send(**json.loads(line))), flush=True)


def http_request(url: SplitResult, secret: str, model: str, numbers: random.Random) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "token_ids": numbers.choices(range(3, VOCABULARY), k=PROMPT_TOKENS),
            "sampling_params": {
                "temperature": 1.0,
                "max_tokens": 16,
                "stop_token_ids": [2],
                "logprobs": 1,
                "skip_special_tokens": False,
            },
        }
    ).encode()
    head = (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {secret}\r\n"
        f"X-Session-ID: {model}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Caller(asyncio.Protocol):
    """One connection, one request at a time: cheap, so that the figure is the gateway's and not the client's."""

    def __init__(self, waiting: Iterator[bytes], latencies: list[float]) -> None:
        self._waiting = waiting
        self._latencies = latencies
        self._answer = b""
        self._started = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        request = next(self._waiting, None)
        if request is None:
            self._transport.close()
            self.done.set_result(None)
            return
        self._answer = b""
        self._started = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        if not separator or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        self._latencies.append(time.perf_counter() - self._started)
        if not head.startswith(b"HTTP/1.1 200") or (body and b'"token_ids"' not in body):
            self.done.set_exception(RuntimeError(self._answer.decode()))
            self._transport.abort()
            return
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))


async def send(*, url: str, secret: str, models: list[str], count: int, in_flight: int, seed: int) -> dict[str, float]:
    """`count` calls, `in_flight` at a time; the n-th call is the n-th model's episode. Requests are made before."""
    numbers = random.Random(seed)
    address = urlsplit(url)
    requests = [
        http_request(address, secret, model, numbers) for _, model in zip(range(count), itertools.cycle(models))
    ]
    latencies: list[float] = []
    waiting = iter(requests)
    loop = asyncio.get_running_loop()
    started, spent = time.perf_counter(), time.process_time()
    connected = [
        await loop.create_connection(lambda: Caller(waiting, latencies), address.hostname or "", address.port or 0)
        for _ in range(in_flight)
    ]
    await asyncio.gather(*(caller.done for _, caller in connected))
    return {
        "per_s": count / (time.perf_counter() - started),
        "p50_ms": 1000 * statistics.median(latencies),
        "load generator": (time.process_time() - spent) / count * 1e6,
    }


if __name__ == "__main__":
    asyncio.run(generate_load())
