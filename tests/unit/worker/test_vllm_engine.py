"""The vLLM engine against a small HTTP child that the same code starts (real vLLM has its own tests)."""

import asyncio
import errno
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aether_common.wire import Sampling
from aether_worker.engine import vllm_server
from aether_worker.engine.base import EngineError, EngineUnavailable, PromptTooLong, Request, UnknownAdapter
from aether_worker.engine.vllm_engine import VllmEngine, checked, events, read_event
from aether_worker.engine.vllm_server import arguments, rotate
from aether_worker.settings import VllmSettings, WorkerSettings
from loguru import logger

A = "a" * 64

FAKE = """#!{python}
import asyncio, json, os, signal, sys
from pathlib import Path
from aiohttp import web

state = Path({state!r})
arguments = sys.argv[1:]
if (state / "broken").exists():
    sys.exit("no GPU here")
with (state / "starts").open("a") as file:
    keys = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "HF_HUB_OFFLINE")
    entry = {{"arguments": arguments, "env": {{key: os.environ.get(key) for key in keys}}, "pid": os.getpid()}}
    file.write(json.dumps(entry) + "\\n")
loaded = {{}}

def chunk(token, logprob, reason):
    content = [{{"token_id": token, "logprob": logprob, "rank": 1}}]
    return {{"token_ids": [token], "finish_reason": reason, "logprobs": {{"content": content}}}}

def record(path, body):
    with (state / "requests").open("a") as file:
        file.write(json.dumps([path, body]) + "\\n")

async def health(request):
    while (state / "hung").exists():
        await asyncio.sleep(0.02)
    return web.Response()

async def load(request):
    body = await request.json()
    record(request.path, body)
    if body["lora_name"] in loaded:
        return web.json_response({{"error": {{"message": "it has already been loaded"}}}}, status=400)
    if not Path(body["lora_path"]).is_dir():
        return web.json_response({{"error": {{"message": "no such path"}}}}, status=404)
    loaded[body["lora_name"]] = body["lora_path"]
    return web.Response(text="Success")

async def unload(request):
    loaded.pop((await request.json())["lora_name"])
    return web.Response(text="Success")

async def abort(request):
    record(request.path, await request.json())
    return web.Response()

async def generate(request):
    body = await request.json()
    record(request.path, body)
    if body["model"] not in loaded:
        return web.json_response({{"error": {{"message": "unknown model"}}}}, status=404)
    if body["token_ids"] == [666]:
        os._exit(3)
    if not body.get("stream"):
        return web.json_response({{"choices": [chunk(5, -0.5, "length")]}})
    response = web.StreamResponse(headers={{"Content-Type": "text/event-stream"}})
    await response.prepare(request)
    for choice in (chunk(5, -0.5, None), chunk(2, -0.25, "stop")):
        await response.write(b"data: " + json.dumps({{"choices": [choice]}}).encode() + b"\\n\\n")
        if body["token_ids"] == [777]:
            await asyncio.sleep(60)
        if body["token_ids"] == [888]:
            (state / "streaming").touch()
            while not (state / "go on").exists():
                await asyncio.sleep(0.02)
    await response.write(b"data: [DONE]\\n\\n")
    return response

stubborn = (state / "stubborn").exists()
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
app = web.Application()
app.router.add_get("/health", health)
app.router.add_post("/v1/load_lora_adapter", load)
app.router.add_post("/v1/unload_lora_adapter", unload)
app.router.add_post("/inference/v1/abort_requests", abort)
app.router.add_post("/inference/v1/generate", generate)
port = int(arguments[arguments.index("--port") + 1])
web.run_app(app, host="127.0.0.1", port=port, print=None, shutdown_timeout=0.1, handle_signals=not stubborn)
"""


class Fake:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "python"
        self.python.write_text(FAKE.format(python=sys.executable, state=str(directory)))
        self.python.chmod(0o755)
        self.adapter = directory / "adapter"
        self.adapter.mkdir()
        self.settings = WorkerSettings(
            name="w1",
            run="test",
            url="ws://127.0.0.1:1",
            key_file=directory / "key",
            model=str(directory),
            dtype="float32",
            slots=7,
            max_model_len=16,
            state_dir=directory,
            vllm=VllmSettings(python=self.python, extra_args=["--enforce-eager"], max_lora_rank=9, startup_s=20),
        )

    def lines(self, name: str) -> list[Any]:
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(vllm_server, "RESTART_S", (0.05, 0.2))
    monkeypatch.setattr(vllm_server, "WATCH_S", 0.05)
    return Fake(tmp_path)


