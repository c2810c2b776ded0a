"""The command line `aether-coordinator`."""

import asyncio
import itertools
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from aether_common.errors import AetherError, ConfigError
from aether_common.files import disk_error, write_durably
from aether_common.logs import configure

from aether_coordinator.settings import ServerSettings
from aether_coordinator.status import RunStatus

if TYPE_CHECKING:
    from aether_coordinator.keys import Change, Keys

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
worker_app = typer.Typer(no_args_is_help=True, help="Credentials of workers.")
app.add_typer(worker_app, name="worker")
nats_app = typer.Typer(no_args_is_help=True, help="A nats-server on this host that runs on its own.")
app.add_typer(nats_app, name="nats")

Config = Annotated[Path, typer.Argument(help="The run's server.toml.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: key.path=value.")]
ConfigOrRoot = Annotated[Path, typer.Argument(help="server.toml, or the run directory.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]
SERVER = Path("server.toml")


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


Name = Annotated[str, typer.Argument(help="Name of the worker.")]
RunConfig = Annotated[Path, typer.Option("--config", help="The run's server.toml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def keys_of(config: Path, overrides: list[str] | None) -> "Keys":
    from aether_coordinator.keys import Keys, refuse_other_user

    settings = ServerSettings.load(config, overrides)
    refuse_other_user(settings.run_root)
    keys = Keys(settings)
    keys.remove_expired()
    return keys


def say(change: "Change") -> None:
    """The lines for worker.toml to stdout, so that they can be sent to a file; the rest to stderr."""
    for line in change.lines:
        typer.echo(line)
    for note in change.notes:
        typer.echo(f"# {note}", err=True)


@worker_app.command("add")
def worker_add(name: Name, config: RunConfig = SERVER, overrides: Overrides = None, debug: Debug = False) -> None:
    """Make a worker's key and print the lines for its worker.toml."""
    say(keys_of(config, overrides).add(name))


@worker_app.command("rotate")
def worker_rotate(
    name: Name,
    config: RunConfig = SERVER,
    overlap: Annotated[float, typer.Option(min=0, max=525600, help="Minutes for which the old key stays good.")] = 60.0,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Make a worker another key and print the lines for its worker.toml."""
    say(keys_of(config, overrides).rotate(name, timedelta(minutes=overlap)))


@worker_app.command("revoke")
def worker_revoke(name: Name, config: RunConfig = SERVER, overrides: Overrides = None, debug: Debug = False) -> None:
    """Cut a worker off for good: its key ends, its jobs go to others."""
    say(keys_of(config, overrides).revoke(name))
    typer.echo(f"worker {name} is revoked; it can come back with a new key: aether-coordinator worker add {name}")


@worker_app.command("release")
def worker_release(name: Name, config: RunConfig = SERVER, overrides: Overrides = None, debug: Debug = False) -> None:
    """Let a quarantined worker work again."""
    keys_of(config, overrides).release(name)
    typer.echo(f"worker {name} gets jobs again")


@worker_app.command("list")
def worker_list(
    config: RunConfig = SERVER, overrides: Overrides = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Show every worker: state, key, versions, and why one gets no jobs."""
    from aether_coordinator.roster import roster, table

    found = roster(keys_of(config, overrides))
    typer.echo(json.dumps([asdict(entry) for entry in found.entries], indent=2) if as_json else table(found.entries))
    if found.note:
        typer.echo(f"# {found.note}", err=True)


@app.command()
def events(
    config: ConfigOrRoot = SERVER,
    last: Annotated[int, typer.Option(min=0, help="Only so many newest events; 0: all.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens next, until Ctrl-C.")] = False,
    worker: Annotated[str | None, typer.Option(help="Only events of this worker.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show who joined, left, was refused, revoked or quarantined, and why."""
    from aether_coordinator.events import event_line, read_events

    root = config if config.is_dir() else ServerSettings.load(config).run_root

    def asked(entry: dict[str, Any]) -> bool:
        return worker is None or entry.get("worker") == worker

    kept, following = read_events(root)
    # The last 0 are all.
    newest = list(filter(asked, kept))[-last:]
    with suppress(KeyboardInterrupt):
        for entry in itertools.chain(newest, filter(asked, following) if follow else ()):
            typer.echo(json.dumps(entry) if as_json else event_line(entry))


HostFiles = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of nats-server's files.")]


@nats_app.command("init")
def nats_init(
    directory: HostFiles,
    run: Annotated[str, typer.Option("--run", help="Name of the run, as in server.toml.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address that workers dial; repeat it for more.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port for the coordinator, on loopback.")] = 4222,
    websocket_port: Annotated[int, typer.Option(min=1, max=65535, help="Port for workers.")] = 8443,
    monitor_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of health and figures, loopback.")] = 8222,
    listen: Annotated[
        str | None, typer.Option(help="Address for workers; default 0.0.0.0 with TLS, 127.0.0.1 without.")
    ] = None,
    self_signed: Annotated[bool, typer.Option("--self-signed", help="Make a private authority, certificate.")] = False,
    certificate: Annotated[Path | None, typer.Option(help="PEM certificate chain of this host.")] = None,
    private_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    client_ca: Annotated[Path | None, typer.Option(help="Demand client certificates of this authority.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there, keys included.")] = False,
    debug: Debug = False,
) -> None:
    """Write what a nats-server needs to carry a run: configuration, keys, certificates."""
    from aether_coordinator.host import write_host

    server = write_host(
        directory,
        run,
        hosts=host or [],
        port=port,
        websocket_port=websocket_port,
        monitor_port=monitor_port,
        listen=listen,
        self_signed=self_signed,
        certificate=certificate,
        private_key=private_key,
        client_ca=client_ca,
        force=force,
    )
    typer.echo(server.next_steps())


@nats_app.command("renew")
def nats_renew(
    directory: HostFiles,
    host: Annotated[list[str] | None, typer.Option("--host", help="Other names than before; repeat it.")] = None,
    debug: Debug = False,
) -> None:
    """Make the server's certificate again, from the same private authority; workers need nothing new."""
    from aether_coordinator.host import renew

    server = renew(directory, host or [])
    typer.echo(
        f"{server.directory / 'server.pem'} is new" + ("" if server.reload() else "; nats-server is not running")
    )


@nats_app.command("reload")
def nats_reload(
    config: Annotated[Path, typer.Option("--config", help="The run's server.toml.")] = SERVER,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Let the run's nats-server read its files again, for example new certificates."""
    from aether_coordinator.host import reload

    typer.echo(reload(ServerSettings.load(config, overrides)))


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
    tls: Annotated[bool, typer.Option("--tls", help="Connect the workers by TLS, with a private authority.")] = False,
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
            tls=tls,
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
