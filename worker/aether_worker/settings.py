"""Settings of a worker (`worker.toml`)."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal, Self

from aether_common.bus import WORKER_SCHEMES, check_url
from aether_common.errors import ConfigError
from aether_common.identity import check_revision, is_local
from aether_common.names import Names, check_token
from aether_common.settings import Section, Settings
from pydantic import Field, SecretStr, field_validator, model_validator

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as `--max-lora-rank`."""

REFUSED_VLLM_FLAGS = (
    "--api-key",
    "--api-server-count",
    "--code-revision",
    "--config",
    "--config-format",
    "--convert",
    "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb",
    "--data-parallel-multi-port-external-lb",
    "--default-mm-loras",
    "--device-memory-utilization",
    "--diffusion-config",
    "--disable-sliding-window",
    "--dtype",
    "--enable-force-include-usage",
    "--enable-lora",
    "--enable-mamba-cache-stochastic-rounding",
    "--enable-prefix-caching",
    "--enable-scale-out",
    "--generation-config",
    "--gpu-memory-utilization",
    "--grpc",
    "--headless",
    "--hf-config-path",
    "--hf-overrides",
    "--host",
    "--kv-cache-dtype",
    "--kv-cache-dtype-skip-layers",
    "--load-format",
    "--logits-processors",
    "--logprobs-mode",
    "--lora-dtype",
    "--lora-modules",
    "--lora-target-modules",
    "--mamba-cache-dtype",
    "--mamba-ssm-cache-dtype",
    "--max-cpu-loras",
    "--max-logprobs",
    "--max-lora-rank",
    "--max-loras",
    "--max-model-len",
    "--max-num-seqs",
    "--middleware",
    "--model",
    "--model-class-overrides",
    "--override-generation-config",
    "--port",
    "--quantization",
    "--quantization-config",
    "--reasoning-config",
    "--revision",
    "--root-path",
    "--runner",
    "--scheduler-cls",
    "--seed",
    "--served-model-name",
    "--spec-method",
    "--spec-model",
    "--spec-tokens",
    "--speculative-config",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--stream-interval",
    "--tensor-parallel-size",
    "--tokenizer",
    "--tokenizer-revision",
    "--uds",
    "--watermark-config",
    "--weight-transfer-config",
    "--worker-cls",
    "--worker-extension-cls",
    "-asc",
    "-dc",
    "-dpe",
    "-dph",
    "-dpm",
    "-q",
    "-sc",
    "-tp",
)
"""What the settings or the contract decide: identity, distribution sampled from, logprobs, LoRA, address."""
HARMLESS_VLLM_FLAGS = ("--watermark", "-dp")
"""Flags of their own that read like the beginning of a refused one."""


def refused_flag(argument: str) -> str | None:
    """The refused flag that an argument of vLLM sets, in any spelling that its parser takes; None if it may pass.

    That is: abbreviated, negated (`--no-…`), with a dotted key, or a value attached (`-qfp8`).
    """
    flag = argument.partition("=")[0].partition(".")[0].replace("_", "-")
    if flag in HARMLESS_VLLM_FLAGS:
        return None
    if not flag.startswith("--"):
        if flag.startswith("-q"):
            return "-q"
        return next((refused for refused in REFUSED_VLLM_FLAGS if len(flag) > 1 and refused.startswith(flag)), None)
    long = "--" + flag.removeprefix("--").removeprefix("no-")
    if len(long) < 3:
        return None
    if long in REFUSED_VLLM_FLAGS:
        return long
    return next((refused for refused in REFUSED_VLLM_FLAGS if refused.startswith(long)), None)


OWN_HEADERS = {"host", "connection", "upgrade", "content-length", "transfer-encoding"}
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _plain(check: Callable[[], str]) -> str:
    # pydantic adds file and key to a ValueError only.
    try:
        return check()
    except ConfigError as error:
        raise ValueError(str(error)) from None


class TransformersSettings(Section):
    """The CPU engine."""

    threads: int = Field(default=1, ge=1)
    """Threads of one forward pass; processes that share cores crawl with more than their share."""
    batch_invariant: bool = False
    """One row at a time: the tokens of a job do not depend on what else is in the queue. Slow."""
    device: str = "cpu"
    """torch device of the model."""


class VllmSettings(Section):
    """The supervised vLLM server."""

    python: Path | None = None
    """Interpreter of the environment that has vLLM; unset: this one."""
    extra_args: list[str] = Field(default=[])
    """Further flags of the server, for example ["--enforce-eager"]."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model."""
    prefix_caching: bool = True
    """Keep the KV cache of prompts: later turns of an episode, and episodes of one task, share it."""
    max_loras: int = Field(default=4, ge=1)
    """Adapters in one batch: max_policy_lag + 2, and one for each version under evaluation."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Largest adapter rank; rounded up to what vLLM accepts."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory for weights and KV cache."""
    startup_s: float = Field(default=900.0, gt=0)
    """How long vLLM may take until it is ready."""
    max_memory_gib: float | None = Field(default=None, gt=0)
    """Host memory of vLLM above which it is started again, when its requests are done; None: no limit."""

    @field_validator("max_lora_rank")
    @classmethod
    def _rank(cls, value: int) -> int:
        return next(rank for rank in LORA_RANKS if rank >= value)

    @field_validator("extra_args")
    @classmethod
    def _flags(cls, value: list[str]) -> list[str]:
        for argument in value:
            if (flag := refused_flag(argument)) is not None:
                raise ValueError(
                    f"{argument!r} sets {flag}, which is set by the worker or would change what is sampled: remove it"
                )
        return value


