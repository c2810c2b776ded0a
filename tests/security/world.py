"""A run under attack: a real nats-server and coordinator, two honest workers with jobs, and a hostile one.

`fingerprint` is everything that an attack could change, as a flat mapping from a dotted key to its value.
"""

import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aether_common.arrays import pack_floats, pack_tokens
from aether_common.wire import Heartbeat, Job, Poll, Registration, RegistrationAnswer, Reply, ReplyKind
from aether_coordinator import fleet, requests
from integration.coordinator.conftest import IDENTITY, Coordinator
from nats_server import NatsServer
from security.raw import TIMEOUT_S, Raw, Received

HOSTILE, VICTIMS = "w1", ("w2", "w3")
NEVER_S = 600.0
OWN_JOBS = 120
WINDOW = 200
DIGEST = hashlib.sha256(b"adapter").hexdigest()
_VOLATILE = re.compile(r"\.(ts|created|cluster|num_waiting|last_active|lost|last_ts|first_ts|paused|push_bound)\b")


def nothing(text: str) -> str:
    return text


class World:
    """`start` it once; the attempts share it, each leaves it as it was."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.server = NatsServer(root / "nats")
        self.names = self.server.names
        self.victims: dict[str, Raw] = {}
        self.held: dict[str, Received] = {}
        """A job of each victim, delivered and not acknowledged."""
        self.own_jobs: list[Job] = []
        """Jobs of the hostile worker that the coordinator dispatched to it."""
        self._asked = 0

    def seed(self, worker: str) -> str:
        return (self.server.directory / f"{worker}.seed").read_text()

    def inbox(self, worker: str) -> str:
        """Below the inbox of a worker, a part that nobody else knows: as the clients have it."""
        return f"{self.names.inbox(worker)}.{'unknown' if worker in VICTIMS else 'own'}"

    def client(self, worker: str = HOSTILE) -> Raw:
        """A connection of a worker, not open yet."""
        return Raw(self.server.worker_url, self.seed(worker), worker)

    async def start(
        self,
        configuration: Callable[[str], str] = nothing,
        workers: Callable[[str], str] = nothing,
        storage: int = 256 << 20,
    ) -> None:
        """`configuration` and `workers` loosen the two files, to see that the attempts would notice."""
        server, names = self.server, self.names
        server.directory.mkdir(parents=True)
        for worker in (HOSTILE, *VICTIMS):
            server.add_worker(worker)
        with server:
            pass
        for file, change in (("nats-server.conf", configuration), ("workers.conf", workers)):
            path = server.directory / file
            text = path.read_text()
            changed = change(text)
            assert (change is nothing) == (changed == text), f"{file} was not loosened"
            path.write_text(changed)
        server.start()
        self.coordinator = await Coordinator(server, self.root / "run").start(lease_s=NEVER_S, storage=storage)
        await self.coordinator.reconcile()
        streams = self.coordinator.streams
        await streams.policies.put("0", b"manifest")
        await streams.artifacts.put(DIGEST, bytes(300_000))
        episode = self.coordinator.open()
        for number, worker in enumerate(VICTIMS):
            jobs = 2 - number
            await self._join(worker, window=jobs)
            for index in range(jobs):
                self.coordinator.ask(episode, [1, 2, number, index])
            await self.coordinator.pending_until(lambda pending, count=2 + number: len(pending) == count)
        # Each victim holds a job; another of the first waits on its lane, and a pull of the second. None has room.
        for worker, victim in self.victims.items():
            inbox = self.inbox(worker)
            await victim.publish(names.next(worker), b'{"batch":1,"no_wait":true}', reply=f"{inbox}.job")
            assert await victim.until(lambda victim=victim: victim.messages)
            self.held[worker] = victim.messages[0]
            if worker == VICTIMS[1]:
                pull = {"batch": 8, "expires": int(NEVER_S * 1e9)}
                await victim.publish(names.next(worker), json.dumps(pull).encode(), reply=f"{inbox}.pull")
            poll = Poll(worker=worker, incarnation="1", revision=self.coordinator.fleet._revision)
            await victim.publish(names.fleet("poll", worker), poll.encode(), reply=f"{inbox}.poll")
        self.hostile = await self.client().open()
        await self.register(WINDOW)
        self.episode = episode
        self.call = self.coordinator.ask(episode, [9])
        delivered = await self.pull()
        self.own_ack = delivered.reply
        self.own_jobs = [Job.decode(delivered.data)]
        for number in range(OWN_JOBS):
            await streams.js.publish(names.job(HOSTILE, "train", 3, f"own-{number}"), b"own")
        await self.control_reply()

    async def _join(self, worker: str, window: int) -> None:
        victim = self.victims[worker] = await self.client(worker).open()
        await victim.subscribe(f"{self.inbox(worker)}.>")
        await self._register(victim, worker, window)
        victim.messages.clear()

    async def _register(self, client: Raw, worker: str, window: int) -> None:
        request = registration(worker, window=window)
        inbox = f"{self.inbox(worker)}.reg"
        answer = await client.request(self.names.fleet("reg", worker), request.encode(), inbox=inbox)
        assert answer is not None and RegistrationAnswer.decode(answer.data).accepted

    async def register(self, window: int) -> None:
        await self._register(self.hostile, HOSTILE, window)

    async def pull(self) -> Received:
        """The next job of the hostile worker's own lane."""
        inbox = f"{self.names.inbox(HOSTILE)}.pull"
        job = await self.hostile.request(self.names.next(HOSTILE), b'{"batch":1,"expires":5000000000}', inbox=inbox)
        assert job is not None and job.reply, job
        return job

    async def control_reply(self) -> None:
        """The attacks are not refused for their form: the same reply for the own job counts."""
        job = self.own_jobs[0]
        await self.send_reply(reply_for(job))
        status, _ = await asyncio.wait_for(self.call, 10)
        assert status == 200

    async def send_reply(self, reply: Reply, job: str | None = None) -> None:
        await self.hostile.request(
            self.names.reply(HOSTILE, job or reply.job), reply.encode(), inbox=f"{self.names.inbox(HOSTILE)}.stored"
        )

    async def dispatched(self) -> Job:
        """A turn that is dispatched to the hostile worker, the only one with room."""
        self._asked += 1
        turns = self.coordinator.dispatcher.turns
        before = set(turns)
        self.coordinator.ask(self.episode, [7, self._asked])
        await self.coordinator.pending_until(lambda pending: bool(set(turns) - before) and set(turns) <= set(pending))
        (job,) = set(turns) - before
        return await self.pending(job)

    async def pending(self, job: str) -> Job:
        subject = self.names.job(HOSTILE, "train", 3, job)
        return Job.decode(await self.coordinator.streams.pending_job(subject))

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in (*self.victims.values(), self.hostile)))
        await self.coordinator.kill()
        self.server.kill()

    # ---- what may not change -----------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until what was sent so far has arrived wherever it goes."""
        for client in (self.hostile, *self.victims.values()):
            if not client.closed:
                await client.ping()
        coordinator = self.coordinator
        await coordinator.bus.client.flush()
        last = (await coordinator.streams.js.stream_info(self.names.replies)).state.last_seq
        await coordinator.intake.drained(last, 5)
        # A reply is acknowledged after it was taken, and leaves the stream some time after that.
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                while (await coordinator.streams.js.stream_info(self.names.replies)).state.messages:  # noqa: ASYNC110 - it is in the server
                    await asyncio.sleep(0.01)

    async def fingerprint(self) -> dict[str, str]:
        await self.settle()
        found: dict[str, str] = {}
        client = self.coordinator.bus.client

        async def api(subject: str) -> Any:
            answer = json.loads((await client.request(f"$JS.API.{subject}", b"", timeout=TIMEOUT_S)).data)
            assert "error" not in answer, answer
            return answer

        for stream in (await api("STREAM.LIST"))["streams"]:
            name = self._short(stream["config"]["name"])
            flatten(f"stream.{name}", {"config": stream["config"], "state": stream["state"]}, found)
            for consumer in (await api(f"CONSUMER.LIST.{stream['config']['name']}"))["consumers"] or []:
                flatten(f"consumer.{name}.{consumer['name']}", consumer, found)
        flatten("lanes", {job: worker for job, worker in (await self.coordinator.pending()).items()
                          if worker != HOSTILE}, found)  # fmt: skip
        coordinator = self.coordinator
        flatten("counters", coordinator.counters.model_dump(), found)
        turns = {job: (turn.worker, turn.dispatch, turn.failures) for job, turn in coordinator.dispatcher.turns.items()}
        flatten("turns", turns, found)
        for worker in coordinator.fleet.workers.values():
            flatten(f"fleet.{worker.name}", {
                "incarnation": worker.incarnation, "dead": worker.lost, "ready": worker.engine_ready,
                "window": worker.window, "jobs": sorted(worker.jobs), "running": worker.running,
                "adapters": sorted(worker.adapters), "tokens": list(worker.tokens),
            }, found)  # fmt: skip
        flatten("refused", {name: why for name, (_, why) in coordinator.fleet.refused.items()}, found)
        found["workers.conf"] = hashlib.sha256(self.server.workers_conf.read_bytes()).hexdigest()
        found["journal"] = str(len(coordinator.journal()))
        found["tasks"] = str([task.done() for task in coordinator._tasks])
        for name, victim in self.victims.items():
            flatten(f"victim.{name}", {"messages": len(victim.messages), "errors": victim.errors,
                                       "closed": victim.closed}, found)  # fmt: skip
        return {key: value for key, value in found.items() if not _VOLATILE.search(key)}

    async def contents(self) -> dict[str, str]:
        """Digest of every stored message; costs a request for each, so before and after all attempts only."""
        found: dict[str, str] = {}
        streams = self.coordinator.streams
        for stream in streams.streams:
            state = (await streams.js.stream_info(stream)).state
            for sequence in range(state.first_seq, state.last_seq + 1):
                try:
                    message = await streams.js.get_msg(stream, sequence)
                except Exception:
                    continue  # Acknowledged, or another message's sequence.
                content = repr((message.subject, message.headers, message.data)).encode()
                found[f"{stream}.{sequence}"] = hashlib.sha256(content).hexdigest()
        return found

    def _short(self, stream: str) -> str:
        return {self.names.jobs: "jobs", self.names.replies: "replies"}.get(stream, stream)

    # ---- carriers: requests that a worker may send, each with a reply subject of its choice -----------

    def carriers(self) -> dict[str, tuple[str, bytes]]:
        """By name: subject and payload of a permitted request that is answered."""
        names, job = self.names, self.own_jobs[0]
        beat = Heartbeat(worker=HOSTILE, incarnation="1", clock=time.time())
        poll = Poll(worker=HOSTILE, incarnation="1", revision=0)
        return {
            "next: a job": (names.next(HOSTILE), b'{"batch":1,"no_wait":true}'),
            "next: a status": (names.next(HOSTILE), b'{"batch":1,"expires":-1}'),
            "ack": (self.own_ack, b"+WPI"),
            "reply": (names.reply(HOSTILE, "unknown"), reply_for(job, job="unknown").encode()),
            "heartbeat": (names.fleet("hb", HOSTILE), beat.encode()),
            "registration": (names.fleet("reg", HOSTILE), registration(HOSTILE, window=WINDOW).encode()),
            "poll": (names.fleet("poll", HOSTILE), poll.encode()),
            "art.get": (names.artifact_get, b'{"seq":1,"batch":2}'),
            "art.meta": (names.artifact_meta(DIGEST), b""),
        }


