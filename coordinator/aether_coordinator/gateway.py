"""The gateway: the loopback endpoint that verifiers' train client takes for a vLLM server.

Token ids in, token ids and logprobs out, in the shape that `renderers` accepts. Which episode,
attempt and role a call belongs to travels in the `model` name. A call that infrastructure failed is
answered 503, one that the policy or the task caused 400; never with an empty completion.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from aether_chat.harness import CONTEXT_EXHAUSTED
from aether_common.arrays import pack_tokens, unpack_floats, unpack_tokens
from aether_common.errors import AetherError
from aether_common.wire import Sampling
from aiohttp import web
from pydantic import ValidationError

from aether_coordinator.dispatch import Dispatcher
from aether_coordinator.journal import Claims, request_digest
from aether_coordinator.ledger import Ledger
from aether_coordinator.loopback import guard, refuse, serve_http
from aether_coordinator.records import EpisodeRecord, GroupRecord, TurnRecord
from aether_coordinator.settings import SourceSettings
from aether_coordinator.status import Counters
from aether_coordinator.turn import PromptTooLong, Turn, TurnFailed

SECRET_VARIABLE = "AETHER_GATEWAY_API_KEY"
"""Where verifiers' client reads the secret; verifiers keeps names with API_KEY from the programs that it starts."""
MAX_BODY = 64 << 20
JSON = {"Content-Type": "application/json"}
IGNORED = {"logprobs", "skip_special_tokens", "spaces_between_special_tokens", "n", "routed_experts_prompt_start"}
"""Sampling parameters that the train client always sends and that change nothing here."""
SAMPLINGS = 1024
"""Remembered at most."""


class RequestRefused(AetherError):
    """The caller asked for something that the gateway does not do: HTTP 400."""


@dataclass(slots=True)
class OpenEpisode:
    """What the gateway knows of a running attempt of an episode."""

    record: EpisodeRecord
    group: GroupRecord
    adapter: str
    source: SourceSettings
    claims: Claims
    waited_s: float = 0.0
    """Time that its finished turns waited for their answers."""
    waiting_since: dict[int, float] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    """Sessions of its turns, one per agent."""
    failure: str = ""
    """Why infrastructure could not answer a turn."""

    @property
    def model(self) -> str:
        """The model name of its calls: episode, attempt, policy version."""
        return f"{self.record.id}.a{self.record.attempt}.v{self.group.version}"

    def waited(self) -> float:
        """Time spent waiting for answers so far, in seconds; parallel calls count once each."""
        now = time.monotonic()
        return self.waited_s + sum(now - since for since in self.waiting_since.values())


