"""What the run keeps in JetStream: declared by the coordinator alone, and again after a loss."""

from collections.abc import Mapping
from typing import Any

from aether_common.bus import Bus
from aether_common.errors import BusError
from aether_common.names import Names
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

REPLIES_CONSUMER = "coordinator"
MAX_MESSAGE = 4 << 20
UUID = "aether-run-uuid"


class Streams:
    """Handles on the streams, the bucket and the object store of one run."""

    def __init__(
        self, bus: Bus, names: Names, run_uuid: str, *, max_age_s: float, lease_s: float, storage: int
    ) -> None:
        self._bus = bus
        self._names = names
        self._metadata = {UUID: run_uuid}
        self._max_age_s = max_age_s
        self._lease_s = lease_s
        self._storage = storage
        self.js: JetStreamContext = bus.client.jetstream(timeout=10)
        self.policies: KeyValue
        self.artifacts: ObjectStore

    async def declare(self) -> None:
        """Create what is missing and correct what differs. Raises `BusError` for another run's streams."""
        try:
            names = self._names
            await self._stream(
                StreamConfig(
                    name=names.jobs,
                    description=f"Turns to generate of run {names.run}, one lane per worker",
                    subjects=[names.all_jobs],
                    max_bytes=self._storage // 8,
                    allow_direct=True,
                    **self._common(),
                )
            )
            await self._stream(
                StreamConfig(
                    name=names.replies,
                    description=f"What became of the jobs of run {names.run}",
                    subjects=[names.all_replies],
                    max_bytes=self._storage // 4,
                    **self._common(),
                )
            )
            await self._replies_consumer()
            self.policies = await self._bucket()
            self.artifacts = await self._object_store()
        except Error as error:
            raise BusError(f"JetStream refuses the streams of run {self._names.run}: {error}") from error

    async def _replies_consumer(self) -> None:
        await self.js.add_consumer(
            self._names.replies,
            ConsumerConfig(
                durable_name=REPLIES_CONSUMER,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=60,
                max_deliver=-1,
                max_ack_pending=4096,
            ),
        )

    async def deliver_again(self) -> None:
        """Let the replies that a predecessor took and did not acknowledge come at once, not after its lease.

        For the start of the owner of the bus only, before anything is pulled.
        """
        try:
            await self.js.delete_consumer(self._names.replies, REPLIES_CONSUMER)
            await self._replies_consumer()
        except Error as error:
            raise BusError(f"JetStream refuses the replies of run {self._names.run}: {error}") from error

    def _common(self) -> dict[str, Any]:
        return {
            "retention": RetentionPolicy.WORK_QUEUE,
            "storage": StorageType.FILE,
            # The default, old, silently drops confirmed jobs of a work queue that is full.
            "discard": DiscardPolicy.NEW,
            "max_age": self._max_age_s,
            "max_msg_size": MAX_MESSAGE,
            "metadata": self._metadata,
        }

    async def _stream(self, config: StreamConfig) -> None:
        assert config.name is not None
        try:
            found = await self.js.stream_info(config.name)
        except NotFoundError:
            await self.js.add_stream(config)
            return
        self._check_owner(config.name, found.config.metadata)
        await self.js.update_stream(config)

    def _check_owner(self, name: str, metadata: Mapping[str, str] | None) -> None:
        owner = (metadata or {}).get(UUID)
        if owner not in (None, self._metadata[UUID]):
            raise BusError(
                f"stream {name} belongs to another run (uuid {owner}, ours is {self._metadata[UUID]}): "
                "give this run another name, or delete that run's streams if it is over"
            )

    async def _bucket(self) -> KeyValue:
        name = self._names.policies
        try:
            found = await self.js.stream_info(f"KV_{name}")
            self._check_owner(name, found.config.metadata)
            return await self.js.key_value(name)
        except NotFoundError:
            config = KeyValueConfig(
                bucket=name,
                description=f"Policies of run {self._names.run}: version to manifest",
                storage=StorageType.FILE,
                max_bytes=32 << 20,
            )
            bucket = await self.js.create_key_value(config)
            await self._mark(f"KV_{name}")
            return bucket

    async def _object_store(self) -> ObjectStore:
        name = self._names.artifacts
        try:
            found = await self.js.stream_info(f"OBJ_{name}")
            self._check_owner(name, found.config.metadata)
            return await self.js.object_store(name)
        except NotFoundError:
            config = ObjectStoreConfig(
                bucket=name,
                description=f"Adapters of run {self._names.run}: objects named by their SHA-256",
                storage=StorageType.FILE,
                max_bytes=self._storage // 2,
            )
            store = await self.js.create_object_store(name, config=config)
            await self._mark(f"OBJ_{name}")
            return store

    async def _mark(self, stream: str) -> None:
        info = await self.js.stream_info(stream)
        await self.js.update_stream(info.config.evolve(metadata=self._metadata))

    @property
    def streams(self) -> tuple[str, str, str, str]:
        names = self._names
        return names.jobs, names.replies, f"KV_{names.policies}", names.artifacts_stream

    async def healthy(self) -> bool:
        """Whether all streams are there, answer and can be written.

        A stream that saw a write error still answers and refuses even a purge of nothing, which writes nothing.
        """
        names = self._names
        nothing = (
            names.job_anywhere("none"),
            names.reply("none", "none"),
            f"$KV.{names.policies}.none",
            f"$O.{names.artifacts}.M.none",
        )
        try:
            for stream, subject in zip(self.streams, nothing, strict=True):
                await self.js.purge_stream(stream, subject=subject)
        except (Error, TimeoutError):
            return False
        return True

    async def declare_lane(self, worker: str, window: int) -> None:
        """The durable consumer of a worker: its own lane, at most `window` unacknowledged jobs."""
        await self.js.add_consumer(
            self._names.jobs,
            ConsumerConfig(
                durable_name=self._names.consumer(worker),
                description=f"Lane of worker {worker}",
                filter_subject=self._names.lane(worker),
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=self._lease_s,
                max_deliver=-1,
                max_ack_pending=window,
                max_waiting=16,
            ),
        )

    async def purge_job(self, job: str) -> None:
        """Take a pending job off every lane."""
        await self.purge_subject(self._names.job_anywhere(job))

    async def purge_subject(self, subject: str) -> None:
        """Remove what is pending on a subject of the job stream."""
        await self.js.purge_stream(self._names.jobs, subject=subject)

    async def pending_jobs(self) -> dict[str, str]:
        """Job id to subject of every job on a lane, delivered or not."""
        info = await self.js.stream_info(self._names.jobs, subjects_filter=self._names.all_jobs)
        return {subject.rsplit(".", 1)[-1]: subject for subject in (info.state.subjects or {})}

    async def pending_job(self, subject: str) -> bytes:
        """The job message that is pending on a subject."""
        return (await self.js.get_last_msg(self._names.jobs, subject)).data or b""

    async def last_reply(self) -> int:
        """Sequence of the newest reply that is still in the stream, 0 when there is none.

        Not the stream's last sequence: that one counts replies that were acknowledged, and never come again.
        """
        try:
            return (await self.js.get_last_msg(self._names.replies, self._names.all_replies)).seq or 0
        except NotFoundError:
            return 0
