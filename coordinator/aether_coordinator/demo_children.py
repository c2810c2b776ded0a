"""The processes that the demo starts: none outlives it, and one that fails says where its log is."""

import asyncio
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aether_common.child import spawn, stop, tail
from aether_common.errors import AetherError, ConfigError

GRACE_S = 45.0
"""Between SIGTERM and SIGKILL: more than the coordinator grants its trainer and nats-server."""

MAX_REVIVED = 20
"""How often a killed child is started again."""


class ChildError(AetherError):
    """A process of the demo ended when it should not have."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.exit_code = status if status is not None and 0 < status < 126 else 1


@dataclass(slots=True, eq=False)
class Child:
    name: str
    command: list[str]
    process: asyncio.subprocess.Process
    log: Path
    revived: int = 0

    def ended(self) -> str:
        """Why it is a problem that this child ended: log and last lines included."""
        status = self.process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return f"{self.name} {how}; its log is {self.log}:\n{tail(self.log)}"


@dataclass(slots=True)
class Children:
    """The processes of the demo. None outlives it."""

    log_directory: Path
    environment: dict[str, str]
    running: list[Child] = field(default_factory=list)

    async def start(self, name: str, command: list[str]) -> Child:
        log = self.log_directory / f"{name}.log"
        child = Child(name, command, await spawn(command, log=log, environment=self.environment), log)
        self.running.append(child)
        return child

    async def revive(self, child: Child) -> bool:
        """Start a child again that somebody killed with -9. False for any other end, and after many kills."""
        if child.process.returncode != -signal.SIGKILL or child.revived >= MAX_REVIVED:
            return False
        child.revived += 1
        child.process = await spawn(child.command, log=child.log, environment=self.environment)
        return True

    def alive(self, name: str) -> bool:
        return any(child.name == name and child.process.returncode is None for child in self.running)

    async def stop(self) -> None:
        await asyncio.gather(*(stop(child.process, GRACE_S) for child in self.running))

    async def finish(self, child: Child, limit_s: float) -> None:
        """Wait for a child that ends by itself. Raises `ChildError` when it fails or takes too long."""
        try:
            async with asyncio.timeout(limit_s):
                await child.process.wait()
        except TimeoutError:
            raise ChildError(f"{child.name} takes longer than {limit_s:.0f} s; its log is {child.log}", None) from None
        self.running.remove(child)
        if child.process.returncode != 0:
            raise ChildError(child.ended(), child.process.returncode)

    def kill(self) -> None:
        for child in self.running:
            if child.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)


def program(name: str) -> str:
    """A console script of this environment. Raises `ConfigError` when it is not installed."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not installed in this environment: run `uv sync` at the repository root")
    return found
