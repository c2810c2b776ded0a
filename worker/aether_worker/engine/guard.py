"""Stands between the worker and a server, so that no process of the server's tree outlives the worker.

A program of its own, on the standard library alone: `python guard.py COMMAND…`. The worker holds the other
end of its stdin. When that closes, because the worker asks for the end or died in any way, the server gets
SIGTERM, and its whole process group SIGKILL after the grace. What a server that died leaves behind is killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_guard() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def guard(command: list[str]) -> int:
    """Run `command` to its end; returns its exit status, 128 + n for signal n."""
    # A supervisor that tells every process of the worker means the worker: it says when. No SIG_IGN, which the
    # server would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        process_group=0,
        # Before any thread is started. The last resort, should this process be killed.
        preexec_fn=_end_with_guard,
    )

    def end_with_worker() -> None:
        os.read(0, 1)
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
        kill_group()

    def kill_group() -> None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    threading.Thread(target=end_with_worker, daemon=True).start()
    status = child.wait()
    kill_group()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
