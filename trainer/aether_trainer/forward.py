"""Logprobs of the sampled tokens under the trainer, in micro-batches under a token budget.

Samples with the same prompt share its computation: all prompt tokens but the last are prefilled once, and the
KV cache is repeated for every sample, with gradient. Everything after the first sampled token (further turns
included) is the sample's own suffix. Rows are padded on the right only: under a causal mask no token attends to
padding, so neither attention mask nor position ids are needed, and prefix and suffix stay contiguous.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from aether_common.batch import Sample
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

HEAD_CHUNK = 1024
"""Positions whose logits exist at the same time: at a vocabulary of 150,000 they take 600 MB in float32."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample, unpacked. `positions` are the indices of its S sampled tokens, ascending, the first at least 1."""

    tokens: list[int]
    positions: list[int]
    logprobs: list[float]
    """S sampling logprobs."""
    advantages: list[float]
    """S advantages."""
    temperature: float
    episode: str = ""
    version: int = 0
    """Policy version that it was sampled from."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first sampled one."""
        return tuple(self.tokens[: self.positions[0]])

    @property
    def length(self) -> int:
        """Tokens that must be computed: the last sampled one and what follows it predict nothing."""
        return self.positions[-1]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward and backward pass whose first `prefix` tokens are equal (0: nothing is shared)."""

    prefix: int
    rows: list[Row]

    @property
    def cost(self) -> int:
        """Tokens that are computed, padding included."""
        return self.prefix + len(self.rows) * (max(row.length for row in self.rows) - self.prefix)


def unpack(sample: Sample) -> Row | None:
    """The row of a sample, None if none of its sampled tokens has an advantage (it gives no gradient)."""
    advantages, logprobs = sample.advantage_values(), sample.logprob_values()
    positions = [index for index, flag in enumerate(sample.sampled) if flag]
    if not any(advantages[position] for position in positions):
        return None
    return Row(
        tokens=sample.token_ids(),
        positions=positions,
        logprobs=[logprobs[position] for position in positions],
        advantages=[advantages[position] for position in positions],
        temperature=sample.temperature,
        episode=sample.episode,
        version=sample.version,
    )


def plan(rows: Sequence[Row], budget: int) -> list[MicroBatch]:
    """Distribute rows over micro-batches of at most `budget` tokens (a longer row gets its own), longest first."""
    by_prompt: defaultdict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        by_prompt[row.prompt].append(row)
    # The last prompt token belongs to the suffix: its output predicts the first sampled token.
    shared = [(len(prompt) - 1, group) for prompt, group in by_prompt.items() if len(group) > 1]
    alone = [row for group in by_prompt.values() if len(group) == 1 for row in group]
    micro_batches = [part for prefix, group in shared for part in _split(prefix, group, budget)]
    micro_batches += _split(0, alone, budget)
    # The largest first: a budget that does not fit into memory fails at once.
    return sorted(micro_batches, key=lambda micro_batch: -micro_batch.cost)


def _split(prefix: int, rows: list[Row], budget: int) -> Iterator[MicroBatch]:
    """Cut rows, sorted by length so that little is padding, where the budget is reached."""
    part: list[Row] = []
    for row in sorted(rows, key=lambda row: -row.length):
        if part and prefix + (len(part) + 1) * (part[0].length - prefix) > budget:
            yield MicroBatch(prefix, part)
            part = []
        part.append(row)
    if part:
        yield MicroBatch(prefix, part)


def sampled_logprobs(model: PreTrainedModel, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Logprobs (float32, with gradient) and entropies (without) at the M sampled tokens of a micro-batch, [M] each.

    Row by row, in the order of `Row.positions`; both are of the distribution at the row's temperature.
    """
    prefix, rows = micro_batch.prefix, micro_batch.rows
    suffixes = [row.tokens[prefix : row.length] for row in rows]
    longest = max(len(suffix) for suffix in suffixes)
    tokens_ns = torch.tensor([suffix + [0] * (longest - len(suffix)) for suffix in suffixes], device=model.device)
    decoder: Any = model.get_decoder()
    if prefix:
        cache = DynamicCache(config=decoder.config)
        # transformers 5.24 calls the argument `cache`.
        name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
        prefix_1p = torch.tensor([rows[0].tokens[:prefix]], device=model.device)
        decoder(input_ids=prefix_1p, use_cache=True, **{name: cache})
        cache.batch_repeat_interleave(len(rows))
        hidden_nsd = decoder(input_ids=tokens_ns, use_cache=True, **{name: cache}).last_hidden_state
    else:
        hidden_nsd = decoder(input_ids=tokens_ns, use_cache=False).last_hidden_state

    rows_m = [index for index, row in enumerate(rows) for _ in row.positions]
    # The output at position t - 1 predicts token t.
    outputs_m = [position - 1 - prefix for row in rows for position in row.positions]
    hidden_md = hidden_nsd[rows_m, outputs_m]
    targets_m = torch.tensor([row.tokens[t] for row in rows for t in row.positions], device=model.device)
    temperatures_m = torch.tensor([row.temperature for row in rows for _ in row.positions], device=model.device)
    head: Any = model.get_output_embeddings()
    return _logprobs_in_chunks(head, hidden_md, targets_m, temperatures_m)


def _logprobs_in_chunks(
    head: Callable[[Tensor], Tensor], hidden_md: Tensor, targets_m: Tensor, temperatures_m: Tensor
) -> tuple[Tensor, Tensor]:
    chunks = list(
        zip(hidden_md.split(HEAD_CHUNK), targets_m.split(HEAD_CHUNK), temperatures_m.split(HEAD_CHUNK), strict=True)
    )
    if len(chunks) == 1:
        return _token_logprobs(head, *chunks[0])
    parts: list[tuple[Tensor, Tensor]] = [
        # The logits of each chunk are computed again in the backward pass instead of being kept.
        checkpoint(_token_logprobs, head, *chunk, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore
        for chunk in chunks
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _token_logprobs(
    head: Callable[[Tensor], Tensor], hidden_md: Tensor, targets_m: Tensor, temperatures_m: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs_mv = torch.log_softmax(head(hidden_md).float() / temperatures_m[:, None], dim=-1)
    with torch.no_grad():
        entropies_m = torch.special.entr(logprobs_mv.exp()).sum(-1)
    return logprobs_mv.gather(-1, targets_m[:, None]).squeeze(-1), entropies_m
