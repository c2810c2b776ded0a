"""Download of an adapter by the worker's own code, against a plain HTTP file response and against nats-py's get.

    uv run python tests/bench/adapter.py [--rounds 3] [--mib 256] [--distant-mib 256]

Near: over wss:// on loopback, `AdapterCache` in a process of its own (looked up, fetched, SHA-256 verified, checked,
fsynced, renamed); against it an aiohttp client, in a process of its own, that leaves the same behind: aiohttp's
`FileResponse` over plain HTTP (no TLS, the kernel sends the file) in a file, verified and fsynced. For comparison the
same without verification and fsync, and with them over HTTPS. Distant: the worker's code behind a proxy that delays by
30 ms in each direction (60 ms round trip, no limit of bandwidth), against nats-py's `ObjectStore.get(writeinto=file)`
with its own client behind the same proxy, which goes over plain TCP with the coordinator's account: a worker may not
do what it needs.
"""

import sys
from pathlib import Path

# This folder would hide the standard library's `queue`.
if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import asyncio
import hashlib
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import nats
from aether_common.bus import Bus
from aether_common.digests import file_list_bytes, file_list_digest, list_files
from aether_common.names import Names
from aether_common.tls import Tls
from aether_coordinator.policies import object_meta
from aether_coordinator.streams import Streams
from aether_worker.adapters import AdapterCache
from aether_worker.artifacts import Artifacts
from aiohttp import ClientSession, web
from bench._bench import finish, interleaved, median, print_table
from nats_server import NatsServer

WORKER = "w1"
GOAL, DISTANT_GOAL, RSS_GOAL_MIB = 0.4, 4.0, 150
ONE_WAY_S = 0.03
WEIGHTS = "adapter_model.safetensors"


# ---- clients, each a process ---------------------------------------------------------------------


async def by_worker(directory: Path, url: str, ca: str, digest: str) -> dict[str, float]:
    seed = (directory / "nats" / f"{WORKER}.seed").read_text()
    bus = Bus(url, seed, Names("test").inbox(WORKER), WORKER, Tls(Path(ca)))
    await bus.connect()
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        adapters = AdapterCache(Path(cache), 1 << 40, Artifacts(bus, Names("test")))
        started = time.perf_counter()
        path = await adapters.get(1, digest)
        seconds = time.perf_counter() - started
        size = sum(file.stat().st_size for file in path.iterdir())
    await bus.close()
    return {"mb_s": size / seconds / 1e6, "rss_mib": peak_rss_mib()}


async def by_http(directory: Path, url: str, ca: str = "", digest: str = "") -> dict[str, float]:
    """With `digest` it is verified and fsynced."""
    context = ssl.create_default_context(cafile=ca) if ca else True
    hasher = hashlib.sha256()
    with tempfile.TemporaryFile(dir=directory) as file:
        started = time.perf_counter()
        async with ClientSession() as session, session.get(url, ssl=context) as response:
            async for data in response.content.iter_any():
                file.write(data)
                if digest:
                    hasher.update(data)
        if digest:
            file.flush()
            os.fsync(file.fileno())
            if hasher.hexdigest() != digest:
                raise RuntimeError("corrupt")
        seconds = time.perf_counter() - started
        size = file.tell()
    return {"mb_s": size / seconds / 1e6, "rss_mib": peak_rss_mib()}


async def by_nats_py(directory: Path, url: str, seed: str, name: str) -> dict[str, float]:
    # Its own client, without what ours changes in reading and writing.
    client = await nats.connect(url, nkeys_seed_str=seed, inbox_prefix="_INBOX_coordinator")
    store = await client.jetstream().object_store(Names("test").artifacts)
    with tempfile.TemporaryFile(dir=directory) as file:
        started = time.perf_counter()
        await store.get(name, writeinto=file)  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
        size = file.tell()
    await client.close()
    return {"mb_s": size / seconds / 1e6, "rss_mib": peak_rss_mib()}


def peak_rss_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


async def run_client(how: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--client", how, *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client {how} ended with {process.returncode}")
    return json.loads(output)


# ---- servers -------------------------------------------------------------------------------------


async def serve_files(directory: str, *pair: str) -> None:
    """Over HTTP, or over HTTPS with that certificate and key."""
    context = None
    if pair:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*pair)
    app = web.Application()
    app.router.add_get("/{name}", lambda request: web.FileResponse(Path(directory) / request.match_info["name"]))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


@asynccontextmanager
async def server_process(*command: str) -> AsyncGenerator[int]:
    """A process that prints its port and ends with its standard input."""
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


