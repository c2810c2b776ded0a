"""The messages between coordinator and workers: msgpack maps with a protocol version.

Readers ignore fields that they do not know and refuse a version outside their range. Token ids and
logprobs are packed bytes (see `arrays`). A job id or worker name is also in the subject, so a
message that cannot be read can still be answered.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aether_common.errors import MessageError
from aether_common.identity import ModelIdentity

PROTOCOL = 1
"""The version that this release writes."""
PROTOCOL_MIN = 1
"""The oldest version that this release reads."""

Kind = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Token = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
Short = Annotated[str, Field(max_length=64)]
CLOCK_SKEW_S = 30.0
"""Clocks of two machines that differ by more are complained about."""
MAX_WINDOW = 4096
"""Jobs that one worker may hold: one that claims more would draw all work to itself."""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: int = PROTOCOL

    def encode(self) -> bytes:
        return pack(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises `MessageError` that says what is wrong with `data`."""
        body = unpack(data)
        version = body.get("v")
        if not isinstance(version, int) or not PROTOCOL_MIN <= version <= PROTOCOL:
            raise MessageError(
                f"{cls.__name__}: protocol version {version!r} is outside of {PROTOCOL_MIN}..{PROTOCOL}: "
                "upgrade the older side"
            )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise MessageError(f"{cls.__name__}: field {where}: {first['msg']}") from error


def pack(value: Any) -> bytes:
    """msgpack bytes of a plain value; a model is the map of its fields."""
    data = msgpack.packb(value, default=_fields)
    assert data is not None
    return data


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return vars(value)
    raise TypeError(f"can not serialize {type(value).__name__!r} object")


def unpack(data: bytes) -> dict[str, Any]:
    """A msgpack map with string keys. Raises `MessageError` for everything else."""
    try:
        body = msgpack.unpackb(data, strict_map_key=True)
    except Exception as error:
        raise MessageError(f"not msgpack: {error!r}") from error
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise MessageError(f"not a msgpack map with string keys: {type(body).__name__}")
    return body


class Sampling(BaseModel, extra="forbid", frozen=True):
    """Sampling parameters, normalised: what is not here is neutral."""

    NEUTRAL: ClassVar[dict[str, float]] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

    max_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    stop_token_ids: tuple[int, ...] = ()
    """Renderer, tokenizer and generation configuration together, ascending."""

    def shaped(self) -> list[str]:
        """The names of parameters that change the distribution beyond the temperature."""
        return [name for name, neutral in self.NEUTRAL.items() if getattr(self, name) != neutral]


class Job(Message):
    """One turn to generate: prompt tokens in, completion tokens out."""

    job: Token
    dispatch: int = Field(ge=0)
    """Raised by a reassignment; a reply counts only with the recorded one."""
    key: str
    """Key of the turn in the journal, echoed."""
    kind: Kind
    version: int = Field(ge=0)
    adapter: Digest
    prompt: bytes
    """uint32 token ids, at least one."""
    sampling: Sampling
    seed: int = Field(ge=0)
    """63 bits; always there, used by engines that are asked to."""
    session: str
    """Turns of one session share a prefix."""
    remaining_ms: int = Field(ge=0)
    """Time left when the job was published; bounds only the adapter fetch on the worker."""


class ReplyKind(StrEnum):
    OK = "ok"
    RETURNED = "returned"
    """Handed back: run it elsewhere."""
    ERROR = "error"
    """The attempt failed on this worker."""


class Reason(StrEnum):
    """Why a job was handed back or failed."""

    DRAIN = "drain"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    ADAPTER = "adapter_unavailable"
    ENGINE = "engine_error"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNREADABLE = "unreadable_job"


class Reply(Message):
    """What became of a job on a worker."""

    job: Token
    dispatch: int = Field(ge=0)
    worker: Token
    incarnation: Short
    kind: ReplyKind
    key: str = ""
    seed: int = 0
    version: int = 0
    adapter: str = ""
    tokens: bytes = b""
    """uint32 completion ids, the stop token included; nothing is appended on a length stop."""
    logprobs: bytes = b""
    """float32, one per completion token, of the distribution sampled from."""
    finish_reason: FinishReason | None = None
    wait_ms: float = 0.0
    """From the delivery of the job to the start of generation (adapter load included)."""
    generate_ms: float = 0.0
    reason: Reason | None = None
    message: str = Field(default="", max_length=4096)


class Registration(Message):
    """A worker introduces itself; the newest incarnation of a name wins."""

    worker: Token
    incarnation: Short
    protocol_min: int
    protocol_max: int
    engine: Short
    slots: int = Field(ge=1)
    """Jobs that generate at the same time."""
    window: int = Field(ge=1)
    """Jobs that may be outstanding: slots and prefetch."""
    identity: ModelIdentity
    max_model_len: int = Field(ge=1)
    versions: dict[Short, Short] = Field(default={}, max_length=32)
    """Package versions, for people."""
    check_only: bool = False
    """Only asks whether it would be accepted; nothing is registered."""


class RegistrationAnswer(Message):
    accepted: bool
    reason: str = ""
    protocol: int = PROTOCOL
    heartbeat_s: float = 5.0
    lease_s: float = 30.0
    """ack_wait of the lane: extend a job's lease well within it."""
    clock: float = 0.0
    """Unix time of the coordinator, seconds."""
    state: "DesiredState | None" = None


class Heartbeat(Message):
    """The state of a worker, a request whose answer is the desired state."""

    worker: Token
    incarnation: Short
    running: dict[Token, int] = Field(default={}, max_length=2 * MAX_WINDOW)
    """Generated tokens by job id, of every job that the worker holds."""
    adapters: list[Digest] = Field(default=[], max_length=1024)
    """Digests of the adapters that are loaded in the engine."""
    engine_ready: bool = True
    draining: bool = False
    tokens_total: int = 0
    """Completion tokens since the start of this incarnation."""
    adapter_load_s: float | None = None
    """How long the newest adapter took to fetch and load, seconds."""
    clock: float = 0.0
    """Unix time, seconds."""


class Poll(Message):
    """Asks for news after `revision`; held by the coordinator until there is some."""

    worker: Token
    incarnation: Short
    revision: int


class PolicyRef(BaseModel):
    """A policy that a worker should have ready."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int
    adapter: Digest


class DesiredState(Message):
    """What the coordinator wants of a worker; the answer to heartbeats and polls."""

    revision: int
    policies: list[PolicyRef] = []
    """Newest first."""
    cancel: list[str] = []
    """Job ids to abort; they count no more."""
    drain: bool = False
    superseded: bool = False
    """A newer incarnation of this worker registered: hand back and exit."""
    unknown: bool = False
    """The coordinator does not know this incarnation: register again."""


class PolicyManifest(BaseModel):
    """The value of a policy in the key-value bucket (JSON), for people and tools."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run: str
    run_uuid: str
    version: int
    adapter: Digest
    files: list[tuple[str, int, str]]
    """(name, size, SHA-256), sorted."""
    rank: int
    alpha: float
    target_modules: list[str]
    dtype: str
    base_model: ModelIdentity


RegistrationAnswer.model_rebuild()