@pytest.fixture
async def engine(fake: Fake) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(fake.settings, fake.directory)
    await engine.start()
    await engine.load_adapter(4, A, fake.adapter)
    yield engine
    await engine.stop()


def request(*prompt: int, **sampling: Any) -> Request:
    return Request("job-1", A, list(prompt), Sampling(max_tokens=50, **sampling), seed=9)


async def test_flags_environment_and_a_request(fake: Fake, engine: VllmEngine) -> None:
    assert await engine.health()
    seen: list[int] = []
    generation = await engine.generate(request(3, 4, temperature=0.7, stop_token_ids=(2,)), seen.append)
    assert (generation.tokens, generation.logprobs, generation.finish_reason) == ([5, 2], [-0.5, -0.25], "stop")
    assert seen == [1, 2]
    (start,) = fake.lines("starts")
    flags = " ".join(start["arguments"])
    assert flags.startswith("-m vllm.entrypoints.openai.api_server --host 127.0.0.1")
    for part in (
        f"--model {fake.directory}",
        "--dtype float32",
        "--max-model-len 16",
        "--max-num-seqs 7",
        "--enable-lora --max-lora-rank 16 --max-loras 4 --max-cpu-loras 8",
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--enforce-eager",
    ):
        assert part in flags
    assert start["env"] == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1"}
    load, probe, generate = fake.lines("requests")
    assert load == ["/v1/load_lora_adapter", {"lora_name": f"v4-{A}", "lora_path": str(fake.adapter)}]
    assert (probe[1]["model"], probe[1]["sampling_params"]["max_tokens"]) == (f"v4-{A}", 1)
    assert generate[1]["model"] == f"v4-{A}"
    assert generate[1]["token_ids"] == [3, 4]
    parameters = generate[1]["sampling_params"]
    # The context of 16 leaves room for 14 tokens; the seed does not travel.
    assert (parameters["max_tokens"], parameters["temperature"], parameters["stop_token_ids"]) == (14, 0.7, [2])
    assert (parameters["logprobs"], parameters["ignore_eos"]) == (1, True)
    assert "seed" not in parameters


async def test_its_death_fails_the_request_and_it_comes_back_with_its_adapters(fake: Fake, engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="does not answer"):
        await engine.generate(request(666), lambda _: None)
    await until_healthy(engine)
    assert (await engine.generate(request(3), lambda _: None)).tokens == [5, 2]
    assert len(fake.lines("starts")) == 2
    # Loading again what is there already is no failure.
    await engine.load_adapter(4, A, fake.adapter)


async def test_a_cancelled_call_is_aborted_in_the_server(fake: Fake, engine: VllmEngine) -> None:
    call = asyncio.create_task(engine.generate(request(777), lambda _: None))
    async with asyncio.timeout(10):
        while len(fake.lines("requests")) < 3:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert fake.lines("requests")[-1] == ["/inference/v1/abort_requests", {"request_ids": ["generate-tokens-job-1"]}]


async def test_typed_errors(fake: Fake, engine: VllmEngine) -> None:
    with pytest.raises(PromptTooLong):
        await engine.generate(request(*range(16)), lambda _: None)
    with pytest.raises(EngineError, match="no such path"):
        await engine.load_adapter(5, "b" * 64, fake.directory / "nowhere")
    await engine.unload_adapter(A)
    with pytest.raises(UnknownAdapter):
        await engine.generate(request(3), lambda _: None)


async def test_a_failed_start_shows_the_end_of_the_log(fake: Fake) -> None:
    (fake.directory / "broken").touch()
    engine = VllmEngine(fake.settings, fake.directory)
    with pytest.raises(EngineError, match=r"exit code 1 while it started(?s:.*)no GPU here"):
        await engine.start()
    await engine.stop()


async def test_an_end_while_it_starts_is_bounded_and_leaves_nothing(fake: Fake) -> None:
    (fake.directory / "hung").touch()
    engine = VllmEngine(fake.settings, fake.directory)
    start = asyncio.create_task(engine.start())
    await until(lambda: len(fake.lines("starts")) == 1)
    start.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await start
        await engine.stop()
    assert not alive(fake.lines("starts")[0]["pid"])


