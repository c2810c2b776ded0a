"""What a restarted coordinator finds in the reply stream, on a real nats-server."""

from pathlib import Path

from aether_common.bus import Bus
from aether_coordinator.streams import REPLIES_CONSUMER, Streams
from nats_server import NatsServer


async def streams_of(bus: Bus, server: NatsServer) -> Streams:
    streams = Streams(bus, server.names, "0" * 32, max_age_s=60, lease_s=30, storage=256 << 20)
    await streams.declare()
    return streams


async def test_only_replies_that_are_still_there_are_waited_for(tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        bus = server.coordinator_bus()
        await bus.connect()
        try:
            streams = await streams_of(bus, server)
            assert await streams.last_reply() == 0
            for number in range(3):
                await streams.js.publish(server.names.reply("w1", f"j{number}"), b"reply")
            assert await streams.last_reply() == 3
            taken = await streams.js.pull_subscribe_bind(REPLIES_CONSUMER, server.names.replies)
            first, second, third = await taken.fetch(3, timeout=5)
            await first.ack_sync()
            await third.ack_sync()
            assert await streams.last_reply() == 2
            assert second.metadata.sequence.stream == 2

            # The process that took the second one is gone: its successor gets it at once, and only that one.
            await streams.deliver_again()
            taken = await streams.js.pull_subscribe_bind(REPLIES_CONSUMER, server.names.replies)
            (again,) = await taken.fetch(3, timeout=5)
            assert again.metadata.sequence.stream == 2
            await again.ack_sync()
            assert await streams.last_reply() == 0
        finally:
            await bus.close()
