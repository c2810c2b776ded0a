"""What the demo trains: the configuration files of its run directory, as text.

The files are ordinary `server.toml`, `trainer.toml` and `worker-N.toml`; every command works on them.
The figures are a recipe that is known to learn on two CPU cores.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aether_common.errors import RunDirectoryError
from aether_common.identity import ModelIdentity, is_local

RUN = "demo"
TASKSET = "aether_last_word"
HELD_OUT = "held_out"
HELD_OUT_GREEDY = "held_out_greedy"
HELD_OUT_TASKS = 64
MAX_TOKENS = 8
MAX_MODEL_LEN = 256
RENDERER = "default"
"""The tokenizer's own chat template: right for any model, as the task has one turn and no tools."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options of a demo that end up in its configuration."""

    steps: int
    workers: int
    seed: int
    model: str
    revision: str | None
    identity: ModelIdentity
    engine: str
    worker_python: Path | None
    port: int
    websocket_port: int
    tls: bool = False
    """Workers connect by TLS, to a certificate of the run's own authority."""

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{number}" for number in range(1, self.workers + 1)]

    def files(self) -> dict[str, str]:
        """File name in the run directory → content."""
        workers = {f"{name}.toml": worker_toml(self, name) for name in self.worker_names}
        return {"server.toml": server_toml(self), "trainer.toml": trainer_toml(self), **workers}


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, as long as nothing outside the basic plane is escaped.
    return json.dumps(text, ensure_ascii=False)


def _revision(recipe: Recipe) -> str:
    """A hub repository is pinned in every file; a local directory is by `[base_model]`."""
    return "" if is_local(recipe.model) or not recipe.revision else f"revision = {_quoted(recipe.revision)}\n"


def server_toml(recipe: Recipe) -> str:
    base_model = "\n".join(
        f"{name} = {value if isinstance(value, int) else _quoted(value)}"
        for name, value in recipe.identity.model_dump().items()
    )

    encryption = 'self_signed = ["localhost"]\n' if recipe.tls else ""

    def taskset(split: str, count: int) -> str:
        return f'taskset = "{TASKSET}"\ntaskset_args = {{split = "{split}", seed = {recipe.seed}, count = {count}}}'

    return f"""\
# The demo's run. Resume it with `aether-coordinator run server.toml` and the workers.
run = "{RUN}"
run_root = "."
steps = {recipe.steps}
seed = {recipe.seed}
model = {_quoted(recipe.model)}
max_model_len = {MAX_MODEL_LEN}

# What trainer and workers must load; printed by `aether-coordinator identity`.
[base_model]
{base_model}

# Copy the last word of a list: the reward is 1 for exactly that word and an end, else 0.
[[train]]
name = "last_word"
{taskset("train", 512)}
sampling = {{temperature = 1.0, max_tokens = {MAX_TOKENS}}}

# Lists of words that are never trained on, sampled as in training: accuracy with an interval.
[[eval]]
name = "{HELD_OUT}"
{taskset("held_out", HELD_OUT_TASKS)}
episodes_per_task = 4
sampling = {{temperature = 1.0, max_tokens = {MAX_TOKENS}}}

# The same lists with the likeliest token each time: what a user of the adapter would see.
[[eval]]
name = "{HELD_OUT_GREEDY}"
{taskset("held_out", HELD_OUT_TASKS)}
sampling = {{temperature = 0.0, max_tokens = {MAX_TOKENS}}}

[batch]
groups = 8
group_size = 8
max_policy_lag = 1

[trainer]
config = "trainer.toml"

# The embedded nats-server, on loopback.
[nats]
port = {recipe.port}
websocket_port = {recipe.websocket_port}
{encryption}"""


def trainer_toml(recipe: Recipe) -> str:
    return f"""\
seed = {recipe.seed}

[model]
path = {_quoted(recipe.model)}
{_revision(recipe)}dtype = "{recipe.identity.dtype}"

[lora]
rank = 8
alpha = 16
target_modules = "all-linear"
serving_dtype = "{recipe.identity.dtype}"

[optimizer]
learning_rate = 4e-4
betas = [0.9, 0.95]
weight_decay = 0.0
max_grad_norm = 1.0

[compute]
device = "{"cpu" if recipe.engine == "transformers" else "auto"}"
"""


def worker_toml(recipe: Recipe, name: str) -> str:
    if recipe.engine == "vllm":
        # The workers of a demo share one GPU, and the trainer needs the rest of it.
        share = round(0.7 / recipe.workers, 3)
        python = f"python = {_quoted(str(recipe.worker_python))}\n" if recipe.worker_python else ""
        engine = f"[vllm]\n{python}max_lora_rank = 8\ngpu_memory_utilization = {share}\n"
    else:
        engine = "[transformers]\nthreads = 1\n"
    url, trust = f"ws://127.0.0.1:{recipe.websocket_port}", ""
    if recipe.tls:
        url, trust = f"wss://localhost:{recipe.websocket_port}", '\n[tls]\nca_file = "nats/ca.pem"\n'
    return f"""\
name = "{name}"
run = "{RUN}"
url = "{url}"
key_file = "workers/{name}.nk"
model = {_quoted(recipe.model)}
{_revision(recipe)}dtype = "{recipe.identity.dtype}"
engine = "{recipe.engine}"
slots = 32
prefetch = 8
max_model_len = {MAX_MODEL_LEN}
state_dir = "{name}"
drain_s = 10.0

{engine}{trust}"""


def recorded_ports(run_root: Path) -> tuple[int, int] | None:
    """The ports in an existing `server.toml`; None for a run directory that is still empty.

    Raises `RunDirectoryError` when the directory holds something else than a demo.
    """
    # A demo that failed before it wrote its configuration leaves only logs.
    if not run_root.exists() or (run_root.is_dir() and all(entry.name == "logs" for entry in run_root.iterdir())):
        return None
    try:
        server = tomllib.loads((run_root / "server.toml").read_text())
        return int(server["nats"]["port"]), int(server["nats"]["websocket_port"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{run_root} exists and is not the run directory of a demo ({type(error).__name__}: {error}): "
            "choose another --run-root"
        ) from error


def changed_keys(run_root: Path, files: dict[str, str]) -> list[str]:
    """`file: key = old, now new` for every setting in which an existing configuration differs."""
    lines: list[str] = []
    for name, text in files.items():
        path = run_root / name
        try:
            old = _flat(tomllib.loads(path.read_text()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            lines.append(f"{name}: cannot be read: {error}")
            continue
        new = _flat(tomllib.loads(text))
        lines += [
            f"{name}: {key} = {old.get(key)!r}, now {new.get(key)!r}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
    surplus = {path.name for path in run_root.glob("worker-*.toml")} - files.keys()
    return lines + [f"{name}: a worker that is not in this demo" for name in sorted(surplus)]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        entries = value if isinstance(value, list) else [value]
        if entries and all(isinstance(entry, dict) for entry in entries):
            for index, entry in enumerate(entries):
                number = f"[{index}]" if isinstance(value, list) else ""
                flat |= _flat(entry, f"{prefix}{key}{number}.")
        else:
            flat[prefix + key] = value
    return flat
