"""Start of a coordinator whose run directory holds many recorded episodes, against an empty one.

    uv run python tests/bench/restart.py [--rounds 5]

For each size a run directory is made with synthetic records of finished steps (groups of eight, eight groups a step:
groups, episodes, one journaled turn and one inline trace each, batches, policies, workers, metrics). A fresh process
composes the coordinator's own parts as `run` does and loads the state; timed is from the opening of the ledger to the
end of the load and of what the schedule looks at first. Imports are done before; nats-server is not asked.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_FOLDER = str(Path(__file__).resolve().parent)
sys.path[:] = [str(Path(_FOLDER).parent), *(path for path in sys.path if str(Path(path).resolve()) != _FOLDER)]

from aether_common.bus import Bus  # noqa: E402
from aether_common.identity import ModelIdentity, compute_identity  # noqa: E402
from aether_coordinator.accounts import make_key  # noqa: E402
from aether_coordinator.ledger import Ledger, Write  # noqa: E402
from aether_coordinator.records import (  # noqa: E402
    BatchRecord,
    EpisodeRecord,
    GroupRecord,
    PolicyRecord,
    SourceRecord,
    TurnRecord,
    WorkerRecord,
    number_key,
)
from aether_coordinator.settings import ServerSettings  # noqa: E402
from aether_coordinator.status import StepStatus  # noqa: E402
from bench._bench import finish, print_table  # noqa: E402

SIZES = (0, 25_000, 50_000, 100_000)
GROUP, GROUPS = 8, 8
"""Episodes in a group, groups in a step."""
GOAL_S, GOAL_MIB = 10.0, 1024
COMPLETION = 64
"""Tokens of a journaled answer."""


def settings_of(root: Path, model: Path, identity: ModelIdentity) -> ServerSettings:
    source = {"name": "train", "taskset": "aether_lowercase", "sampling": {"max_tokens": 64}}
    return ServerSettings.model_validate(
        {
            "run": "bench",
            "run_root": str(root),
            "steps": 1_000_000,
            "model": str(model),
            "base_model": identity,
            "max_model_len": 2048,
            "train": [source],
            "trainer": {"config": str(root / "trainer.toml")},
            "batch": {"groups": GROUPS, "group_size": GROUP},
            "retention": {"keep_steps": "none"},
        }
    )


def fill(settings: ServerSettings, episodes: int) -> None:
    """Write a run of `episodes` finished episodes."""
    from aether_coordinator.opening import open_run

    root = settings.run_root
    ledger = Ledger(root / "state")
    run = open_run(ledger, settings)
    digest = "ab" * 32
    answer = TurnRecord(
        job="j", worker="w1", dispatch=0, reply=digest, version=0, adapter=digest,
        tokens=bytes(4 * COMPLETION), logprobs=bytes(4 * COMPLETION), finish_reason="stop",
    )  # fmt: skip
    steps = episodes // (GROUP * GROUPS)
    metrics = root / "metrics" / "steps.jsonl"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    number = 0
    for step in range(steps + 1):
        policy = PolicyRecord(
            version=step, adapter=f"{step:064x}", files=[("adapter_model.safetensors", 1, f"{step:064x}")],
            rank=8, alpha=16, target_modules=["q_proj"], dtype="float32", activated_s=0,
        )  # fmt: skip
        writes = [Write("policies", number_key(step), policy.encode())]
        for _ in range(GROUPS if step else 0):
            number += 1
            group = GroupRecord(id=number, kind="train", source="train", task=0, version=step - 1, size=GROUP)
            # The last step's groups still wait for their batch, the newest one runs.
            state = "batched" if step < steps else "open" if number % GROUPS == 0 else "ready"
            group = group.with_(state=state, step=step if state == "batched" else None)
            writes.append(Write("groups", group.key, group.encode()))
            for index in range(GROUP):
                episode = EpisodeRecord(group=number, index=index)
                if state != "open":
                    episode = episode.accepted(0.5, COMPLETION, False, f"{number * GROUP + index:064x}")
                writes.append(Write("episodes", episode.key, episode.encode()))
                key = TurnRecord.prefix(episode.id, 0) + digest.encode() + b"/000000"
                writes.append(Write("journal", key, answer.encode()))
                writes.append(Write("traces", episode.trace.encode() or b"-", os.urandom(1024)))
        if 0 < step < steps:
            groups = list(range(number - GROUPS + 1, number + 1))
            batch = BatchRecord(step=step, digest=digest, groups=groups, reward=0.5, tokens=1, lag=0.0)
            writes.append(Write("batches", number_key(step), batch.encode()))
            lines.append(StepStatus(step=step, reward=0.5).model_dump_json() + "\n")
        ledger.commit_now(*writes)
    if steps:
        # The newest batch file is looked at by the start.
        from aether_common.batch import Batch, batch_path
        from aether_common.digests import sha256_bytes

        data = Batch(run="bench", step=steps - 1, samples=[]).encode()
        path = batch_path(root, steps - 1)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        newest = BatchRecord.decode(ledger.get("batches", number_key(steps - 1)) or b"")
        ledger.commit_now(Write("batches", number_key(steps - 1), newest.with_(digest=sha256_bytes(data)).encode()))
    worker = WorkerRecord(name="w1", incarnation="1", engine="null", slots=8, window=16, versions={}, seen_s=0.0)
    ledger.commit_now(
        Write("run", b"run", run.with_(next_group=number + 1).encode()),
        Write("sources", b"train", SourceRecord(name="train", drawn=number).encode()),
        Write("workers", b"w1", worker.encode()),
    )
    metrics.write_text("".join(lines))
    ledger.close()


def peak_mib() -> float:
    """Of this program alone; `ru_maxrss` would remember the parent's."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


