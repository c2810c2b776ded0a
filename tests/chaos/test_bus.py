"""A bus that belongs to another run. (A vanished, older or newer one: test_supervision.)"""

from pathlib import Path

from aether_common.bus import Bus
from aether_common.names import Names
from aether_coordinator.streams import Streams
from nats_server import NatsServer
from tiny_run import TinyRun


async def test_a_strangers_bus(tmp_path: Path, tiny_model: Path) -> None:
    """Another run of the same name owns the streams of an external server."""
    names = Names("tiny")
    with NatsServer(tmp_path / "nats", run="tiny") as server:
        bus: Bus = server.coordinator_bus()
        await bus.connect()
        stranger = Streams(bus, names, "5" * 32, max_age_s=3600, lease_s=30, storage=512 << 20)
        await stranger.declare()
        await bus.close()
        key = tmp_path / "coordinator.nk"
        key.write_text(server.coordinator.seed)
        key.chmod(0o600)
        run = TinyRun(tmp_path, tiny_model, nats={"url": server.url, "key_file": str(key)})
        done = run.command("aether-coordinator", "run", str(tmp_path / "server.toml"))
    assert done.returncode == 5
    assert f"stream AETHER_tiny_JOBS belongs to another run (uuid {'5' * 32}, ours is " in done.stderr
