"""Durable files: written under a temporary name, fsynced, renamed; never half there."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aether_common.errors import DiskError, RunDirectoryError

TEMPORARY = ".tmp-"
"""Prefix of names that a crash may leave behind and a start may delete."""


def fsync_directory(path: Path) -> None:
    """Make the directory entries of `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make every file and directory below `path` durable."""
    for directory, _, files in os.walk(path):
        for name in files:
            descriptor = os.open(Path(directory) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(Path(directory))


def write_durably(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data`: readers see the old or the new content, also after a power failure.

    Raises `DiskError` when the disk refuses it.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents unless it is there. Raises `RunDirectoryError`."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path) from error


def write_directory_durably(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a directory, then make it appear as `path` in one rename."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        fsync_tree(temporary)
        temporary.rename(path)
        fsync_directory(path.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise disk_error(error, path) from error


def remove_temporaries(directory: Path) -> None:
    """Delete what an interrupted write left in `directory`."""
    for entry in directory.glob(f"{TEMPORARY}*"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def disk_error(error: OSError, path: Path) -> DiskError:
    """Translate an `OSError` while writing `path` into a message with a remedy."""
    remedies = {
        errno.ENOSPC: "the disk is full: free space and start again, nothing that was committed is lost",
        errno.EDQUOT: "the disk quota is used up: raise it and start again, nothing that was committed is lost",
        errno.EROFS: "the file system is read-only: remount it writable or choose another run_root",
        errno.EACCES: "permission denied: give this user write access or choose another run_root",
        errno.EEXIST: "a file is in the way: remove it, or choose another directory",
        errno.ENOTDIR: "a part of the path is a file: choose another directory",
    }
    return DiskError(f"cannot write {path}: {remedies.get(error.errno or 0, error.strerror or str(error))}")


class FileLock:
    """An exclusive lock on a file, held until `release` or the end of the process."""

    def __init__(self, path: Path, busy: str) -> None:
        """Take the lock. Raises `RunDirectoryError` with the text `busy` when another process holds it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(error, path) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise RunDirectoryError(f"{busy} (lock {path}, held by pid {holder or 'unknown'})") from None
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        except OSError as error:
            os.close(self._descriptor)
            raise disk_error(error, path) from error

    def release(self) -> None:
        os.close(self._descriptor)
