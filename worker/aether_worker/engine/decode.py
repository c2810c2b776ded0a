"""Sample the completions of a batch of rows with one adapter, token by token.

What rows share is computed once: the common prefix of all prompts, then each distinct prompt; the
cache is expanded for the copies of a prompt, and finished rows leave it. Rows are left-padded after
the common prefix, with right positions and mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from aether_common.wire import FinishReason
from torch import Tensor
from transformers.cache_utils import DynamicCache

from aether_worker.engine.base import Request
from aether_worker.engine.sampling import Draw, draw_tokens


@dataclass(slots=True, eq=False)
class Row:
    """One completion in the making."""

    request: Request
    limit: int
    """Tokens that may be generated, at least one."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: FinishReason | None = None
    aborted: bool = False

    @property
    def live(self) -> bool:
        return self.finish is None and not self.aborted

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.request.sampling.stop_token_ids:
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"

    def draw(self) -> Draw:
        request = self.request
        seen = request.prompt + self.tokens if request.sampling.repetition_penalty != 1.0 else ()
        return Draw(request.sampling, request.seed, len(self.tokens), seen)


def decode(model: Any, rows: Sequence[Row], between: Callable[[], None]) -> None:
    """Fill in `rows`. `between` is called between tokens; rows that it marks as aborted are dropped."""
    with torch.no_grad():
        state, logits_rv, live = _prefill(model, rows)
        while True:
            for row, token, logprob in zip(live, *draw_tokens(logits_rv, [row.draw() for row in live]), strict=True):
                row.append(token, logprob)
            between()
            kept = [index for index, row in enumerate(live) if row.live]
            if not kept:
                return
            if len(kept) < len(live):
                live = [live[index] for index in kept]
                state.select(kept)
            logits_rv = state.step([row.tokens[-1] for row in live])


class _State:
    """Cache, mask and lengths of the rows that are being decoded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = model.device
        self._cache = DynamicCache(config=model.config)
        self._mask_rt = torch.ones(1, 0, dtype=torch.long, device=self._device)
        self._padded = False
        self._lengths_r = torch.zeros(1, dtype=torch.long, device=self._device)

    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append R token lists, left-padded; logits (R, V) after the last token of each."""
        width = max(len(row) for row in tokens)
        ids_rt = torch.tensor([[0] * (width - len(row)) + list(row) for row in tokens], device=self._device)
        mask_rt = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in tokens], device=self._device)
        positions_rt = (self._lengths_r[:, None] + mask_rt.cumsum(dim=1) - 1).clamp_(min=0)
        self._padded = self._padded or any(len(row) < width for row in tokens)
        self._mask_rt = torch.cat([self._mask_rt, mask_rt], dim=1)
        self._lengths_r = self._lengths_r + mask_rt.sum(dim=1)
        output = self._model(
            input_ids=ids_rt,
            attention_mask=self._mask_rt if self._padded else None,
            position_ids=positions_rt,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def step(self, tokens_r: Sequence[int]) -> Tensor:
        return self.extend([[token] for token in tokens_r])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        index_r = torch.tensor(rows, dtype=torch.long, device=self._device)
        self._cache.batch_select_indices(index_r)
        self._mask_rt = self._mask_rt[index_r]
        self._lengths_r = self._lengths_r[index_r]


def _prefill(model: Any, rows: Sequence[Row]) -> tuple[_State, Tensor, list[Row]]:
    """The state after the prompts, the logits (R, V) of the first token, and the rows in that order."""
    copies: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        copies.setdefault(tuple(row.request.prompt), []).append(row)
    prompts = list(copies)
    state = _State(model)
    shared = common_prefix(prompts)
    if shared:
        state.extend([prompts[0][:shared]])
    if len(prompts) > 1:
        state.select([0] * len(prompts))
    logits_pv = state.extend([prompt[shared:] for prompt in prompts])
    expansion = [index for index, prompt in enumerate(prompts) for _ in copies[prompt]]
    if len(expansion) == len(prompts):
        return state, logits_pv, [row for group in copies.values() for row in group]
    state.select(expansion)
    return state, logits_pv[expansion], [row for group in copies.values() for row in group]


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Length of the prefix that several prompts share, leaving each at least one token; 0 for one prompt."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    limit = min(len(prompt) for prompt in prompts) - 1
    return next((index for index in range(limit) if first[index] != last[index]), limit)
