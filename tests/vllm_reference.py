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


def processes(model: str) -> dict[int, str]:
    """Command by process id of every process of the servers of a model, theirs and that of their children."""
    found: dict[int, tuple[int, int, str]] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
                command = (directory / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            found[int(directory.name)] = (int(fields[3]), int(fields[1]), command)
    sessions = {session for session, _, command in found.values() if model in command}
    return {pid: command for pid, (session, _, command) in found.items() if session in sessions}
