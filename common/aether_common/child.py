"""Child processes that never outlive their parent, also when it is killed with -9."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def spawn(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None, pipes: bool = False
) -> asyncio.subprocess.Process:
    """Start a child in its own process group (a Ctrl-C reaches only the parent).

    stderr, and stdout unless `pipes`, are appended to `log`; with `pipes` stdin and stdout are pipes.
    It inherits the environment but for this process's own secrets, `AETHER_…_API_KEY`.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("AETHER_") and name.endswith("_API_KEY"))
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if pipes else output,
            stderr=output,
            env={**inherited, **(environment or {})},
            start_new_session=True,
            preexec_fn=_die_with_parent,
            limit=16 << 20,
        )


async def stop(process: asyncio.subprocess.Process, grace_s: float) -> int:
    """SIGTERM, then SIGKILL to the group after `grace_s`. Returns the exit status."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    return process.returncode


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log file, for a message about a child that died."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
