"""Every name on the bus: streams, buckets, consumers, subjects. Nothing else spells a subject.

Tokens (run, worker, job) are plain: lower-case letters, digits and hyphens. The job id and the
worker stand in the subject, so that a message that cannot be parsed is still attributed.
"""

import base64
import re
from dataclasses import dataclass

from aether_common.errors import ConfigError

_RUN = re.compile(r"[a-z0-9-]{1,40}")
_TOKEN = re.compile(r"[a-z0-9-]{1,64}")


def check_token(value: str, what: str) -> str:
    """Return `value` if it is a plain subject token. Raises `ConfigError` otherwise."""
    if not _TOKEN.fullmatch(value):
        raise ConfigError(f"{what} {value!r}: use 1 to 64 lower-case letters, digits and hyphens")
    return value


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one run."""

    run: str

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise ConfigError(f"run {self.run!r}: use 1 to 40 lower-case letters, digits and hyphens")

    # Streams and buckets
    @property
    def jobs(self) -> str:
        return f"AETHER_{self.run}_JOBS"

    @property
    def replies(self) -> str:
        return f"AETHER_{self.run}_REPLIES"

    @property
    def policies(self) -> str:
        return f"aether-{self.run}-policies"

    @property
    def artifacts(self) -> str:
        return f"aether-{self.run}-artifacts"

    @property
    def artifacts_stream(self) -> str:
        """The stream behind the object store."""
        return f"OBJ_{self.artifacts}"

    # Lanes and jobs
    def consumer(self, worker: str) -> str:
        return f"w-{worker}"

    @property
    def all_jobs(self) -> str:
        return f"aether.{self.run}.jobs.>"

    def lane(self, worker: str) -> str:
        return f"aether.{self.run}.jobs.{worker}.>"

    def job(self, worker: str, kind: str, version: int, job: str) -> str:
        return f"aether.{self.run}.jobs.{worker}.{kind}.{version}.{job}"

    def job_anywhere(self, job: str) -> str:
        return f"aether.{self.run}.jobs.*.*.*.{job}"

    # Replies
    @property
    def all_replies(self) -> str:
        return f"aether.{self.run}.replies.*.*"

    def reply(self, worker: str, job: str) -> str:
        return f"aether.{self.run}.replies.{worker}.{job}"

    # Fleet requests
    @property
    def owner(self) -> str:
        return f"aether.{self.run}.owner"

    def fleet(self, kind: str, worker: str = "*") -> str:
        """`kind` is hb (heartbeat), reg (registration) or poll."""
        return f"aether.{self.run}.fleet.{kind}.{worker}"

    # What the workers' account maps to JetStream's interface in the coordinator's account
    def next(self, worker: str = "*") -> str:
        token = "*" if worker == "*" else self.consumer(worker)
        return f"aether.{self.run}.next.{token}"

    @property
    def next_api(self) -> str:
        return f"$JS.API.CONSUMER.MSG.NEXT.{self.jobs}.*"

    @property
    def ack_api(self) -> str:
        return f"$JS.ACK.{self.jobs}.>"

    def ack(self, worker: str) -> str:
        return f"$JS.ACK.{self.jobs}.{self.consumer(worker)}.>"

    @property
    def artifact_get(self) -> str:
        return f"aether.{self.run}.art.get"

    @property
    def artifact_get_api(self) -> str:
        return f"$JS.API.DIRECT.GET.{self.artifacts_stream}"

    def artifact_meta(self, digest: str = "*") -> str:
        return f"aether.{self.run}.art.meta.{object_token(digest)}"

    def artifact_meta_api(self, digest: str = "*") -> str:
        return f"{self.artifact_get_api}.$O.{self.artifacts}.M.{object_token(digest)}"

    def artifact_chunks(self, nuid: str) -> str:
        return f"$O.{self.artifacts}.C.{nuid}"

    def inbox(self, worker: str) -> str:
        return f"_INBOX_{worker}"


def object_token(name: str) -> str:
    """How an object store writes an object's name into a subject (base64url); `*` stays."""
    return name if name == "*" else base64.urlsafe_b64encode(name.encode()).decode()


def parse_job(subject: str) -> tuple[str, str, int, str]:
    """(worker, kind, version, job) of a job subject. Raises `ValueError` when it is none."""
    *_, worker, kind, version, job = subject.split(".")
    return worker, kind, int(version), job


def parse_reply(subject: str) -> tuple[str, str]:
    """(worker, job) of a reply subject."""
    *_, worker, job = subject.split(".")
    return worker, job
