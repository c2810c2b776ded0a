"""`aether-worker` whose engine serves other weights than those that its identity was computed from."""

import sys
from typing import Any

import torch
from aether_worker.cli import main
from aether_worker.engine.transformers_engine import TransformersEngine

load_model: Any = TransformersEngine._load_model  # pyright: ignore[reportPrivateUsage]


def load_and_perturb(engine: Any) -> None:
    load_model(engine)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in engine._base.parameters():
            # The tiny model's own weights have a standard deviation of 0.02.
            parameter += 0.1 * torch.randn_like(parameter)


TransformersEngine._load_model = load_and_perturb  # pyright: ignore[reportPrivateUsage]

if __name__ == "__main__":
    sys.exit(main())
