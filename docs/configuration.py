"""Writes `configuration.md` from the settings classes: uv run python docs/configuration.py"""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from aether_common.settings import Settings
from aether_coordinator.settings import ServerSettings
from aether_trainer.settings import TrainerSettings
from aether_worker.settings import WorkerSettings
from pydantic import BaseModel
from pydantic.fields import FieldInfo

FILE = Path(__file__).with_suffix(".md")
HEAD = """\
# Configuration

<!-- Written by `uv run python docs/configuration.py` from the settings classes. Change them, not this page. -->

There are three files: `server.toml`, `trainer.toml` and one `worker.toml` for each worker.
`aether-coordinator init DIR` writes commented ones to start from.

A value comes from the file, then from the environment, then from `--set`; the later one wins.

- Environment: the prefix of the file, then the key in capitals, with `__` between table and key.
  Example: `AETHER_SERVER_NATS__PORT=4222` sets `nats.port` of `server.toml`.
- Command line: `--set key.path=value`, as often as needed. Example: `--set batch.groups=4`.
  `aether-coordinator run` and `check` and `aether-worker run` and `check` take it.
- A value there is written as in TOML; a string needs no quotes.
- Entries of a list of tables (`[[train]]`, `[[eval]]`) can be set in the file only.

The coordinator starts the trainer, so `--set` does not reach `trainer.toml`; its environment variables do.

Paths are relative to the directory of the file. An unknown key, a wrong type, a missing key or an impossible
combination ends the command with exit code 2 and a message that names file, key and remedy.
Keys and passwords are never settings: they lie in files that a setting names (mode 600). The one exception is
`[headers]` of `worker.toml`, for a proxy that demands a token: keep that file at mode 600 then.
"""
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "pattern": "matches"}


def render() -> str:
    """The whole page."""
    files: dict[str, type[Settings]] = {
        "server.toml": ServerSettings,
        "trainer.toml": TrainerSettings,
        "worker.toml": WorkerSettings,
    }
    return HEAD + "".join(render_file(name, settings) for name, settings in files.items())


def render_file(name: str, settings: type[Settings]) -> str:
    return f"\n## {name}\n\nEnvironment prefix: `{settings.PREFIX}`.\n" + render_table(settings, "", is_list=False)


def render_table(model: type[BaseModel], path: str, *, is_list: bool) -> str:
    """The keys of one TOML table, then the tables inside it."""
    text = ""
    if path:
        about = (model.__doc__ or "").strip().splitlines()[0]
        text = f"\n### `{f'[[{path}]]' if is_list else f'[{path}]'}`\n\n{about}\n"
    rows, inner = "", ""
    for key, field in model.model_fields.items():
        if nested := nested_model(field.annotation):
            inner += render_table(nested[0], f"{path}.{key}" if path else key, is_list=nested[1])
            if not field.is_required():
                continue
        rows += f"| `{key}` | {show_type(field)} | {show_default(field)} | {meaning(field)} |\n"
    return f"{text}\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}{inner}"


def nested_model(annotation: Any) -> tuple[type[BaseModel], bool] | None:
    """The model of a table, and whether it is a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) is list and (found := nested_model(get_args(annotation)[0])):
        return found[0], True
    return None


def show_type(field: FieldInfo) -> str:
    limits = [
        f"{sign} `{value}`" if attribute == "pattern" else f"{sign} {value}"
        for mark in field.metadata
        for attribute, sign in LIMITS.items()
        if (value := getattr(mark, attribute, None)) is not None
    ]
    return ", ".join([type_name(field.annotation), *limits]).replace("|", "\\|")


def type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value!r}`".replace("'", '"') for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_name(argument) for argument in arguments if argument is not NoneType)
    if nested := nested_model(annotation):
        return "list of tables" if nested[1] else "table"
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "table"
    return {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "Path": "path"}[
        annotation.__name__
    ]


def show_default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    return "unset" if field.default is None else f"`{toml(field.default)}`"


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    print(FILE)
