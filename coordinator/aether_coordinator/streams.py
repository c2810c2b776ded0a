"""What the run keeps in JetStream: declared by the coordinator alone, and again after a loss."""

import json
from collections.abc import Mapping
from typing import Any

from aether_common.bus import Bus
from aether_common.errors import BusError, ConfigError
from aether_common.names import Names
from loguru import logger
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from aether_coordinator.drift import drift, plain, refuse_to_lose, with_operators_choice

REPLIES_CONSUMER = "coordinator"
MAX_MESSAGE = 4 << 20
POLICIES_BYTES = 32 << 20
UUID = "aether-run-uuid"
API_S = 10.0
NO_STORAGE = 10047


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
        self.js: JetStreamContext = bus.client.jetstream(timeout=API_S)
        self.confirmed: list[str] = []
        """Streams that the server said it has since `declare` was called last; a new server has none of them yet."""
        self.policies: KeyValue
        self.artifacts: ObjectStore

    async def declare(self) -> None:
        """Create what is missing and correct what differs.

        Raises `BusError` for another run's streams, `ConfigError` for limits below what is stored.
        """
        self.confirmed.clear()
        try:
            for config in self._configs():
                await self._stream(config)
                self.confirmed.append(str(config.name))
            await self._replies_consumer()
            self.policies = await self.js.key_value(self._names.policies)
            self.artifacts = await self.js.object_store(self._names.artifacts)
        except APIError as error:
            if error.err_code == NO_STORAGE:
                raise ConfigError(
                    f"nats-server has less storage than the streams of run {self._names.run} are promised (here "
                    f"nats.max_storage_mib = {self._storage >> 20}; of an external server max_file in its "
                    "configuration): raise it; to shrink it, stop the run and delete the server's jetstream "
                    "directory: what the run needs is put there again"
                ) from error
            raise self._refused("streams", error) from error
        except Error as error:
            raise self._refused("streams", error) from error

    def _refused(self, what: str, error: Error) -> BusError:
        return BusError(f"JetStream refuses the {what} of run {self._names.run}: {error or type(error).__name__}")

    def _configs(self) -> list[StreamConfig]:
        """Bucket and object store are streams in a shape that every client knows."""
        names, run = self._names, self._names.run
        common: dict[str, Any] = {
            "storage": StorageType.FILE,
            # The default, old, silently drops confirmed jobs of a work queue that is full.
            "discard": DiscardPolicy.NEW,
            "metadata": self._metadata,
        }
        queue: dict[str, Any] = {
            "retention": RetentionPolicy.WORK_QUEUE,
            "max_age": self._max_age_s,
            "max_msg_size": MAX_MESSAGE,
            **common,
        }
        bucket: dict[str, Any] = {"retention": RetentionPolicy.LIMITS, "allow_rollup_hdrs": True, **common}
        return [
            StreamConfig(
                name=names.jobs,
                description=f"Turns to generate of run {run}, one lane per worker",
                subjects=[names.all_jobs],
                max_bytes=self._storage // 8,
                allow_direct=True,
                **queue,
            ),
            StreamConfig(
                name=names.replies,
                description=f"What became of the jobs of run {run}",
                subjects=[names.all_replies],
                max_bytes=self._storage // 4,
                **queue,
            ),
            StreamConfig(
                name=f"KV_{names.policies}",
                description=f"Policies of run {run}: version to manifest",
                subjects=[f"$KV.{names.policies}.>"],
                max_bytes=POLICIES_BYTES,
                max_msgs_per_subject=1,
                deny_delete=True,
                allow_msg_ttl=True,
                **bucket,
            ),
            StreamConfig(
                name=names.artifacts_stream,
                description=f"Adapters of run {run}: objects named by their SHA-256",
                subjects=[f"$O.{names.artifacts}.C.>", f"$O.{names.artifacts}.M.>"],
                max_bytes=self._storage // 2,
                allow_direct=True,
                **bucket,
            ),
        ]

    async def _api(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A request to JetStream, answered as it is: its fields, known to the client or not."""
        payload = b"" if body is None else json.dumps(body).encode()
        answer = json.loads((await self._bus.client.request(f"$JS.API.{subject}", payload, timeout=API_S)).data)
        if "error" in answer:
            raise APIError.from_error(answer["error"])
        return answer

    async def _stream(self, config: StreamConfig) -> None:
        wanted = plain(config)
        name = wanted["name"]
        try:
            found = await self._api(f"STREAM.INFO.{name}")
        except NotFoundError:
            await self._api(f"STREAM.CREATE.{name}", wanted)
            return
        self._check_owner(name, found["config"].get("metadata"))
        if changed := drift(found["config"], wanted):
            refuse_to_lose(name, changed, found["state"])
            for field, (old, new) in changed.items():
                logger.warning("stream {}: {} was {!r}, corrected to {!r}", name, field, old, new)
            await self._api(f"STREAM.UPDATE.{name}", with_operators_choice(found["config"], wanted))

    async def _consumer(self, stream: str, config: ConsumerConfig) -> None:
        wanted = plain(config)
        name = wanted["durable_name"]
        try:
            found = (await self._api(f"CONSUMER.INFO.{stream}.{name}"))["config"]
        except NotFoundError:
            await self.js.add_consumer(stream, config)
            return
        changed = drift(found, wanted)
        for field, (old, new) in changed.items():
            # A worker that comes back with other slots has another window.
            level = "DEBUG" if field == "max_ack_pending" else "WARNING"
            logger.log(level, "consumer {} of {}: {} was {!r}, corrected to {!r}", name, stream, field, old, new)
        if changed:
            try:
                await self.js.add_consumer(stream, config)
            except APIError:
                # What cannot be changed is made anew: what it had delivered is delivered again.
                await self.js.delete_consumer(stream, name)
                await self.js.add_consumer(stream, config)

    async def _replies_consumer(self) -> None:
        await self._consumer(
            self._names.replies,
            ConsumerConfig(
                durable_name=REPLIES_CONSUMER,
                description="The reply intake of the coordinator",
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=60,
                max_deliver=-1,
                max_ack_pending=4096,
                max_waiting=16,
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
            raise self._refused("replies", error) from error

    def _check_owner(self, name: str, metadata: Mapping[str, str] | None) -> None:
        owner = (metadata or {}).get(UUID)
        if owner not in (None, self._metadata[UUID]):
            raise BusError(
                f"stream {name} belongs to another run (uuid {owner}, ours is {self._metadata[UUID]}): "
                "give this run another name, or delete that run's streams if it is over"
            )

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
        """The durable consumer of a worker: its own lane, `window` jobs and as many whose replies are on their way."""
        await self._consumer(
            self._names.jobs,
            ConsumerConfig(
                durable_name=self._names.consumer(worker),
                description=f"Lane of worker {worker}",
                filter_subject=self._names.lane(worker),
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=self._lease_s,
                max_deliver=-1,
                max_ack_pending=2 * window,
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
