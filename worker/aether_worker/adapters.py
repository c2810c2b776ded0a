"""The adapter cache: directories of verified files, addressed by digest, under a byte budget.

Every file is verified (size and SHA-256) before its directory appears, and again at its first use
after a start. A directory's name contains version and digest and is never reused for other bytes.
The least recently used directory goes first, and never a pinned one.
"""

import asyncio
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from aether_common.checkpoint import ADAPTER_FILES
from aether_common.crash import crash_point
from aether_common.digests import FileEntry, file_list_digest, list_files, parse_file_list, sha256_bytes
from aether_common.files import TEMPORARY, fsync_directory, fsync_tree, remove_temporaries
from loguru import logger

from aether_worker.adapter_check import AdapterError
from aether_worker.artifacts import ArtifactError, Artifacts, backoff

ATTEMPTS = 3
"""Downloads of one adapter before it is given up; lost connections do not count."""
MAX_LIST_BYTES = 64 << 10
FLUSH_BYTES = 32 << 20
_NAME = re.compile(r"v(\d+)-([0-9a-f]{64})")


class AdapterCache:
    """Adapters on disk. One fetch at a time per digest."""

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        artifacts: Artifacts,
        check: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """`check` raises `AdapterError` for a verified directory that the engine cannot serve."""
        self._directory = directory
        self._check = check
        self._budget = budget_bytes
        self._artifacts = artifacts
        self._locks: dict[str, asyncio.Lock] = {}
        self._verified: set[str] = set()
        self._pins: Counter[str] = Counter()
        directory.mkdir(parents=True, exist_ok=True)
        remove_temporaries(directory)

    def pin(self, digest: str) -> None:
        """Keep the adapter until `unpin`, whatever the budget says."""
        self._pins[digest] += 1

    def unpin(self, digest: str) -> None:
        self._pins[digest] -= 1

    async def get(self, version: int, digest: str) -> Path:
        """The directory of a verified adapter, fetched if need be. Raises `AdapterError`."""
        try:
            async with self._locks.setdefault(digest, asyncio.Lock()):
                path = self._path(digest)
                if path is not None and digest not in self._verified:
                    path = await self._verify(path, digest)
                if path is None:
                    path = await self._fetch(version, digest)
                if digest not in self._verified:
                    await asyncio.to_thread(self._check, path)
                    self._verified.add(digest)
                os.utime(path)
            self._evict(keep=digest)
        except OSError as error:
            raise AdapterError(f"adapter v{version}: the cache {self._directory} cannot be used: {error}") from error
        return path

    def _path(self, digest: str) -> Path | None:
        """The directory with that digest, under whichever version it was fetched first."""
        return next(self._directory.glob(f"v*-{digest}"), None)

    async def _verify(self, path: Path, digest: str) -> Path | None:
        actual = await asyncio.to_thread(lambda: file_list_digest(list_files(path)))
        if actual == digest:
            return path
        logger.warning("adapter {} was damaged on disk, fetching it again", path.name)
        await asyncio.to_thread(shutil.rmtree, path)
        return None

    async def _fetch(self, version: int, digest: str) -> Path:
        target = self._directory / f"v{version}-{digest}"
        temporary = self._directory / f"{TEMPORARY}{target.name}"
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await backoff(attempt)
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                temporary.mkdir()
                await self._download(digest, temporary)
                await asyncio.to_thread(fsync_tree, temporary)
                crash_point("adapter.before_rename")
                temporary.rename(target)
                fsync_directory(self._directory)
                crash_point("adapter.after_rename")
                return target
            except ArtifactError as error:
                problem = str(error)
                logger.warning("adapter v{}: {}", version, problem)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        raise AdapterError(f"adapter v{version} ({digest}) cannot be had: {problem}")

    async def _download(self, digest: str, directory: Path) -> None:
        listing = bytearray()

        async def collect(pieces: list[bytes]) -> None:
            listing.extend(b"".join(pieces))
            if len(listing) > MAX_LIST_BYTES:
                raise ArtifactError(f"object {digest} is no file list of an adapter: too large")

        await self._artifacts.read(digest, collect)
        if (actual := sha256_bytes(bytes(listing))) != digest:
            raise ArtifactError(f"object {digest} is corrupt: its SHA-256 is {actual}")
        try:
            files = parse_file_list(bytes(listing))
        except ValueError as error:
            raise ArtifactError(f"object {digest} is no file list of an adapter: {error}") from error
        if sorted(file.name for file in files) != sorted(ADAPTER_FILES):
            raise ArtifactError(f"adapter {digest} must contain exactly {', '.join(ADAPTER_FILES)}")
        try:
            async with asyncio.TaskGroup() as tasks:
                for file in files:
                    tasks.create_task(self._download_file(file, directory / file.name))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _download_file(self, file: FileEntry, path: Path) -> None:
        hasher = hashlib.sha256()
        unflushed = 0
        flushing: asyncio.Task[None] | None = None
        with path.open("wb", buffering=0) as output:

            def put(pieces: list[bytes]) -> None:
                for piece in pieces:
                    hasher.update(piece)
                    left = memoryview(piece)
                    while left:
                        left = left[output.write(left) :]

            async def write(pieces: list[bytes]) -> None:
                """Hash and disk in a thread, where they take no time from the jobs; flushed beside the download."""
                nonlocal unflushed, flushing
                await _to_the_end(put, pieces)
                unflushed += sum(map(len, pieces))
                if unflushed >= FLUSH_BYTES and (flushing is None or flushing.done()):
                    flushing, unflushed = asyncio.create_task(_to_the_end(os.fdatasync, output.fileno())), 0

            try:
                size = await self._artifacts.read(file.sha256, write)
            finally:
                if flushing is not None:
                    await flushing
        if size != file.size or hasher.hexdigest() != file.sha256:
            raise ArtifactError(
                f"{file.name} is corrupt: {size} bytes with SHA-256 {hasher.hexdigest()} "
                f"instead of {file.size} with {file.sha256}"
            )

    def _evict(self, keep: str) -> None:
        entries: list[tuple[float, int, str, Path]] = []
        for path in self._directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                size = sum(file.stat().st_size for file in path.iterdir())
                entries.append((path.stat().st_mtime, size, match.group(2), path))
        total = sum(size for _, size, _, _ in entries)
        for _, size, digest, path in sorted(entries):
            if total <= self._budget:
                return
            busy = digest in self._locks and self._locks[digest].locked()
            if digest == keep or self._pins[digest] > 0 or busy:
                continue
            shutil.rmtree(path)
            self._verified.discard(digest)
            self._locks.pop(digest, None)
            total -= size
        if total > self._budget:
            logger.warning("the adapters in use take {} MiB, more than adapter_cache_mib", total >> 20)


async def _to_the_end(work: Callable[..., object], *arguments: object) -> None:
    """In a thread, also waited for when cancelled: the file must not be closed under it."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