def make_adapter(directory: Path, mib: int) -> str:
    """Any bytes will do: nobody loads it. Returns its digest."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    with (directory / WEIGHTS).open("wb") as file:
        for _ in range(mib):
            file.write(os.urandom(1 << 20))
    return file_list_digest(list_files(directory))


async def put_adapter(streams: Streams, directory: Path) -> None:
    files = list_files(directory)
    for entry in files:
        with (directory / entry.name).open("rb") as file:
            await streams.artifacts.put(entry.sha256, file, meta=object_meta(entry.sha256, entry.name))
    digest = file_list_digest(files)
    await streams.artifacts.put(digest, file_list_bytes(files), meta=object_meta(digest, "file list"))


# ---- the benchmark -------------------------------------------------------------------------------


async def benchmark(directory: Path, rounds: int, mib: int, distant_mib: int) -> None:
    near, distant = directory / "near", directory / "distant"
    near_digest, distant_digest = make_adapter(near, mib), make_adapter(distant, distant_mib)
    near_weights, weights = (
        next(entry.sha256 for entry in list_files(adapter) if entry.name == WEIGHTS) for adapter in (near, distant)
    )
    server = NatsServer(directory / "nats", max_storage_mib=4 * (mib + distant_mib) + 256, hosts=["localhost"])
    server.directory.mkdir()
    server.add_worker(WORKER)
    proxy = [sys.executable, str(Path(__file__).parents[1] / "chaos" / "proxy.py"), "--delay", str(ONE_WAY_S)]
    async with AsyncExitStack() as stack:
        stack.enter_context(server)
        bus = server.coordinator_bus()
        await bus.connect()
        storage = (4 * (mib + distant_mib) + 256) << 20
        streams = Streams(bus, server.names, "0" * 32, max_age_s=3600, lease_s=30, storage=storage)
        await streams.declare()
        for adapter in (near, distant):
            await put_adapter(streams, adapter)
        await bus.close()
        files = [sys.executable, __file__, "--serve-files", str(near)]
        pair = [str(server.directory / "server.pem"), str(server.directory / "server.key")]
        http_port = await stack.enter_async_context(server_process(*files))
        https_port = await stack.enter_async_context(server_process(*files, *pair))
        far_websocket = await stack.enter_async_context(server_process(*proxy, str(server.websocket_port)))
        far_tcp = await stack.enter_async_context(server_process(*proxy, str(server.port)))
        ca = str(server.directory / "ca.pem")

        def worker(port: int, digest: str) -> Any:
            return run_client("worker", str(directory), f"wss://localhost:{port}", ca, digest)

        rounds_of = await interleaved(
            rounds,
            worker=lambda: worker(server.websocket_port, near_digest),
            http=lambda: run_client(
                "http", str(directory), f"http://127.0.0.1:{http_port}/{WEIGHTS}", "", near_weights
            ),
            unverified=lambda: run_client("http", str(directory), f"http://127.0.0.1:{http_port}/{WEIGHTS}"),
            https=lambda: run_client(
                "http", str(directory), f"https://localhost:{https_port}/{WEIGHTS}", ca, near_weights
            ),
            far_worker=lambda: worker(far_websocket, distant_digest),
            far_nats_py=lambda: run_client(
                "nats-py", str(directory), f"nats://127.0.0.1:{far_tcp}", server.coordinator.seed, weights
            ),
        )
    report(rounds_of, rounds, mib, distant_mib)


def report(rounds_of: dict[str, list[dict[str, float]]], rounds: int, mib: int, distant_mib: int) -> None:
    labels = {
        "worker": f"worker, wss, verified and fsynced, {mib} MiB",
        "http": f"plain HTTP file response, verified and fsynced, {mib} MiB",
        "unverified": f"plain HTTP file response, only written, {mib} MiB",
        "https": f"HTTPS file response, verified and fsynced, {mib} MiB",
        "far_worker": f"worker, wss, 60 ms round trip, {distant_mib} MiB",
        "far_nats_py": f"nats-py get(writeinto), tcp, 60 ms, {distant_mib} MiB",
    }
    speed = {side: median(values, "mb_s") for side, values in rounds_of.items()}
    rss = max(value["rss_mib"] for side in ("worker", "far_worker") for value in rounds_of[side])
    print(f"medians of {rounds} rounds")
    print_table(
        ("", "MB/s", "peak RSS MiB", "MB/s by round"),
        [
            (
                labels[side],
                f"{speed[side]:.1f}",
                f"{max(value['rss_mib'] for value in values):.0f}",
                " ".join(f"{value['mb_s']:.1f}" for value in values),
            )
            for side, values in rounds_of.items()
        ],
    )
    ratio, distant_ratio = speed["worker"] / speed["http"], speed["far_worker"] / speed["far_nats_py"]
    unverified, https = speed["worker"] / speed["unverified"], speed["worker"] / speed["https"]
    print(
        f"near: {ratio:.2f} of plain HTTP (goal {GOAL}), {unverified:.2f} of it without verification and fsync, "
        f"{https:.2f} of HTTPS"
    )
    print(f"distant: {distant_ratio:.1f} × nats-py (goal {DISTANT_GOAL})")
    print(f"peak RSS of the worker's process: {rss:.0f} MiB (goal {RSS_GOAL_MIB})")
    finish(
        "adapter",
        mib=mib,
        distant_mib=distant_mib,
        rounds=rounds,
        **{f"{side}_mb_s": round(value, 1) for side, value in speed.items()},
        rss_mib=round(rss, 1),
        unverified_ratio=round(unverified, 3),
        https_ratio=round(https, 3),
        distant_ratio=round(distant_ratio, 2),
        distant_goal=DISTANT_GOAL,
        ratio=ratio,
        goal=GOAL,
        ok=ratio >= GOAL and distant_ratio >= DISTANT_GOAL and rss < RSS_GOAL_MIB,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--distant-mib", type=int, default=256)
    parser.add_argument("--client", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--serve-files", nargs="+", help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.serve_files:
        asyncio.run(serve_files(*options.serve_files))
    elif options.client:
        how, directory, *arguments = options.client
        client: Any = {"worker": by_worker, "http": by_http, "nats-py": by_nats_py}[how]
        print(json.dumps(asyncio.run(client(Path(directory), *arguments))), flush=True)
    else:
        with tempfile.TemporaryDirectory(prefix="aether-bench-") as directory:
            asyncio.run(benchmark(Path(directory), options.rounds, options.mib, options.distant_mib))


if __name__ == "__main__":
    main()
