"""`python -m aether_trainer`: started and supervised by the coordinator, which talks to it over stdin and stdout."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from aether_common import logs
from aether_common.checkpoint import checkpoints_directory
from aether_common.errors import AetherError
from aether_common.files import FileLock, remove_temporaries
from aether_common.pipe import Failed
from loguru import logger

from aether_trainer.link import PipeLink
from aether_trainer.settings import TrainerSettings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    settings: Annotated[Path, typer.Argument(help="The trainer's settings (trainer.toml).")],
    run_root: Annotated[Path, typer.Option(help="Directory of the run: batches in, checkpoints out.")],
    run: Annotated[str, typer.Option(help="Name of the run.")],
    renderer: Annotated[str, typer.Option(help="Renderer of the run, named in the model's identity.")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="key.path=value, over file and environment.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only read the settings, and print what matters.")] = False,
    debug: Annotated[bool, typer.Option(help="Show tracebacks and more log lines.")] = False,
) -> None:
    """Train every batch that appears in the run directory, until stdin says stop or closes."""
    if check:
        _check(settings, set_)
        return
    link = PipeLink()
    lock: FileLock | None = None
    try:
        logs.configure(run, "trainer", level="DEBUG" if debug else "INFO")
        values = TrainerSettings.load(settings, set_)
        checkpoints = checkpoints_directory(run_root)
        lock = FileLock(checkpoints / ".lock", f"another trainer works on {checkpoints}: stop it first")
        logs.configure(run, "trainer", run_root / "logs" / "trainer.jsonl", "DEBUG" if debug else "INFO")
        remove_temporaries(checkpoints)
        # OpenMP reads these once, when torch is imported; spinning threads starve the other processes of a machine.
        os.environ.setdefault("OMP_NUM_THREADS", str(values.compute.threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Not at the top: importing torch takes seconds, refusing bad settings or a second trainer should not.
        from aether_trainer.train import train

        train(values, run_root, run, renderer, link)
    except AetherError as error:
        link.send(Failed(message=str(error)))
        if debug:
            logger.exception("failed")
        sys.stderr.write(f"aether-trainer: {error}\n")
        raise typer.Exit(error.exit_code) from error
    except Exception as error:
        link.send(Failed(message=f"unexpected {type(error).__name__}: {error}"))
        raise
    finally:
        if lock is not None:
            lock.release()


def _check(file: Path, overrides: list[str] | None) -> None:
    """Prints the model and its serving dtype as JSON, for the coordinator's preflight."""
    try:
        values = TrainerSettings.load(file, overrides)
    except AetherError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(error.exit_code) from error
    model = values.model
    found = {"path": model.path, "revision": model.revision, "serving_dtype": values.lora.serving_dtype}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    app()
