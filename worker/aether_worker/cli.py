"""`aether-worker`: run a worker, or check whether it could run."""

import asyncio
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from aether_common import logs
from aether_common.errors import AetherError
from loguru import logger

from aether_worker.settings import WorkerSettings, prepare_state_dir

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="A node of an Aether RL run."
)

File = Annotated[Path, typer.Argument(help="Settings of the worker (worker.toml).", metavar="WORKER.TOML")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="key.path=value, overrides the file.")]
Debug = Annotated[bool, typer.Option("--debug", help="Debug log, and tracebacks of errors.")]


@app.command()
def run(file: File, set_: Overrides = None, debug: Debug = False) -> None:
    """Work for the run until SIGTERM, which drains."""
    with _messages(debug):
        settings = WorkerSettings.load(file, set_)
        prepare_state_dir(settings.state_dir)
        level = "DEBUG" if debug else settings.log_level
        logs.configure(settings.run, "worker", settings.state_dir / "logs" / "worker.jsonl", level)
        from aether_worker.node import run_worker
        from aether_worker.preflight import before_run

        with logger.contextualize(worker=settings.name):
            asyncio.run(before_run(settings))
            asyncio.run(run_worker(settings))


@app.command()
def check(file: File, set_: Overrides = None, debug: Debug = False) -> None:
    """Preflight: each line is ok, or says what to do."""
    with _messages(debug):
        if not debug:
            logger.remove()  # The lines say it all.
        from aether_worker.preflight import check as preflight

        if not asyncio.run(preflight(file, set_, print)):
            raise typer.Exit(1)


@contextmanager
def _messages(debug: bool) -> Generator[None]:
    """Turns an `AetherError` into its message and exit code."""
    try:
        yield
    except AetherError as error:
        if debug:
            raise
        print(f"aether-worker: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
