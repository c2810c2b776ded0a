"""Publication: a verified adapter goes into the object store by digest, then its policy is activated.

A published policy never changes. Activation is one LMDB transaction; the key-value bucket shows it
to people and tools, workers learn it from the answers to their polls.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats.errors
from aether_common.checkpoint import checkpoint_path, read_manifest, verify_adapter
from aether_common.crash import crash_point
from aether_common.digests import FileEntry, file_list_bytes
from aether_common.identity import ModelIdentity
from aether_common.wire import PolicyManifest, PolicyRef
from loguru import logger
from nats.js.errors import NoKeysError, NotFoundError

from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import PolicyRecord, number_key
from aether_coordinator.streams import Streams

RETRY_S = 2.0
GRACE_S = 120.0
"""How long an artefact stays after the last use of its policy, for late readers."""
CHUNK_BYTES = 512 << 10
"""Of an object: few messages, and small enough to let jobs pass in between."""


class Policies:
    """The activated policies of the run, and their artefacts on the bus."""

    def __init__(
        self,
        ledger: Ledger,
        streams: Streams,
        run_root: Path,
        *,
        run: str,
        run_uuid: str,
        identity: ModelIdentity,
        bus_connected: asyncio.Event,
    ) -> None:
        self._ledger = ledger
        self._streams = streams
        self._run_root = run_root
        self._run = run
        self._run_uuid = run_uuid
        self._unused_since: dict[int, float] = {}
        self._identity = identity
        self._bus_connected = bus_connected
        self.records: dict[int, PolicyRecord] = {}
        """By version; only those whose artefacts are on the bus."""
        self.newest = -1

    def load(self) -> None:
        """Read what was activated before a restart."""
        for _, value in self._ledger.scan("policies"):
            record = PolicyRecord.decode(value)
            self.newest = max(self.newest, record.version)
            self.records[record.version] = record

    async def report_newer(self) -> None:
        """A bus that shows newer policies than the ledger is reported, never adopted."""
        try:
            keys = [int(key) for key in await self._streams.policies.keys() if key.isdigit()]
        except NoKeysError:
            return
        if newer := sorted(key for key in keys if key > self.newest):
            logger.error(
                "the bus shows policies up to {}, this run directory ends at {}: older than the bus (restored from "
                "a backup?); the run goes on from the run directory, the bus's newer policies are removed",
                newer[-1],
                self.newest,
            )
            for version in newer:
                await self._streams.policies.delete(str(version))

    async def publish(self, version: int) -> PolicyRecord:
        """Verify checkpoint `version`, put its adapter on the bus, activate the policy. Idempotent."""
        manifest = await asyncio.to_thread(verify_adapter, self._run_root, version)
        crash_point("policy.before_put")
        await self._persist(lambda: self._put_adapter(version, manifest.files), f"adapter of policy {version}")
        known = self.records.get(version)
        if known is not None:
            return known
        record = PolicyRecord(
            version=version,
            adapter=manifest.adapter,
            files=[(entry.name, entry.size, entry.sha256) for entry in manifest.files],
            rank=manifest.rank,
            alpha=manifest.alpha,
            target_modules=manifest.target_modules,
            dtype=manifest.dtype,
            activated_s=time.time(),
        )
        crash_point("policy.before_commit")
        await self._ledger.commit(Write("policies", number_key(version), record.encode()))
        crash_point("policy.before_show")
        self.records[version] = record
        self.newest = max(self.newest, version)
        await self._persist(lambda: self._show(record), f"manifest of policy {version}")
        crash_point("policy.after_show")
        logger.bind(policy=version).info("policy {} is active ({})", version, record.adapter[:12])
        return record

    async def _persist(self, put: Callable[[], Awaitable[None]], what: str) -> None:
        """Put something on the bus, trying again for as long as the bus refuses it."""
        while True:
            await self._bus_connected.wait()
            try:
                await put()
                return
            except (nats.errors.Error, TimeoutError) as error:
                logger.warning("{} not taken by the bus, trying again: {}", what, error or type(error).__name__)
                await asyncio.sleep(RETRY_S)

    async def _put_adapter(self, version: int, files: list[FileEntry]) -> None:
        directory = checkpoint_path(self._run_root, version) / "adapter"
        manifest, _ = read_manifest(self._run_root, version)
        for entry in files:
            await self._put(entry.sha256, directory / entry.name, f"{entry.name} of policy {version}")
        await self._put(manifest.adapter, file_list_bytes(files), f"file list of policy {version}")

    async def _put(self, digest: str, content: Path | bytes, description: str) -> None:
        """Put an object unless it is there: putting it again would delete the chunks under a late reader."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        try:
            info = await self._streams.artifacts.get_info(digest)
            if info.size == size and not info.deleted:
                return
        except NotFoundError:
            pass
        meta: Any = object_meta(digest, description)
        if isinstance(content, bytes):
            await self._streams.artifacts.put(digest, content, meta=meta)
        else:
            with content.open("rb") as file:
                await self._streams.artifacts.put(digest, file, meta=meta)  # type: ignore[arg-type]

    async def _show(self, record: PolicyRecord) -> None:
        manifest = PolicyManifest(
            run=self._run,
            run_uuid=self._run_uuid,
            base_model=self._identity,
            **record.model_dump(exclude={"activated_s"}),
        )
        await self._streams.policies.put(str(record.version), manifest.model_dump_json().encode())

    async def restore(self, needed: set[int]) -> None:
        """Put the artefacts of the needed policies on the bus again where they are missing."""
        for version in sorted(needed & set(self.records)):
            await self._put_adapter(version, [FileEntry(*entry) for entry in self.records[version].files])
            await self._show(self.records[version])

    async def prune(self, needed: set[int]) -> None:
        """Delete artefacts that no needed policy uses, a grace period after their last use."""
        now = time.monotonic()
        for version in needed:
            self._unused_since.pop(version, None)
        unused = sorted(set(self.records) - needed)
        expired = [version for version in unused if now - self._unused_since.setdefault(version, now) >= GRACE_S]
        doomed = {digest for version in expired for digest in _digests(self.records.pop(version))}
        if doomed:
            doomed -= {digest for record in self.records.values() for digest in _digests(record)}
        for digest in doomed:
            try:
                await self._streams.artifacts.delete(digest)
            except nats.errors.Error as error:
                logger.debug("artefact {} not deleted: {!r}", digest[:12], error)

    def refs(self, needed: set[int]) -> list[PolicyRef]:
        """The needed policies, newest first, for the workers."""
        versions = sorted(needed & set(self.records), reverse=True)
        return [PolicyRef(version=version, adapter=self.records[version].adapter) for version in versions]


def _digests(record: PolicyRecord) -> set[str]:
    return {record.adapter, *(digest for _, _, digest in record.files)}


def object_meta(name: str, description: str) -> Any:
    """How an artefact is put into the object store."""
    from nats.js.api import ObjectMeta, ObjectMetaOptions

    return ObjectMeta(name=name, description=description, options=ObjectMetaOptions(max_chunk_size=CHUNK_BYTES))
