"""Adapters for real vLLM, and what plain transformers and peft say of them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Adapter:
    version: int
    path: Path

    @property
    def digest(self) -> str:
        return f"{self.version:064x}"


class Reference:
    """Plain transformers and peft."""

    def __init__(self, model: Path, adapters: list[Adapter]) -> None:
        self._models = {
            adapter.digest: PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter.path)
            ).eval()
            for adapter in adapters
        }

    @torch.no_grad()
    def logits(self, digest: str, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Logits (tokens, vocabulary) that the tokens after a prompt are sampled from."""
        return self._models[digest](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]

    def error(
        self, digest: str, prompt: list[int], tokens: list[int], logprobs: list[float], temperature: float
    ) -> float:
        """Largest difference of the sampler's logprobs from log_softmax(logits / T)."""
        scaled = (self.logits(digest, prompt, tokens) / temperature).log_softmax(-1)
        expected = scaled.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        return (expected - torch.tensor(logprobs)).abs().max().item()
