"""Settings: a TOML file, then the environment (`AETHER_…`), then `--set key.path=value`.

Unknown keys, wrong types, impossible combinations and missing files are errors that name the file,
the key, the value and the remedy. Relative paths are relative to the file. Secrets are never
settings: they lie in files that a setting names.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from aether_common.errors import ConfigError


class ModelReference:
    """Marks a string that names a hub repository or a directory; `./…`, `../…` and `~…` are directories."""


ModelName = Annotated[str, ModelReference()]


class Section(BaseModel):
    """Base of a table in a settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Settings(BaseSettings):
    """Base of a settings file. `PREFIX` starts the environment variables, `__` separates keys."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_nested_delimiter="__", use_attribute_docstrings=True
    )

    PREFIX: ClassVar[str] = "AETHER_"

    @classmethod
    def load(cls, path: Path, overrides: list[str] | None = None) -> Self:
        """Read `path`, the environment and the overrides (`key.path=value`, TOML values).

        Raises `ConfigError` with one message that lists everything that is wrong.
        """
        values = read_toml(path)
        origins: dict[str, str] = {}
        for variable, text in sorted(os.environ.items()):
            if variable.startswith(cls.PREFIX):
                key = variable.removeprefix(cls.PREFIX).lower().replace("__", ".")
                _assign(values, key, text, f"environment variable {variable}")
                origins[key] = f"environment variable {variable}"
        for override in overrides or []:
            key, separator, text = override.partition("=")
            if not separator or not key:
                raise ConfigError(f"--set {override}: write it as --set key.path=value")
            _assign(values, key, text, f"--set {override}")
            origins[key] = f"--set {override}"
        _resolve_paths(cls, values, path.parent)
        try:
            # The environment was merged above, where its variables are known by name.
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(describe(error, path, origins, cls)) from error

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, *others: Any, **named: Any
    ) -> tuple[Any, ...]:
        return (init_settings,)


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises `ConfigError` when it is missing or no TOML."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file: write one with `aether-coordinator init {path.parent}`") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _parse(text: str) -> Any:
    """A TOML value, or the text itself where it is none (so that strings need no quotes)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _assign(values: dict[str, Any], key: str, text: str, origin: str) -> None:
    *parents, last = key.split(".")
    table = values
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{origin}: {parent} is a value or a list, not a table")
    table[last] = _parse(text)


def _resolve_paths(model: type[BaseModel], values: Any, base: Path) -> None:
    """Make relative paths relative to the directory of the file."""
    if isinstance(values, list):
        for value in values:
            _resolve_paths(model, value, base)
    if not isinstance(values, dict):
        return
    for name, field in model.model_fields.items():
        if name not in values:
            continue
        types = [field.annotation, *get_args(field.annotation)]
        marked = any(isinstance(mark, ModelReference) for mark in field.metadata)
        if isinstance(values[name], str) and (
            Path in types or (marked and values[name].startswith(("./", "../", "~")))
        ):
            values[name] = _resolve_path(name, values[name], base)
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                _resolve_paths(kind, values[name], base)


def _resolve_path(name: str, value: str, base: Path) -> str:
    try:
        path = os.path.abspath(base / Path(value).expanduser())  # noqa: PTH100 (resolve would follow links)
        Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a NUL
        raise ConfigError(f"{name} = {value!r} is no usable path: {error}") from error
    # Links stay links: what the interpreter of a virtual environment points to is another interpreter.
    return path


def describe(error: ValidationError, path: Path, origins: dict[str, str], model: type[BaseModel]) -> str:
    """One line per problem: file, key, value, remedy."""
    lines: list[str] = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        where = origins.get(key, str(path))
        if problem["type"] == "extra_forbidden":
            known = sorted(_fields_at(model, problem["loc"][:-1]))
            lines.append(f"{where}: unknown key {key}: known here are {', '.join(known)}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: key {key} is missing: add it")
        else:
            value = problem["input"]
            shown = f" = {value!r}" if isinstance(value, (str, int, float, bool)) else ""
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {key + shown if key else 'settings'}: {message}")
    return "\n".join(lines)


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
    return list(model.model_fields)
