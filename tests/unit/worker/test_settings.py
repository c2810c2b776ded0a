"""Mistakes in `worker.toml` are told with file, key, value and remedy."""

import json
from pathlib import Path

import pytest
from aether_common.errors import ConfigError
from aether_worker.settings import WorkerSettings

GOOD = """
name = "w1"
run = "demo"
url = "ws://127.0.0.1:4443"
key_file = "w1.seed"
model = "{model}"
state_dir = "state"
"""


def load(tmp_path: Path, text: str = "", overrides: list[str] | None = None) -> WorkerSettings:
    file = tmp_path / "worker.toml"
    file.write_text(GOOD.format(model=tmp_path) + text)
    return WorkerSettings.load(file, overrides)


def test_defaults_and_relative_paths(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert settings.key_file == tmp_path / "w1.seed"
    assert settings.state_dir == tmp_path / "state"
    assert (settings.engine, settings.slots, settings.window) == ("vllm", 32, 40)


def test_the_interpreter_of_an_environment_stays_one(tmp_path: Path) -> None:
    """`bin/python` of a virtual environment is a link; what it points to lacks the environment's packages."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "python").symlink_to("/usr/bin/env")
    settings = load(tmp_path, overrides=["vllm.python=deeper/../env/python"])
    assert settings.vllm.python == tmp_path / "env" / "python"


def test_overrides_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AETHER_WORKER_SLOTS", "4")
    monkeypatch.setenv("AETHER_WORKER_VLLM__MAX_LORA_RANK", "20")
    settings = load(tmp_path, overrides=["engine=null", "null.tokens=[7]", "prefetch=1"])
    assert (settings.engine, settings.window, settings.null.tokens) == ("null", 5, [7])
    assert settings.vllm.max_lora_rank == 32


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nme=x", r"--set nme=x: unknown key nme: known here are .*name"),
        ("name=W 1", r"name = 'W 1': worker name 'W 1': use 1 to 64 lower-case letters"),
        ("run=De.mo", r"run = 'De.mo': run 'De.mo': use 1 to 40"),
        ("url=ws://example.org:443", r"url = .*unencrypted connections are accepted to loopback only: use wss"),
        ("url=https://example.org", r"the scheme must be one of wss, ws"),
        ("slots=0", r"slots = 0: .*greater than or equal to 1"),
        ("slots=many", r"slots = 'many': .*integer"),
        ("model=org/name", r"model = 'org/name' is no local directory.*set revision to its full 40-hex commit"),
        ("revision=main", r"revision = 'main': .*full 40-hex commit"),
        ("dtype=float16", r"dtype = 'float16': .*'float32' or 'bfloat16'"),
        ('vllm.extra_args=["--logprobs-mode", "raw_logprobs"]', r"sets --logprobs-mode, which is set by the worker"),
        ('vllm.extra_args=["--speculative_config.method=ngram"]', r"sets --speculative-config, which is set"),
        ('vllm.extra_args=["--quantiz", "fp8"]', r"'--quantiz' sets --quantization, which is set by the worker"),
        ('vllm.extra_args=["-q=fp8"]', r"'-q=fp8' sets -q, which is set by the worker"),
        ('vllm.extra_args=["-sc.method=ngram"]', r"sets -sc, which is set by the worker"),
        ('vllm.extra_args=["-qfp8"]', r"'-qfp8' sets -q, which is set by the worker"),
        ('vllm.extra_args=["--dt", "float16"]', r"'--dt' sets --dtype, which is set by the worker"),
        ('vllm.extra_args=["--no-enable_lora"]', r"sets --enable-lora, which is set by the worker"),
        ("vllm.max_lora_rank=513", r"vllm.max_lora_rank = 513"),
        ('vllm.extra_args=["--kv_cache_dtype=fp8"]', r"'--kv_cache_dtype=fp8' sets --kv-cache-dtype, which"),
        ("null.tokens=[]", r"null.tokens: .*at least 1 item"),
        ("transformers.threads=0", r"transformers.threads = 0"),
    ],
)
def test_mistakes(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, overrides=[override])


def test_what_only_looks_like_a_refused_flag_of_vllm_passes(tmp_path: Path) -> None:
    arguments = ["--watermark=0.1", "-dp", "2", "--max-num-batched-tokens", "-1", "--enforce-eager", "-O3"]
    settings = load(tmp_path, overrides=[f"vllm.extra_args={json.dumps(arguments)}"])
    assert settings.vllm.extra_args == arguments


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(GOOD.format(model=tmp_path).replace("run =", "# run ="))
    with pytest.raises(ConfigError, match=r"worker.toml: key run is missing: add it"):
        WorkerSettings.load(file)


def test_certificates_and_headers(tmp_path: Path) -> None:
    text = (
        '[tls]\nca_file = "ca.pem"\ncertificate = "w1.pem"\nprivate_key = "w1.key"\n[headers]\nX-Token = "secret-7"\n'
    )
    settings = load(tmp_path, text, ["url=wss://example.org/run"])
    assert settings.tls.ca_file == tmp_path / "ca.pem"
    assert (settings.tls.certificate, settings.tls.private_key) == (tmp_path / "w1.pem", tmp_path / "w1.key")
    assert settings.headers["X-Token"].get_secret_value() == "secret-7"
    assert "secret-7" not in f"{settings!r} {settings.model_dump()} {settings.model_dump_json()}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tls]\ncertificate = "w1.pem"', "tls: certificate and private_key belong together: set both or neither"),
        ('[tls]\nca = "ca.pem"', "unknown key tls.ca: known here are ca_file, certificate, private_key"),
        ('[headers]\n"X Token" = "secret"', "headers: 'X Token' is no name of an HTTP header"),
        ('[headers]\nHost = "secret"', "headers: Host belongs to the WebSocket itself: remove it"),
        ('[headers]\nSec-WebSocket-Key = "secret"', "Sec-WebSocket-Key belongs to the WebSocket itself"),
        (
            '[headers]\nX-A = "secret\\nX-B: 1"',
            "headers: the value of X-A must be a string of printable ASCII characters",
        ),
        ("[headers]\nX-A = [5]", "headers: the value of X-A must be a string"),
    ],
)
def test_wrong_certificates_and_headers_are_told_without_their_values(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, ["url=wss://example.org"])
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_certificates_without_encryption_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[tls\] has no effect on url = 'ws://127.0.0.1:4443': use wss://"):
        load(tmp_path, '[tls]\nca_file = "ca.pem"')
