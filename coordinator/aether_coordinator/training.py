"""The supervised trainer: batches in, checkpoints out; its messages are hints, its files the truth."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aether_common.checkpoint import complete_steps
from aether_common.child import spawn, stop, tail
from aether_common.errors import DiskError, IdentityError, TrainerError
from aether_common.identity import ModelIdentity, differences
from aether_common.pipe import (
    BatchReady,
    CheckpointWritten,
    Failed,
    Mismatch,
    Progress,
    Ready,
    Stop,
    decode_from_trainer,
)
from loguru import logger

from aether_coordinator.settings import ServerSettings

BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 30.0)


class Trainer:
    """Runs `aether_trainer` and restarts it from its last complete checkpoint."""

    def __init__(
        self,
        settings: ServerSettings,
        on_checkpoint: Callable[[int, dict[str, float], dict[str, Mismatch]], Awaitable[None]],
        *,
        busy: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._on_checkpoint = on_checkpoint
        self._busy = busy
        self._log = settings.run_root / "logs" / "trainer.log"
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._failure = ""
        self._hangs = False
        self.share = 0.0
        """Share of the step in progress that is trained."""
        self.ready = False

    def command(self) -> list[str]:
        process = self._settings.trainer
        return [
            str(process.python or sys.executable),
            "-m",
            "aether_trainer",
            str(process.config),
            "--run-root",
            str(self._settings.run_root),
            "--run",
            self._settings.run,
        ]

    async def supervise(self) -> None:
        """Keep the trainer running until `stop`. Raises `TrainerError` when restarts do not help."""
        failures = 0
        while not self._stopping:
            before = complete_steps(self._settings.run_root)
            status = await self._run_once()
            if self._stopping:
                return
            if status == DiskError.exit_code:
                # Not the trainer's fault, and nothing to give up for.
                logger.error("the trainer waits for its disk: {}", self._failure)
                await asyncio.sleep(BACKOFF_S[2])
                continue
            progressed = complete_steps(self._settings.run_root) != before
            failures = 1 if progressed else failures + 1
            reason = self._failure or tail(self._log, 3) or f"see {self._log}"
            if status in (2, 3):  # a setting or the model is wrong: a restart cannot help
                raise TrainerError(f"the trainer refuses to start: {reason}")
            if failures > self._settings.trainer.max_restarts:
                raise TrainerError(
                    f"the trainer ended {failures} times without a new checkpoint, the last time with status {status}: "
                    f"{reason} (log: {self._log})"
                )
            wait = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
            logger.warning("the trainer ended with status {} ({}), starting it again in {:.0f} s", status, reason, wait)
            await asyncio.sleep(wait)

    async def _run_once(self) -> int:
        self._failure, self.ready = "", False
        self._hangs = False
        process = await spawn(self.command(), log=self._log, pipes=True)
        self._process = process
        assert process.stdout is not None
        try:
            while line := await self._next_line(process.stdout):
                message = decode_from_trainer(line)
                if isinstance(message, Ready):
                    self._check_identity(message.identity)
                    self.ready = True
                    await self._on_checkpoint(message.step, {}, {})
                elif isinstance(message, CheckpointWritten):
                    self.share = 0.0
                    await self._on_checkpoint(message.step, message.metrics, message.mismatch)
                elif isinstance(message, Progress):
                    self.share = message.share
                elif isinstance(message, Failed):
                    self._failure = message.message
                elif message is None:
                    logger.debug("trainer: {}", line.decode(errors="replace").rstrip())
            if not self._hangs:
                return await process.wait()
        finally:
            self.ready = False
            status = await stop(process, grace_s=2)
        return status

    async def _next_line(self, output: asyncio.StreamReader) -> bytes:
        """The next line, empty at the end or when the trainer hangs: nothing heard though there is work."""
        while True:
            try:
                async with asyncio.timeout(self._settings.trainer.stall_s):
                    return await output.readline()
            except TimeoutError:
                if not self.ready or self._busy():
                    self._hangs = True
                    self._failure = f"no progress for {self._settings.trainer.stall_s:.0f} s"
                    logger.error("the trainer hangs ({}): ending it", self._failure)
                    return b""

    def _check_identity(self, identity: ModelIdentity) -> None:
        if lines := differences(self._settings.base_model, identity):
            config = self._settings.trainer.config
            raise IdentityError(f"the trainer ({config}) loads another model than base_model: " + "; ".join(lines))

    async def announce(self, step: int) -> None:
        """Hint that the batch of `step` is there."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(ConnectionError):
                self._process.stdin.write(BatchReady(step=step).encode())
                await self._process.stdin.drain()

    async def stop(self, grace_s: float) -> None:
        """Let the step in progress finish within `grace_s`, then end the trainer."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            with suppress(ConnectionError):
                process.stdin.write(Stop().encode())
                await process.stdin.drain()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            logger.warning("the trainer does not finish its step within {:.0f} s: ended, it is repeated", grace_s)
            await stop(process, grace_s=2)