async def load(settings: ServerSettings, model: Path) -> dict[str, float]:
    from aether_coordinator.run import Coordinator
    from aether_coordinator.sources import load_source

    sources = {source.name: load_source(source) for source in settings.train}
    before = peak_mib()
    started = time.perf_counter()
    coordinator = Coordinator(settings)
    coordinator._sources = sources
    coordinator._bus = Bus("nats://127.0.0.1:1", make_key().seed, "_INBOX", "bench")
    coordinator._compose(model)
    coordinator._load_state()
    coordinator._schedule.needed_versions()
    coordinator.status()
    seconds = time.perf_counter() - started
    loaded = len(coordinator._groups.groups)
    peak = peak_mib()
    return {"seconds": seconds, "rss_mib": peak, "grown_mib": peak - before, "groups": loaded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        root, model = arguments.load
        settings = ServerSettings.model_validate_json((root / "settings.json").read_text())
        print(json.dumps(asyncio.run(load(settings, model))))
        return
    from tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory(dir=os.environ.get("AETHER_BENCH_DIR")) as directory:
        model = make_tiny_model(Path(directory) / "model")
        identity = compute_identity(str(model), None, "float32", "default")
        for size in SIZES:
            root = Path(directory) / f"run{size}"
            root.mkdir()
            settings = settings_of(root, model, identity)
            fill(settings, size)
            (root / "settings.json").write_text(settings.model_dump_json())
        figures: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
        for _ in range(arguments.rounds):
            for size in SIZES:
                command = [sys.executable, __file__, "--load", str(Path(directory) / f"run{size}"), str(model)]
                environment = {**os.environ, "PYTHONPATH": str(Path(_FOLDER).parent)}
                child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if child.returncode:
                    raise RuntimeError(child.stderr[-2000:])
                figures[size].append(json.loads(child.stdout.splitlines()[-1]))
    # The quickest of several: these are tenths of a second, and other work only ever adds to them.
    seconds = {size: min(row["seconds"] for row in rows) for size, rows in figures.items()}
    memory = {size: max(row["rss_mib"] for row in rows) for size, rows in figures.items()}
    beyond = {size: seconds[size] - seconds[0] for size in SIZES[1:]}
    growth = beyond[SIZES[-1]] / max(beyond[SIZES[1]], 1e-9)
    allowed = SIZES[-1] / SIZES[1] * 1.25
    print_table(
        ["episodes", "load s", "peak MiB"],
        [[size, round(seconds[size], 2), round(memory[size])] for size in SIZES],
    )
    ok = beyond[SIZES[-1]] <= GOAL_S and memory[SIZES[-1]] < GOAL_MIB and growth <= allowed
    finish(
        "restart",
        ratio=beyond[SIZES[-1]] / GOAL_S,
        goal=1.0,
        ok=ok,
        seconds_beyond_empty={str(size): round(value, 3) for size, value in beyond.items()},
        seconds_empty=round(seconds[0], 3),
        peak_mib=round(memory[SIZES[-1]]),
        growth=round(growth, 2),
        growth_allowed=round(allowed, 2),
    )


if __name__ == "__main__":
    main()