CARRIED = (
    "consumer.jobs.w-w1.",
    "stream.replies.state.",
    "consumer.replies.coordinator.",
    "counters.replies",
    "fleet.w1.",
)
"""What the carriers change by themselves, all of it the hostile worker's own."""


def flatten(key: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            flatten(f"{key}.{name}", item, into)
    else:
        into[key] = repr(value)


def changes(before: dict[str, str], after: dict[str, str], allowed: tuple[str, ...] = ()) -> list[str]:
    """What differs and may not, as `key: old -> new`."""
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(allowed or ("\0",))
    ]


def registration(worker: str, **changes: Any) -> Registration:
    fields: dict[str, Any] = {
        "worker": worker,
        "incarnation": "1",
        "protocol_min": 1,
        "protocol_max": 1,
        "engine": "none",
        "slots": 1,
        "window": 1,
        "identity": IDENTITY,
        "max_model_len": 256,
    }
    return Registration.model_construct(**(fields | {"v": 1, "versions": {}} | changes))


def reply_for(job: Job, /, **changes: Any) -> Reply:
    """A good reply of the hostile worker, with `changes`."""
    fields: dict[str, Any] = {
        "job": job.job,
        "dispatch": job.dispatch,
        "worker": HOSTILE,
        "incarnation": "1",
        "kind": ReplyKind.OK,
        "key": job.key,
        "seed": job.seed,
        "version": job.version,
        "adapter": job.adapter,
        "tokens": pack_tokens([5, 2]),
        "logprobs": pack_floats([-0.5, -0.5]),
        "finish_reason": "stop",
    }
    return Reply.model_validate(fields | changes)


@asynccontextmanager
async def world(root: Path, *, limited: bool = False, **options: Any) -> AsyncGenerator[World]:
    """A world under attack. Unless `limited`, no attempt is dropped for being one too many in a second."""
    with pytest.MonkeyPatch.context() as patch:
        # Nobody beats, and the polls are held, for as long as the attempts take.
        patch.setattr(fleet, "DEAD_S", NEVER_S)
        patch.setattr(fleet, "POLL_S", NEVER_S)
        if not limited:
            patch.setattr(requests, "RATES", dict.fromkeys(requests.RATES, (1e9, 1e9)))
        one = World(root)
        try:
            await one.start(**options)
            yield one
            await one.close()
        finally:
            one.server.kill()
