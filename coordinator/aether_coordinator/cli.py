"""The command line `aether-coordinator`."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from aether_common.errors import AetherError, ConfigError
from aether_common.files import disk_error, write_durably
from aether_common.logs import configure

from aether_coordinator.settings import ServerSettings
from aether_coordinator.status import RunStatus

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
worker_app = typer.Typer(no_args_is_help=True, help="Credentials of workers.")
app.add_typer(worker_app, name="worker")

Config = Annotated[Path, typer.Argument(help="The run's server.toml.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: key.path=value.")]
ConfigOrRoot = Annotated[Path, typer.Argument(help="server.toml, or the run directory.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]


@app.command()
def init(directory: Annotated[Path, typer.Argument(help="Where to write the files.")], debug: Debug = False) -> None:
    """Write commented server.toml, trainer.toml and worker.toml."""
    from aether_coordinator.init import write_templates

    for path in write_templates(directory):
        typer.echo(path)


@app.command()
def identity(
    model: Annotated[str, typer.Argument(help="Hub repository or local model directory.")],
    revision: Annotated[str | None, typer.Option(help="Full commit of a hub repository.")] = None,
    dtype: Annotated[str, typer.Option(help="Serving dtype: bfloat16 or float32.")] = "bfloat16",
    renderer: Annotated[str, typer.Option(help="Renderer of the package renderers, e.g. qwen3 or default.")] = "",
    debug: Debug = False,
) -> None:
    """Print the [base_model] table of a model for server.toml."""
    from aether_common.identity import compute_identity

    if not renderer:
        raise ConfigError(
            "--renderer is missing: name the model's renderer, for example qwen3, or default for the chat template "
            "without tools (it is never selected automatically)"
        )
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype {dtype}: use bfloat16 or float32")
    found = compute_identity(model, revision, dtype, renderer)
    typer.echo("[base_model]")
    for key, value in found.model_dump().items():
        typer.echo(f"{key} = {json.dumps(value)}")


@app.command()
def check(config: Config, overrides: Overrides = None, debug: Debug = False) -> None:
    """Say what would keep the run from starting; the exit status is that of the first problem."""
    from aether_coordinator.check import checks

    status = 0
    for subject, problem in checks(ServerSettings.load(config, overrides)):
        typer.echo(f"{subject:<22} {'ok' if problem is None else f'FAILED  {problem}'}")
        status = status or (problem.exit_code if problem else 0)
    raise typer.Exit(status)


@app.command()
def run(config: Config, overrides: Overrides = None, debug: Debug = False) -> None:
    """Run the coordinator: schedule, score, train, publish, until all steps are done."""
    from aether_coordinator.check import before_start

    settings = ServerSettings.load(config, overrides)
    level = "DEBUG" if debug else settings.log_level
    configure(settings.run, "coordinator", None, level)
    before_start(settings)
    configure(settings.run, "coordinator", settings.run_root / "logs" / "coordinator.jsonl", level)
    # Not at the top: importing verifiers takes seconds, refusing bad settings should not.
    from aether_coordinator.run import Coordinator

    asyncio.run(Coordinator(settings).run())


@app.command()
def status(
    config: ConfigOrRoot = Path("server.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON of the endpoint.")] = False,
    debug: Debug = False,
) -> None:
    """Show a running run."""
    from aether_coordinator.progress import render_status

    found = RunStatus.model_validate_json(call_coordinator(config, "/status"))
    typer.echo(found.model_dump_json(indent=2) if as_json else render_status(found))


def call_coordinator(config: Path, path: str, *, post: bool = False) -> bytes:
    """Ask the coordinator of a run; `config` is its server.toml or its run directory."""
    from aether_coordinator.control import call

    root = config if config.is_dir() else ServerSettings.load(config).run_root
    return call(root, path, post=post)


@app.command()
def pause(config: ConfigOrRoot = Path("server.toml")) -> None:
    """Open no new groups; running episodes finish, committed batches are trained."""
    call_coordinator(config, "/pause", post=True)
    typer.echo("paused; go on with: aether-coordinator resume")


@app.command()
def resume(config: ConfigOrRoot = Path("server.toml")) -> None:
    """Go on after `pause`."""
    call_coordinator(config, "/resume", post=True)
    typer.echo("resumed")


RunRoot = Annotated[Path, typer.Argument(help="The run directory.")]


@app.command()
def verify(run_root: RunRoot) -> None:
    """Check the invariants of a stopped run; exit status 1 if one is violated."""
    from aether_coordinator.verify import verify as check_invariants

    findings = check_invariants(run_root)
    for finding in findings:
        verdict = f"{finding.violations} VIOLATIONS, first: {finding.first}" if finding.violations else "ok"
        typer.echo(f"{finding.invariant:<24} {finding.checked:>8} checked  {verdict}")
    raise typer.Exit(1 if any(finding.violations for finding in findings) else 0)


@app.command("export-batch")
def export_batch(
    run_root: RunRoot,
    step: Annotated[int, typer.Argument(min=1, help="The training step.")],
    output: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
) -> None:
    """Write the batch of a step as JSON lines, one sample each."""
    from aether_coordinator.export import batch_lines

    text = "".join(line + "\n" for line in batch_lines(run_root, step))
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_durably(output, text.encode())


@worker_app.command("add")
def worker_add(
    name: Annotated[str, typer.Argument(help="Name of the worker.")],
    config: Annotated[Path, typer.Option(help="The run's server.toml.")] = Path("server.toml"),
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Make a worker's key and print the lines for its worker.toml."""
    from aether_coordinator.keys import add_worker_key

    settings = ServerSettings.load(config, overrides)
    seed_file, url, told = add_worker_key(settings, name)
    typer.echo(f'name = "{name}"\nrun = "{settings.run}"\nurl = "{url}"\nkey_file = "{seed_file}"')
    if not told:
        typer.echo("# no nats-server of this run is running; the key is good from its next start", err=True)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 14,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    run_root: Annotated[Path | None, typer.Option(help="Run directory; default runs/demo-<time>.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Fixes tasks and initialisation.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    model: Annotated[str | None, typer.Option(help="Another model: hub repository or directory.")] = None,
    revision: Annotated[str | None, typer.Option(help="Full commit of a hub repository.")] = None,
    engine: Annotated[str, typer.Option(help="transformers (CPU) or vllm.")] = "transformers",
    vllm_python: Annotated[Path | None, typer.Option(help="Interpreter of the environment that has vLLM.")] = None,
) -> None:
    """Watch a small language model learn: the whole system on this machine, in minutes."""
    from aether_coordinator.demo import run_demo

    raise typer.Exit(
        run_demo(
            steps=steps,
            workers=workers,
            run_root=run_root,
            seed=seed,
            json_output=json_output,
            model=model,
            revision=revision,
            engine=engine,
            worker_python=vllm_python,
        )
    )


def main() -> None:
    """Entry point: errors that a user can act on are one message and an exit code."""
    try:
        app()
    except AetherError as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if "--debug" in sys.argv or error.filename is None:
            raise
        refused = disk_error(error, Path(os.fsdecode(error.filename)))
        typer.echo(f"error: {refused}", err=True)
        sys.exit(refused.exit_code)


if __name__ == "__main__":
    main()