class NullSettings(Section):
    """The engine without a model, for benchmarks of everything around it."""

    tokens: list[int] = Field(default=[1, 2, 3, 4], min_length=1)
    """The completion of every job."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Rate of one job; None answers at once."""


class TlsSettings(Section):
    """Certificates for a `wss://` url; the host's name is always verified."""

    ca_file: Path | None = None
    """PEM certificate of the authority that the server's certificate must come from; unset: the system's."""
    certificate: Path | None = None
    """PEM certificate that this worker shows, where the server or a proxy demands one."""
    private_key: Path | None = None
    """PEM key of `certificate`, without a password."""

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key belong together: set both or neither")
        return self


class WorkerSettings(Settings):
    """`worker.toml`: one node."""

    PREFIX: ClassVar[str] = "AETHER_WORKER_"

    name: str
    """Name of this worker: lower-case letters, digits, hyphens; its key belongs to this name."""
    run: str
    """Name of the run to work for."""
    url: str
    """`wss://` URL of the run's nats-server (`ws://` to loopback only)."""
    key_file: Path
    """nkey seed that `aether-coordinator worker add` wrote."""
    model: str
    """Base model: hub repository or local directory."""
    revision: str | None = None
    """Full commit of a hub repository; of a local directory optional (`sha256:…`)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Serving dtype, the same on every machine of the run."""
    quantization: Literal["none"] = "none"
    """Quantisation of the served weights; none is supported."""
    engine: Literal["vllm", "transformers", "null"] = "vllm"
    """vllm on a GPU, transformers on a CPU; null answers without a model (benchmarks)."""
    slots: int = Field(default=32, ge=1)
    """Jobs that generate at the same time."""
    prefetch: int = Field(default=8, ge=0)
    """Jobs that wait here beyond the slots, so that none idles for a round trip."""
    max_model_len: int = Field(default=4096, ge=2)
    """Longest prompt plus completion, in tokens."""
    state_dir: Path
    """Adapter cache and logs."""
    adapter_cache_mib: int = Field(default=4096, ge=1)
    """Bound of the adapter cache; adapters in use are kept beyond it."""
    drain_s: float = Field(default=60.0, ge=0)
    """After SIGTERM: how long running jobs may take to finish."""
    transformers: TransformersSettings = TransformersSettings()
    vllm: VllmSettings = VllmSettings()
    null: NullSettings = NullSettings()
    tls: TlsSettings = TlsSettings()
    headers: dict[str, SecretStr] = {}
    """Headers of the request that opens the WebSocket, for a proxy in front of the server. Values are not logged."""
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe messages that are logged."""

    @property
    def window(self) -> int:
        """Jobs that may be outstanding."""
        return self.slots + self.prefetch

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return _plain(lambda: check_token(value, "worker name"))

    @field_validator("run")
    @classmethod
    def _run(cls, value: str) -> str:
        return _plain(lambda: Names(value).run)

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        return check_url(value, WORKER_SCHEMES)

    @field_validator("headers", mode="before")
    @classmethod
    def _headers(cls, value: object) -> object:
        """Without the values in any message: they are secrets."""
        if not isinstance(value, dict):
            raise ValueError('write a table: [headers], then lines like X-Token = "…"')
        for name, content in value.items():
            if not _HEADER.fullmatch(str(name)):
                raise ValueError(f"{name!r} is no name of an HTTP header")
            if str(name).lower() in OWN_HEADERS or str(name).lower().startswith("sec-websocket-"):
                raise ValueError(f"{name} belongs to the WebSocket itself: remove it")
            text = content.get_secret_value() if isinstance(content, SecretStr) else content
            if not isinstance(text, str) or not text.isprintable() or not text.isascii():
                raise ValueError(f"the value of {name} must be a string of printable ASCII characters")
        return value

    @field_validator("revision")
    @classmethod
    def _revision(cls, value: str | None) -> str | None:
        return value if value is None else check_revision(value)

    @model_validator(mode="after")
    def _tls(self) -> Self:
        if self.url.startswith("ws://") and self.tls != TlsSettings():
            raise ValueError(f"[tls] has no effect on url = {self.url!r}: use wss://, or remove the table")
        return self

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if self.revision is None and not is_local(self.model):
            raise ValueError(
                f"model = {self.model!r} is no local directory, so it is taken from the hub: set revision to its full "
                "40-hex commit, or give an existing directory"
            )
        return self


def prepare_state_dir(path: Path) -> None:
    """Make the directory. Raises `ConfigError` when it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"state_dir = {str(path)!r} cannot be written ({error.strerror}): give this user write access, free space "
            "on the disk, or choose another directory"
        ) from error
