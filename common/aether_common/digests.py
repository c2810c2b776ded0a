"""SHA-256 digests of bytes, files and adapters; the one definition of an adapter's digest."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class FileEntry(NamedTuple):
    """One file of an artefact: name relative to it, size in bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte sequence of a JSON value: sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def list_files(directory: Path, names: Iterable[str] | None = None) -> list[FileEntry]:
    """The files below `directory` (or the given names in it), sorted by name, with their digests."""
    if names is None:
        names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    return [FileEntry(name, (directory / name).stat().st_size, sha256_file(directory / name)) for name in sorted(names)]


def file_list_bytes(files: Iterable[FileEntry]) -> bytes:
    """The canonical JSON file list: what is stored in the object store under the artefact's digest."""
    return canonical_json([entry._asdict() for entry in sorted(files)])


def file_list_digest(files: Iterable[FileEntry]) -> str:
    """The digest of an artefact of several files: the SHA-256 of its canonical file list."""
    return sha256_bytes(file_list_bytes(files))


def parse_file_list(data: bytes) -> list[FileEntry]:
    """Read a canonical file list. Raises `ValueError` when it is none or a name leaves its directory."""
    try:
        entries = json.loads(data)
    except RecursionError as error:
        raise ValueError("a file list is not nested") from error
    if not isinstance(entries, list):
        raise ValueError("a file list must be a JSON array")
    files: list[FileEntry] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or set(entry) != {"name", "size", "sha256"}:
            raise ValueError(f"not an entry of a file list: {entry!r}")
        name, size, digest = entry["name"], entry["size"], entry["sha256"]
        if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or not name.isprintable():
            raise ValueError(f"not a plain file name: {name!r}")
        if type(size) is not int or size < 0 or not is_digest(digest):
            raise ValueError(f"not a size and SHA-256: {entry!r}")
        files.append(FileEntry(name, size, digest))
    if file_list_bytes(files) != data:
        raise ValueError("the file list is not in its canonical form")
    return files


def is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value)
