"""The manifest of a checkpoint: size and SHA-256 of each of its files, the step, and the run that wrote it.

It is the last file of a checkpoint, so that one without a manifest was not finished by us. Sums are taken right after
a file was written, from the system's cache: the disk isn't read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NAME = "cputrain_manifest.json"
FORMAT = 1
_CHUNK = 1 << 20


class Bad(ValueError):
    """Why a checkpoint isn't to be used."""


class File(NamedTuple):
    size: int
    sha256: str


class Manifest(NamedTuple):
    """`files` by their path within the checkpoint; `by_time`: time was up, the script didn't ask for it."""

    step: int
    run: str
    files: Mapping[str, File]
    by_time: bool = False

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def write(folder: Path, manifest: Manifest) -> None:
    """To the disk, as the folder's last file."""
    files = {name: [file.size, file.sha256] for name, file in sorted(manifest.files.items())}
    content = {"format": FORMAT, "step": manifest.step, "run": manifest.run, "by_time": manifest.by_time}
    content["files"] = files
    text = json.dumps({**content, "sha256": _own_sum(content)}, indent=1)
    with open(folder / NAME, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(folder)


def read(folder: Path) -> Manifest:
    """Bad if there is none, or if it isn't what was written."""
    try:
        content = json.loads((folder / NAME).read_bytes())
        own = content.pop("sha256")
        if own != _own_sum(content) or content["format"] != FORMAT:
            raise ValueError("changed")
        files = {str(name): File(int(size), str(found)) for name, (size, found) in content["files"].items()}
        return Manifest(int(content["step"]), str(content["run"]), files, bool(content["by_time"]))
    except FileNotFoundError:
        raise Bad(f"{NAME} is missing") from None
    except OSError as error:
        raise Bad(f"{NAME} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Bad(f"{NAME} is damaged") from None


def verify(folder: Path, names: Iterable[str] | None = None) -> Manifest:
    """The manifest, if every file (or those `names`) is what was written; Bad names the first that isn't."""
    manifest = read(folder)
    for name in manifest.files if names is None else names:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise Bad(f"{NAME} is damaged")
        _verify(folder / name, name, manifest.files[name])
    return manifest


def _verify(path: Path, name: str, expected: File) -> None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise Bad(f"{name} has {size:,} bytes of {expected.size:,}")
        if sha256(path) != expected.sha256:
            raise Bad(f"{name} isn't what was written (its SHA-256 differs)")
    except FileNotFoundError:
        raise Bad(f"{name} is missing") from None
    except OSError as error:
        raise Bad(f"{name} can't be read: {error.strerror}") from None


def flushed(folder: Path, names: Iterable[str]) -> dict[str, File]:
    """What was written into these files, once it is on the disk."""
    found = {}
    for name in names:
        path = folder / name
        digest = sha256(path)
        _flush(path)
        found[name] = File(path.stat().st_size, digest)
    return found


def files_in(folder: Path) -> list[str]:
    """Paths within the folder of all files, without its manifest."""
    paths = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    return sorted(str(path.relative_to(folder)) for path in paths if path != folder / NAME)


def flush_folder(folder: Path) -> None:
    """The names in it, and in the folders below it."""
    for root, _, _ in os.walk(folder):
        _flush(Path(root))


def flush_name(path: Path) -> None:
    """That it bears this name."""
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _own_sum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