async def test_an_adapter_is_forgotten_while_it_starts_again(fake: Fake, engine: VllmEngine) -> None:
    (fake.directory / "hung").touch()
    os.kill(fake.lines("starts")[0]["pid"], signal.SIGKILL)
    await until(lambda: len(fake.lines("starts")) == 2)
    await engine.unload_adapter(A)
    (fake.directory / "hung").unlink()
    await until_healthy(engine)
    assert [path for path, _ in fake.lines("requests")].count("/v1/load_lora_adapter") == 1


async def test_no_child_outlives_a_killed_worker(fake: Fake) -> None:
    code = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_vllm_engine import Fake, VllmEngine
async def main():
    fake = Fake.__new__(Fake)
    settings = __import__("pickle").loads(Path(sys.argv[2], "settings").read_bytes())
    await VllmEngine(settings, Path(sys.argv[2])).start()
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    (fake.directory / "settings").write_bytes(pickle.dumps(fake.settings))
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(Path(__file__).parent), str(fake.directory), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(20):
        assert await parent.stdout.readline() == b"ready\n"
    child = fake.lines("starts")[0]["pid"]
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(10):
        while alive(child):  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody reaps here is dead.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def limited(fake: Fake) -> VllmEngine:
    """With a memory limit of 0.001 GiB, which counts once `grown` is there."""
    vllm = fake.settings.vllm.model_copy(update={"max_memory_gib": 0.001})
    return VllmEngine(fake.settings.model_copy(update={"vllm": vllm}), fake.directory)


@pytest.fixture
def grown(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Path:
    grown, measured = fake.directory / "grown", vllm_server.resident_bytes
    monkeypatch.setattr(vllm_server, "resident_bytes", lambda pid: measured(pid) if grown.exists() else 0)
    return grown


async def test_above_its_memory_limit_it_is_started_again_when_its_requests_are_done(fake: Fake, grown: Path) -> None:
    engine = limited(fake)
    await engine.start()
    await engine.load_adapter(4, A, fake.adapter)
    long = asyncio.create_task(engine.generate(request(888), lambda _: None))
    await until(lambda: (fake.directory / "streaming").exists())
    grown.touch()
    while await engine.health():  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.02)
    with pytest.raises(EngineUnavailable):
        await engine.generate(request(3), lambda _: None)
    with pytest.raises(EngineUnavailable):
        await engine.load_adapter(5, "b" * 64, fake.adapter)
    assert len(fake.lines("starts")) == 1
    (fake.directory / "go on").touch()
    assert (await long).tokens == [5, 2]
    await until(lambda: len(fake.lines("starts")) >= 2)
    await engine.stop()
    assert not any(alive(start["pid"]) for start in fake.lines("starts"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.02)


async def test_requests_that_a_recycling_cuts_off_are_no_failures(
    fake: Fake, grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "RECYCLE_S", 0.2)
    engine = limited(fake)
    await engine.start()
    await engine.load_adapter(4, A, fake.adapter)
    with pytest.raises(EngineUnavailable, match="started again for its memory"):
        await engine.generate(request(888), lambda _: grown.touch())
    await engine.stop()


async def test_a_server_that_hangs_is_started_again(
    fake: Fake, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(vllm_server, "SILENT_S", 0.3)
    monkeypatch.setattr(vllm_server, "HEALTH_S", 0.5)
    (fake.directory / "hung").touch()
    await until(lambda: len(fake.lines("starts")) == 2)
    (fake.directory / "hung").unlink()
    await until_healthy(engine)
    assert any("has not answered /health" in line for line in said)
    assert (await engine.generate(request(3), lambda _: None)).tokens == [5, 2]
    assert not alive(fake.lines("starts")[0]["pid"])


async def test_a_server_whose_requests_get_no_token_is_started_again(
    fake: Fake, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(vllm_server, "STALLED_S", 0.3)
    with pytest.raises(EngineError, match=r"does not answer|broke off"):
        await engine.generate(request(777), lambda _: None)
    await until_healthy(engine)
    assert len(fake.lines("starts")) == 2
    assert any("no request got a token" in line for line in said)
    # Without requests there is nothing to wait for.
    await asyncio.sleep(1)
    assert await engine.health()


async def test_nothing_is_left_when_the_guard_is_killed(fake: Fake) -> None:
    (fake.directory / "stubborn").touch()
    engine = VllmEngine(fake.settings, fake.directory)
    await engine.start()
    child = fake.lines("starts")[0]["pid"]
    (fake.directory / "stubborn").unlink()
    os.kill(parent_of(child), signal.SIGKILL)
    await until(lambda: len(fake.lines("starts")) == 2)
    assert not alive(child)
    await engine.stop()


async def test_sigterm_to_the_guard_ends_nothing(fake: Fake, engine: VllmEngine) -> None:
    """As from a supervisor that tells all processes of the worker: running jobs still finish."""
    child = fake.lines("starts")[0]["pid"]
    os.kill(parent_of(child), signal.SIGTERM)
    await asyncio.sleep(0.5)
    assert alive(child) and await engine.health()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def test_what_the_system_refuses_ends_no_supervision(
    fake: Fake, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        monkeypatch.setattr(vllm_server, "RESTART_S", (0.05, 0.2))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(vllm_server.asyncio, "create_subprocess_exec", refuse)
    shutil.rmtree(fake.directory / "logs")
    await asyncio.sleep(0.2)
    os.kill(fake.lines("starts")[0]["pid"], signal.SIGKILL)
    await until(lambda: len(fake.lines("starts")) == 2)
    await until_healthy(engine)
    assert any("vLLM cannot be started: [Errno 28] No space left" in line for line in said)


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)))
    yield lines
    logger.remove(sink)


async def until_healthy(engine: VllmEngine) -> None:
    async with asyncio.timeout(20):
        while not await engine.health():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.05)


