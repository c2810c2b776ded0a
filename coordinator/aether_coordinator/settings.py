"""Settings of the coordinator (`server.toml`)."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from aether_common.bus import COORDINATOR_SCHEMES, WORKER_SCHEMES, check_host, check_url, is_loopback
from aether_common.errors import ConfigError
from aether_common.identity import ModelIdentity, check_revision
from aether_common.names import Names
from aether_common.settings import ModelName, Section, Settings
from aether_common.wire import Sampling
from pydantic import Field, field_validator, model_validator

SourceName = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]


class NatsSettings(Section):
    """The message queue between machines."""

    directory: Path | None = None
    """What `aether-coordinator nats init` wrote for a nats-server on this host: `url`, `key_file` and the workers' URL
    come from there, and `worker add` and its like work on it."""
    url: str | None = None
    """`nats://` (loopback) or `tls://` URL of a nats-server that runs already; unset, and no `directory`: an embedded
    one is started."""
    key_file: Path | None = None
    """nkey seed of the coordinator; unset with `directory` or the embedded server, which have their own."""
    ca_file: Path | None = None
    """Certificate authority for a `tls://` url; unset: the system's."""
    public_url: str | None = None
    """URL that workers dial, as `worker add` prints it: for a proxy in front, or another name or port."""
    port: int = Field(default=0, ge=0, le=65535)
    """Embedded server: coordinator port on loopback; 0 takes a free one and keeps it."""
    websocket_port: int = Field(default=0, ge=0, le=65535)
    """Embedded server: WebSocket port for workers; 0 takes a free one and keeps it."""
    websocket_host: str = "127.0.0.1"
    """Embedded server: address for the workers' WebSocket port, for example 0.0.0.0; needs TLS unless loopback."""
    self_signed: list[str] = []
    """Embedded server: host names and addresses that workers dial, the first one in the URL; makes a private
    authority and a certificate for them in `run_root/nats`."""
    certificate: Path | None = None
    """Embedded server: PEM certificate chain for the WebSocket port, from a public or your own authority."""
    private_key: Path | None = None
    """Embedded server: PEM key of `certificate`."""
    max_storage_mib: int = Field(default=4096, ge=512)
    """Bound of JetStream's files."""

    @property
    def embedded(self) -> bool:
        return self.url is None and self.directory is None

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return value if value is None else check_url(value, COORDINATOR_SCHEMES)

    @field_validator("public_url")
    @classmethod
    def _public_url(cls, value: str | None) -> str | None:
        return value if value is None else check_url(value, WORKER_SCHEMES)

    @field_validator("self_signed")
    @classmethod
    def _self_signed(cls, value: list[str]) -> list[str]:
        return [check_host(host) for host in value]

    @model_validator(mode="after")
    def _external(self) -> Self:
        if self.embedded:
            for key in ("key_file", "ca_file"):
                if getattr(self, key) is not None:
                    raise ValueError(f"nats.{key} belongs to an external server: set nats.url, or remove it")
            return self
        if self.directory is None and self.key_file is None:
            raise ValueError("nats.url names an external server: set nats.key_file to the coordinator's nkey seed")
        for key in ("port", "websocket_port", "websocket_host", "self_signed", "certificate", "private_key"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"nats.{key} belongs to the embedded server, but nats.{'url' if self.url else 'directory'} names "
                    "another one: remove it (that server's own configuration decides)"
                )
        return self

    @model_validator(mode="after")
    def _encrypted(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("nats.certificate and nats.private_key belong together: set both or neither")
        if self.self_signed and self.certificate:
            raise ValueError("nats.self_signed and nats.certificate exclude each other: remove one")
        if not self.self_signed and not self.certificate and not is_loopback(self.websocket_host):
            raise ValueError(
                f"nats.websocket_host = {self.websocket_host!r} would let keys and jobs travel unencrypted: set "
                "nats.self_signed, or nats.certificate and nats.private_key; behind a proxy on this host leave it "
                "at 127.0.0.1"
            )
        for key in ("certificate", "private_key"):
            path = getattr(self, key)
            if path is not None and not path.is_file():
                raise ValueError(f"nats.{key} = '{path}': no such file")
        return self


class GatewaySettings(Section):
    """The loopback endpoint that verifiers' train client calls."""

    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""


class ControlSettings(Section):
    """The endpoint behind `status`, `pause`, `resume` and the `worker` commands."""

    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Another than loopback needs `token_file`, and a proxy with TLS in front."""
    token_file: Path | None = None
    """File (mode 600) with a token of 32 characters or more, which every request must then show; unset: a new one at
    each start, and `GET /status` is open to local programs."""
    allowed_hosts: list[str] = []
    """Names by which the endpoint is called, besides loopback and `host`: what a proxy sends as Host, without port."""

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        return value.strip("[]")

    @model_validator(mode="after")
    def _token(self) -> Self:
        if self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"control.host = {self.host!r} lets other machines ask: set control.token_file to a file with a token "
                "(`openssl rand -hex 32`, chmod 600)"
            )
        return self


class SamplingSettings(Section):
    """Sampling of a source."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy (evaluations only)."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest completion of one turn."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus; 1 keeps all (train sources must)."""
    top_k: int = Field(default=0, ge=0)
    """0 keeps all (train sources must)."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Smallest probability relative to the largest; 0 keeps all (train sources must)."""


class SourceSettings(Section):
    """What train and evaluation sources share."""

    name: SourceName
    """Name in logs, results and metrics."""
    taskset: str
    """verifiers taskset id: an installed module with one `Taskset` in `__all__`."""
    taskset_args: dict[str, Any] = {}
    """Fields of the taskset's own config."""
    harness: str = "chat"
    """`chat` runs the conversation in the coordinator's process; else a verifiers harness id."""
    harness_args: dict[str, Any] = {}
    """Fields of the harness's own config."""
    runtime: dict[str, Any] = {"type": "subprocess"}
    """verifiers runtime table of the agent, for example {type = "docker", image = "…"}."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns per episode; None: the taskset decides."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first so many tasks."""
    sampling: SamplingSettings = SamplingSettings()
    """Sampling parameters of this source."""


class TrainSource(SourceSettings):
    """A `[[train]]` table: a taskset that groups are drawn from."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the groups relative to the other train sources."""
    shuffle: bool = True
    """Draw tasks in a seeded order, another one each epoch."""

    @model_validator(mode="after")
    def _neutral(self) -> Self:
        sampling = Sampling(**self.sampling.model_dump())
        if shaped := sampling.shaped():
            raise ValueError(
                f"train source {self.name!r}: sampling.{shaped[0]} is not neutral: training needs the logprobs of the "
                "full distribution; remove it (evaluations may set it)"
            )
        if self.sampling.temperature == 0:
            raise ValueError(f"train source {self.name!r}: sampling.temperature = 0 has no exploration: use e.g. 1.0")
        return self


class EvalSource(SourceSettings):
    """An `[[eval]]` table: tasks that are never trained on, at pinned policy versions."""

    episodes_per_task: int = Field(default=1, ge=1)
    """Episodes of each task."""
    every: int | None = Field(default=None, ge=1)
    """Evaluate every so many policy versions; the first and the last are always evaluated."""


class BatchSettings(Section):
    """How episodes become training steps."""

    groups: int = Field(default=8, ge=1)
    """Groups (tasks) in a batch."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of each task, compared with each other."""
    max_policy_lag: int = Field(default=1, ge=0)
    """How many versions a trained group may be older than the policy that step s trains from; 0: synchronous."""
    drop_uniform_groups: bool = False
    """Replace groups whose rewards are all equal instead of counting their tokens without a gradient."""
    group_deadline_s: float = Field(default=1800.0, gt=0)
    """How long a batch waits for the running groups that could not enter a later one."""


class EpisodeSettings(Section):
    """Limits of running episodes."""

    max_concurrent: int = Field(default=256, ge=1)
    """Episodes that run at the same time."""
    max_attempts: int = Field(default=3, ge=1)
    """Runs of one episode that infrastructure made fail before the group is dropped."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Time of one episode without the time its turns waited for a worker."""
    drain_s: float = Field(default=10.0, ge=0)
    """How long a stop waits for running episodes; what is not finished then stays journaled and runs again."""
    stall_s: float = Field(default=300.0, ge=15)
    """Seconds without a token after which a job is taken from its worker; how long it takes does not matter."""
    turn_deadline_s: float = Field(default=1800.0, gt=0)
    """Time of one turn, waiting included, before it fails as infrastructure."""


class TrainerProcess(Section):
    """The supervised trainer."""

    config: Path
    """Its settings file (`trainer.toml`)."""
    python: Path | None = None
    """Interpreter of the trainer's environment; unset: this one."""
    stall_s: float = Field(default=1800.0, gt=0)
    """Seconds without a sign of progress, start and one step included, after which it is killed and restarted."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts without a new checkpoint before the run stops."""


class RetentionSettings(Section):
    """What old steps leave behind."""

    keep_steps: int | None = Field(default=100, ge=2)
    """Batches, traces, turn journal and checkpoints of so many newest steps are kept; None (`"none"`) keeps all."""

    @field_validator("keep_steps", mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        return None if value == "none" else value


class WatchdogSettings(Section):
    """What happens when the run stands still."""

    after_s: float = Field(default=900.0, gt=0)
    """Seconds without a completed step after which the log says what the run waits for."""
    stop: bool = False
    """Stop then, with exit code 11."""


class ServerSettings(Settings):
    """`server.toml`: one run."""

    PREFIX: ClassVar[str] = "AETHER_SERVER_"

    run: str
    """Name of the run: lower-case letters, digits, hyphens; part of every subject."""
    run_root: Path
    """Directory of the run: state, batches, checkpoints, logs."""
    steps: int = Field(ge=1)
    """Training steps after which the run is finished."""
    seed: int = 0
    """Fixes the order of tasks and the seeds of jobs."""
    model: ModelName
    """Base model: hub repository or local directory (its tokenizer is read here)."""
    base_model: ModelIdentity
    """What `aether-coordinator identity` prints; trainer and workers must load exactly this."""
    renderer: dict[str, Any] = {}
    """Options of the renderer that `base_model.renderer` names."""
    max_model_len: int = Field(ge=1)
    """Longest prompt plus completion, in tokens; workers must serve at least this."""
    train: list[TrainSource] = Field(min_length=1)
    """What is trained on."""
    eval: list[EvalSource] = []
    """What is measured."""
    batch: BatchSettings = BatchSettings()
    episodes: EpisodeSettings = EpisodeSettings()
    trainer: TrainerProcess
    """The trainer's process."""
    retention: RetentionSettings = RetentionSettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    nats: NatsSettings = NatsSettings()
    gateway: GatewaySettings = GatewaySettings()
    control: ControlSettings = ControlSettings()
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe messages that are logged."""

    @field_validator("run")
    @classmethod
    def _run(cls, value: str) -> str:
        try:
            return Names(value).run
        except ConfigError as error:  # pydantic adds file and key to a ValueError only
            raise ValueError(str(error)) from None

    @field_validator("base_model")
    @classmethod
    def _revision(cls, value: ModelIdentity) -> ModelIdentity:
        if not value.weights or not value.revision:
            raise ValueError(
                "not filled in: replace the table by what `aether-coordinator identity MODEL --revision SHA "
                "--dtype DTYPE --renderer NAME` prints (without --revision for a local directory)"
            )
        check_revision(value.revision)
        return value

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [source.name for source in (*self.train, *self.eval)]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are named {repeated[0]!r}: give each its own name")
        for source in (*self.train, *self.eval):
            if source.sampling.max_tokens >= self.max_model_len:
                raise ValueError(
                    f"source {source.name!r}: sampling.max_tokens = {source.sampling.max_tokens} leaves no room for a "
                    f"prompt in max_model_len = {self.max_model_len}"
                )
        return self
