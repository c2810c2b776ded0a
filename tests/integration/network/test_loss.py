"""A worker behind a long and lossy way keeps its slots busy.

The worker lives in a network namespace. One packet in a hundred is dropped in each direction (iptables), and the proxy
at the end of that link delays by 100 ms each way: the kernel has no netem here. So TCP repairs each loss within its
shortest time-out of 200 ms, and not within some round trips of 200 ms.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from bench.wan import busy_seconds
from chaos.proxy import Proxy
from nats_server import NatsServer

from .conftest import COMPLETION, Coordinator, Worker, is_there, until

HERE, THERE = "10.213.77.1", "10.213.77.2"
ROUND_TRIP_S, LOSS = 0.2, 0.01
SLOTS, SECONDS = 16, 8.0
RECORDING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop())
from bench.wan import record_generations
record_generations(Path(sys.argv.pop()))
from aether_worker.cli import main
sys.argv[0] = "aether-worker"
main()
"""


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def dropped(namespace: str) -> int:
    """Packets in both directions."""
    rules = ip("netns", "exec", namespace, "iptables", "-nvxL").splitlines()
    return sum(int(rule.split()[0]) for rule in rules if "DROP" in rule.split()[2:3])


@pytest.fixture
def far_away(require: Callable[..., None]) -> Iterator[str]:
    """The name of a network namespace behind a lossy link; this side of the link has the address `HERE`."""
    name = f"aether-{os.getpid()}"
    link, other = f"ae{os.getpid()}a", f"ae{os.getpid()}b"
    missing = ""
    try:
        ip("netns", "add", name)
        ip("link", "add", link, "type", "veth", "peer", "name", other, "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", other)
        ip("-n", name, "link", "set", other, "up")
        ip("-n", name, "link", "set", "lo", "up")
        for chain in ("INPUT", "OUTPUT"):
            # Every hundredth, not one in a hundred at random: else now and then a short test would see no loss.
            drop = ["-m", "statistic", "--mode", "nth", "--every", str(round(1 / LOSS)), "--packet", "0", "-j", "DROP"]
            ip("netns", "exec", name, "iptables", "-A", chain, *drop)
    except FileNotFoundError as error:
        missing = f"no {error.filename}"
    except subprocess.CalledProcessError as error:
        missing = f"{' '.join(error.cmd[:6])}: {error.stderr.strip()[:200]}"
    try:
        require("network", missing)
        yield name
    finally:
        for words in (("link", "del", link), ("netns", "del", name)):
            with suppress(OSError, subprocess.CalledProcessError):
                ip(*words)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """With TLS: workers that are not on loopback may not do without."""
    with NatsServer(tmp_path / "nats", hosts=[HERE]) as server:
        server.add_worker("w1")
        yield server


@pytest.mark.long
async def test_the_slots_stay_busy(
    far_away: str, coordinator: Coordinator, server: NatsServer, model: Path, tmp_path: Path
) -> None:
    proxy = Proxy(server.websocket_port, HERE)
    proxy.delay(ROUND_TRIP_S / 2)
    worker = Worker(tmp_path / "worker", server, model, f"wss://{HERE}:{proxy.port}")
    intervals = tmp_path / "intervals"
    worker.settings |= {
        "slots": SLOTS,
        "null": {"tokens": COMPLETION, "tokens_per_s": 4.0},
        "tls": {"ca_file": str(server.directory / "ca.pem")},
    }
    try:
        tests = str(Path(__file__).parents[2])
        await worker.start("ip", "netns", "exec", far_away, code=RECORDING, arguments=(str(intervals), tests))
        await is_there(coordinator)
        # More turns than it can take, all the time.
        episodes = [coordinator.open(index) for index in range(int(SLOTS * (SECONDS + 16)))]
        calls = [coordinator.ask(episode, [3, 4, 5]) for episode in episodes]
        await until(lambda: coordinator.counters.replies >= 4 * SLOTS, timeout=30)
        start = time.monotonic()
        await until(lambda: time.monotonic() > start + SECONDS, timeout=SECONDS + 5)
        end = time.monotonic()
        assert coordinator.dispatcher.waiting > 0
        seen = coordinator.counters.replies
        await until(lambda: coordinator.counters.replies > seen + 2 * SLOTS)
        busy = busy_seconds(intervals, start, end) / (SLOTS * (end - start))
        assert dropped(far_away) > 0
        for call in calls:
            call.cancel()
    finally:
        await worker.stop()
        proxy.close()
    assert busy > 0.9, busy
    print(f"slots busy {busy:.3f}")
