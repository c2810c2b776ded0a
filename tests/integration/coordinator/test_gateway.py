"""The gateway, called by verifiers' real train client out of a real environment."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import renderers.client
from aether_common.arrays import pack_floats, pack_tokens, unpack_tokens
from aether_coordinator.gateway import SECRET_VARIABLE, Gateway, OpenEpisode
from aether_coordinator.journal import Claims
from aether_coordinator.ledger import Ledger, Write
from aether_coordinator.records import EpisodeRecord, GroupRecord, TurnRecord
from aether_coordinator.rollout import client_config, run_attempt
from aether_coordinator.samples import decode_episode, episode_samples
from aether_coordinator.settings import TrainSource
from aether_coordinator.sources import load_source, serve
from aether_coordinator.status import Counters
from aether_coordinator.turn import PromptTooLong, Turn, TurnFailed
from tiny_model import make_tiny_model

ADAPTER = "a" * 64
STOP = 2


class Answers:
    """In place of the dispatcher: answers each turn from a list; an exception is raised instead."""

    def __init__(self, *answers: list[int] | Exception) -> None:
        self._answers = list(answers)
        self.turns: list[Turn] = []
        self.forgotten: set[str] = set()

    async def generate(self, turn: Turn) -> TurnRecord:
        self.turns.append(turn)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return TurnRecord(
            job=turn.job,
            worker="w",
            dispatch=0,
            reply="",
            version=turn.version,
            adapter=turn.adapter,
            tokens=pack_tokens(answer),
            logprobs=pack_floats([-0.25 * (i + 1) for i in range(len(answer))]),
            finish_reason="stop" if answer[-1] == STOP else "length",
        )

    def forget_prefixes(self, names) -> None:
        self.forgotten |= set(names)

    def abort(self, job: str) -> None:
        raise AssertionError(f"job {job} aborted")


class Setup:
    def __init__(self, directory: Path, answers: Answers, max_model_len: int = 256) -> None:
        self.answers = answers
        self.counters = Counters()
        self.ledger = Ledger(directory / "state")
        self.model = make_tiny_model(directory / "model")
        self.gateway = Gateway(
            self.ledger,
            answers,  # type: ignore[arg-type]
            self.counters,
            run="test",
            seed=0,
            max_model_len=max_model_len,
            turn_deadline_s=60,
            stop_token_ids=frozenset({STOP}),
            vocab_size=259,
        )
        settings = TrainSource.model_validate(
            {"name": "s", "taskset": "aether_lowercase", "sampling": {"temperature": 0.7, "max_tokens": 12}}
        )
        self.source = load_source(settings)
        group = GroupRecord(id=1, kind="train", source="s", task=3, version=5, size=2)
        self.episode = OpenEpisode(
            record=EpisodeRecord(group=1, index=0),
            group=group,
            adapter=ADAPTER,
            source=settings,
            claims=Claims("g00000001-e000", 0),
        )

    async def run(self):
        async with AsyncExitStack() as stack:
            await serve([self.source], stack)
            return await run_attempt(self.episode, self.source, self.gateway, self.client, timeout_s=60)

    @property
    def client(self):
        return client_config(self.gateway, str(self.model), {"name": "default"})


@pytest.fixture
async def setup(tmp_path, monkeypatch):
    tasks: list[asyncio.Task[None]] = []
    made: list[Setup] = []

    async def make(*answers, **options) -> Setup:
        setup = Setup(tmp_path, Answers(*answers), **options)
        monkeypatch.setenv(SECRET_VARIABLE, setup.gateway.secret)
        ready = asyncio.Event()
        tasks.append(asyncio.create_task(setup.gateway.serve(0, ready.set)))
        await ready.wait()
        made.append(setup)
        return setup

    yield make
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for setup in made:
        setup.ledger.close()


def text_tokens(text: str, model: Path) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)


async def test_an_episode_through_the_real_client(setup, tmp_path):
    make_tiny_model(tmp_path / "model")
    completion = [*text_tokens("abCD", tmp_path / "model"), STOP]
    run = await setup(completion)
    outcome = await run.run()
    assert outcome.kind == "done" and not outcome.truncated
    assert not renderers.client._max_prompt_len_cache  # an entry per attempt would fill the memory
    assert run.answers.forgotten == {run.answers.turns[0].session}
    assert outcome.reward == 0.5  # two of four letters are lower-case
    assert outcome.tokens == 5
    turn = run.answers.turns[0]
    assert (turn.version, turn.adapter, turn.kind) == (5, ADAPTER, "train")
    assert (turn.sampling.temperature, turn.sampling.max_tokens, turn.sampling.stop_token_ids) == (0.7, 12, (STOP,))
    prompt = "<|im_start|>user\nsay 3<|im_end|>\n<|im_start|>assistant\n"
    assert unpack_tokens(turn.prompt) == text_tokens(prompt, tmp_path / "model")
    # What was sampled comes back out of the trace token by token, with exact logprobs.
    recorded = decode_episode(outcome.trace)
    (sample,) = episode_samples(recorded, run.episode.record, run.episode.group, 0.5, 0.7)
    assert sample.token_ids() == [*unpack_tokens(turn.prompt), *completion]
    assert sample.logprob_values()[-5:] == [-0.25, -0.5, -0.75, -1.0, -1.25]


async def test_a_length_stop_is_truncated(setup, tmp_path):
    run = await setup(text_tokens("abcdefghijkl", make_tiny_model(tmp_path / "model")))
    outcome = await run.run()
    assert (outcome.kind, outcome.truncated, outcome.reward) == ("done", True, 1.0)


async def test_an_infrastructure_failure_is_told_apart(setup):
    run = await setup(TurnFailed("three workers lost"))
    outcome = await run.run()
    assert (outcome.kind, outcome.error) == ("infrastructure", "three workers lost")


async def test_a_prompt_that_is_too_long_is_the_tasks_failure(setup):
    run = await setup(PromptTooLong("never asked"), max_model_len=20)
    outcome = await run.run()
    assert outcome.kind == "failed" and "no room to answer" in outcome.error
    assert run.answers.turns == []


async def test_a_journaled_answer_is_replayed_without_a_job(setup, tmp_path):
    completion = [*text_tokens("ab", make_tiny_model(tmp_path / "model")), STOP]
    run = await setup(completion)
    first = await run.run()
    turn = run.answers.turns[0]
    record = TurnRecord(
        job=turn.job,
        worker="w",
        dispatch=0,
        reply="",
        version=5,
        adapter=ADAPTER,
        tokens=pack_tokens(completion),
        logprobs=pack_floats([-1.0] * 3),
        finish_reason="stop",
    )
    run.ledger.commit_now(Write("journal", turn.key.journal, record.encode()))
    run.episode.claims = Claims("g00000001-e000", 0)
    again = await run.run()
    assert (again.kind, again.reward, run.counters.turns_replayed) == ("done", first.reward, 1)
    assert len(run.answers.turns) == 1


async def post(run: Setup, body: object, secret: str | None = None, **headers: str) -> tuple[int, str]:
    authorization = {"Authorization": f"Bearer {secret if secret is not None else run.gateway.secret}"}
    url = f"http://127.0.0.1:{run.gateway.port}/inference/v1/generate"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=json.dumps(body), headers={**authorization, **headers}) as response,
    ):
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "other"}, 404, "its episode is over or unknown"),
        ({"token_ids": []}, 400, "at least one id"),
        ({"token_ids": [999]}, 400, "within the vocabulary"),
        ({"sampling_params": {"temperature": 0.7, "top_p": 0.5}}, 400, "top_p = 0.5"),
        ({"sampling_params": {"temperature": 1.0}}, 400, "temperature = 1.0"),
        ({"sampling_params": {"temperature": 0.7, "magic": 1}}, 400, "magic"),
    ],
)
async def test_what_the_gateway_refuses(setup, change, status, says):
    run = await setup()
    run.gateway.open(run.episode)
    body = {"model": run.episode.model, "token_ids": [5, 6], "sampling_params": {"temperature": 0.7}, **change}
    got, text = await post(run, body)
    assert got == status and says in text


async def test_strangers_are_refused(setup):
    run = await setup()
    assert (await post(run, {}, secret="guess"))[0] == 401
    assert (await post(run, {}, Host="evil.example"))[0] == 403
    assert (await post(run, {}, Origin="http://evil.example"))[0] == 403
    assert (await post(run, "no map"))[0] == 400
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            f"http://127.0.0.1:{run.gateway.port}/v1/models", headers={"Authorization": f"Bearer {run.gateway.secret}"}
        ) as response,
    ):
        assert (await response.json())["data"] == []
