"""A killed process of the demo is started again; any other end is an end."""

import os
import signal

from aether_coordinator.demo_children import Children


async def test_only_a_kill_is_undone(tmp_path):
    children = Children(tmp_path, {})
    child = await children.start("sleeper", ["sleep", "60"])
    try:
        first = child.process.pid
        assert not await children.revive(child)
        os.kill(first, signal.SIGKILL)
        await child.process.wait()
        assert await children.revive(child)
        assert child.process.pid != first and child.process.returncode is None
        assert children.alive("sleeper")
        child.process.terminate()
        await child.process.wait()
        assert not await children.revive(child)
    finally:
        await children.stop()
