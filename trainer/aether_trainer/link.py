"""The pipe to the coordinator: hints in, news out, and the end of the process when the coordinator is gone."""

import os
import queue
import signal
import threading
from typing import BinaryIO, Protocol

from aether_common.pipe import BatchReady, CheckpointWritten, Failed, Progress, Ready, Stop, decode_to_trainer
from loguru import logger

type News = Ready | Progress | CheckpointWritten | Failed


class Link(Protocol):
    """What the training loop needs of its coordinator."""

    @property
    def stopping(self) -> bool:
        """Whether to exit after the step in progress."""
        ...

    def send(self, news: News) -> None:
        """Tell the coordinator."""
        ...

    def wait(self, seconds: float) -> None:
        """Return at the next hint, or after `seconds`."""
        ...


class PipeLink:
    """JSON lines on stdin and stdout. Everything else that writes to stdout goes to stderr from now on."""

    def __init__(self) -> None:
        self._news: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._hints: queue.SimpleQueue[BatchReady | Stop] = queue.SimpleQueue()
        self._stopping = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    @property
    def stopping(self) -> bool:
        return self._stopping

    def send(self, news: News) -> None:
        try:
            self._news.write(news.encode())
        except BrokenPipeError:
            _leave("stdout")

    def wait(self, seconds: float) -> None:
        try:
            self._hints.get(timeout=seconds)
        except queue.Empty:
            return

    def _read(self) -> None:
        # Not sys.stdin: its lock, held by this thread, would abort the interpreter at the normal end.
        rest = b""
        while data := os.read(0, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                hint = decode_to_trainer(line)
                if hint is None:
                    logger.warning(f"stdin: ignored a line that is no message: {line[:80]!r}")
                    continue
                self._stopping |= isinstance(hint, Stop)
                self._hints.put(hint)
        _leave("stdin")

    def _signalled(self, number: int, _frame: object) -> None:
        """The first signal is a Stop, the second does not wait for the step."""
        if self._stopping:
            os._exit(128 + number)
        self._stopping = True
        self._hints.put(Stop())


def _leave(stream: str) -> None:
    # In the middle of whatever the main thread does: checkpoints appear in one rename, so nothing is lost.
    logger.warning(f"{stream} is closed: the coordinator is gone, leaving")
    os._exit(0)