def test_what_of_our_environment_is_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "VLLM_API_KEY", "AETHER_WORKER_HEADERS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "set")
    environment = vllm_server.environment()
    assert not {"PYTHONPATH", "VLLM_API_KEY", "AETHER_WORKER_HEADERS"} & set(environment)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["HF_HUB_OFFLINE"]) == ("set", "1")


def test_every_server_draws_other_numbers(fake: Fake) -> None:
    def seed() -> int:
        flags = arguments(fake.settings, fake.directory, 1)
        return int(flags[flags.index("--seed") + 1])

    assert len({seed() for _ in range(4)}) == 4


def test_a_log_that_cannot_be_kept_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = tmp_path / "vllm.log"
    rotate(log)
    log.write_bytes(b"12345")
    rotate(log, above=5)
    assert log.read_bytes() == b"12345"
    monkeypatch.setattr(vllm_server, "LOG_BYTES", 3)
    rotate(log, above=4)
    assert (log.read_bytes(), (tmp_path / "vllm.1.log").read_bytes()) == (b"", b"345")
    log.write_bytes(b"67")
    monkeypatch.setattr(shutil, "copyfileobj", full)
    rotate(log)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"vllm.log": "", "vllm.2.log": "345"}


def test_logs_are_rotated(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with log.open("ab", buffering=0) as server:
        for number in range(5):
            server.write(b"%d" % number)
            rotate(log)
            rotate(log)
        # Appended after the truncation: no hole in front of it.
        server.write(b"end")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "vllm.log": "end",
        "vllm.1.log": "4",
        "vllm.2.log": "3",
        "vllm.3.log": "2",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"token_ids": [5]}, "1 tokens, but logprobs"),
        ({"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9999.0}]}}, "-9999"),
        ({"logprobs": {"content": [{"logprob": -0.5}, {"logprob": float("nan")}]}}, "nan"),
        ({"logprobs": None}, "cannot be read"),
    ],
)
def test_incomplete_answers_are_errors(change: dict[str, Any], message: str) -> None:
    choice = {
        "token_ids": [5, 2],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
    }

    def read(event: Any) -> list[int]:
        tokens: list[int] = []
        logprobs: list[float] = []
        return checked(tokens, logprobs, read_event(event, tokens, logprobs)).tokens

    assert read({"choices": [choice]}) == [5, 2]
    with pytest.raises(EngineError, match=message):
        read({"choices": [choice | change]})
    with pytest.raises(EngineError, match="out of memory"):
        read({"error": {"message": "out of memory"}})


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b'data: {"choices": []}\n'

    with pytest.raises(EngineError, match="broke off"):
        [event async for event in events(lines())]