class Gateway:
    """Turns HTTP calls into turns. `open` and `close` bracket an attempt of an episode."""

    def __init__(
        self,
        ledger: Ledger,
        dispatcher: Dispatcher,
        counters: Counters,
        *,
        run: str,
        seed: int,
        max_model_len: int,
        turn_deadline_s: float,
        stop_token_ids: frozenset[int],
        vocab_size: int,
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._counters = counters
        self._run = run
        self._seed = seed
        self._max_model_len = max_model_len
        self._turn_deadline_s = turn_deadline_s
        self._stop_token_ids = stop_token_ids
        self._vocab_size = vocab_size
        self._on_refused = on_refused
        self._episodes: dict[str, OpenEpisode] = {}
        self._calls = 0
        self._samplings: dict[Hashable, tuple[SourceSettings, Sampling]] = {}
        """Checked parameters by source and what was asked for: most calls of a run ask for the same."""
        self.secret = secrets.token_urlsafe(32)
        self.port = 0

    async def serve(self, port: int, ready: Callable[[], None]) -> None:
        """Listen on loopback until cancelled."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[guard(self.secret, self._on_refused)])
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)

        def listening(actual: int) -> None:
            self.port = actual
            ready()

        await serve_http(app, port, "gateway", listening)

    def open(self, episode: OpenEpisode) -> None:
        self._episodes[episode.model] = episode

    def close(self, episode: OpenEpisode) -> None:
        self._episodes.pop(episode.model, None)
        self._dispatcher.forget_prefixes(episode.sessions)

    async def _models(self, _: web.Request) -> web.Response:
        # The client asks once per model name and caches the answer for ever; an empty list switches its
        # own length check off, and the gateway checks instead.
        return web.json_response({"object": "list", "data": []})

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            model = body["model"]
        except (ValueError, KeyError, TypeError) as error:
            return refuse(400, "invalid_request", f"not a generate request: {error!r}")
        episode = self._episodes.get(model) if isinstance(model, str) else None
        if episode is None:
            return refuse(404, "unknown_model", f"model {model!r}: its episode is over or unknown here")
        try:
            answer = await self._turn(episode, body, request.headers.get("X-Session-ID") or episode.record.id)
        except (RequestRefused, PromptTooLong) as error:
            kind = CONTEXT_EXHAUSTED if isinstance(error, PromptTooLong) else "invalid_request"
            return refuse(400, kind, str(error))
        except TurnFailed as error:
            episode.failure = str(error)
            return refuse(503, "aether_infrastructure", str(error))
        except (ValueError, KeyError, TypeError) as error:
            return refuse(400, "invalid_request", f"not a generate request: {error!r}")
        # Whoever asked again after a failure got over it: a later failure has another cause.
        episode.failure = ""
        return web.Response(body=_completion(answer), headers=JSON)

    async def _turn(self, episode: OpenEpisode, body: dict[str, Any], session: str) -> TurnRecord:
        tokens = body["token_ids"]
        sampling = self._sampling(body.get("sampling_params") or {}, episode.source, len(tokens))
        prompt = self._prompt(tokens)
        episode.sessions.add(session)
        key = episode.claims.claim(request_digest(prompt, sampling, "policy"))
        if (recorded := self._ledger.get("journal", key.journal)) is not None:
            self._counters.turns_replayed += 1
            return TurnRecord.decode(recorded)
        turn = Turn(
            key=key,
            job=key.job(self._run, self._seed),
            seed=key.job_seed(self._run, self._seed),
            kind=episode.group.kind,
            version=episode.group.version,
            adapter=episode.adapter,
            group=episode.group.id,
            prompt=prompt,
            sampling=sampling,
            session=session,
            deadline=time.monotonic() + self._turn_deadline_s,
        )
        self._calls += 1
        call = self._calls
        episode.waiting_since[call] = time.monotonic()
        try:
            return await self._dispatcher.generate(turn)
        except asyncio.CancelledError:
            # The client went away. A repeated request takes the same k; an answer still to come is journaled.
            episode.claims.release(key)
            self._dispatcher.abort(turn.job)
            raise
        except AetherError:
            episode.claims.release(key)
            raise
        finally:
            episode.waited_s += time.monotonic() - episode.waiting_since.pop(call)

    def _prompt(self, tokens: list[int]) -> bytes:
        try:
            # Packing refuses what is no whole number or negative.
            if tokens and (prompt := pack_tokens(tokens)) and max(tokens) < self._vocab_size:
                return prompt
        except (TypeError, OverflowError):
            pass
        raise RequestRefused("token_ids: give at least one id, all within the vocabulary")

    def _sampling(self, given: dict[str, Any], source: SourceSettings, prompt_length: int) -> Sampling:
        """Normalise a request's parameters. Raises `RequestRefused` or `PromptTooLong`."""
        room = self._max_model_len - prompt_length
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {prompt_length} tokens, max_model_len is {self._max_model_len}: no room to answer"
            )
        values = {key: value for key, value in given.items() if key not in IGNORED and value is not None}
        stop: tuple[int, ...] = tuple(values.pop("stop_token_ids", ()))
        limit = min(values.pop("max_tokens", source.sampling.max_tokens), room)
        asked = id(source), limit, stop, *values.items()
        if (known := self._samplings.get(asked)) is None:
            if len(self._samplings) >= SAMPLINGS:
                self._samplings.clear()
            known = source, self._checked(values, source, limit, self._stop_token_ids.union(stop))
            self._samplings[asked] = known
        return known[1]

    def _checked(self, values: dict[str, Any], source: SourceSettings, limit: int, stop: frozenset[int]) -> Sampling:
        if values.get("top_k") == -1:
            values.pop("top_k")
        try:
            sampling = Sampling(max_tokens=limit, stop_token_ids=tuple(sorted(stop)), **values)
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestRefused(f"sampling_params.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if sampling.shaped() or sampling.temperature != source.sampling.temperature:
            expected = Sampling.model_validate({**source.sampling.model_dump(), "max_tokens": limit}).model_dump()
            actual = sampling.model_dump()
            for name in ("temperature", *Sampling.NEUTRAL):
                if actual[name] != expected[name]:
                    raise RequestRefused(
                        f"sampling_params.{name} = {actual[name]}: source {source.name!r} is configured with "
                        f"{expected[name]}"
                    )
        return sampling


def _completion(answer: TurnRecord) -> bytes:
    """The smallest answer that `renderers` accepts."""
    tokens = unpack_tokens(answer.tokens)
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(tokens, unpack_floats(answer.logprobs), strict=True)
    ]
    choice = {"token_ids": tokens, "finish_reason": answer.finish_reason, "logprobs": {"content": content}}
    return json.dumps({"request_id": answer.job, "choices": [choice]}).encode()
