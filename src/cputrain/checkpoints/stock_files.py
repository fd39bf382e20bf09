"""Whether a checkpoint that stock wrote, without a manifest, is whole, as far as its files tell.

safetensors begin with how long they are; torch's files are archives with a sum of each part; both end early if their
writer did.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path

from cputrain.checkpoints.manifest import Bad, Manifest, files_in

_STATE, _WEIGHTS = "trainer_state.json", (".safetensors", ".bin")
_ARCHIVES = (".pt", ".pth", ".bin")


def verify(folder: Path) -> Manifest:
    """What its manifest would say, without sums; Bad if something is missing, or ends too early."""
    names = files_in(folder)
    try:
        step = int(json.loads((folder / _STATE).read_bytes())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise Bad(f"{_STATE} is missing or damaged") from None
    if not any(name.endswith(_WEIGHTS) for name in names):
        raise Bad("it has no weights")
    verify_files(folder, names)
    return Manifest(step, "", {})


def verify_files(folder: Path, names: Iterable[str]) -> None:
    """Bad names the first of these files that ends too early."""
    for name in names:
        try:
            whole = _is_whole(folder / name)
        except (OSError, ValueError, zipfile.BadZipFile):
            whole = False
        if not whole:
            raise Bad(f"{name} is damaged")


def _is_whole(path: Path) -> bool:
    if path.suffix == ".safetensors":
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                return False
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return path.stat().st_size == 8 + length + max(ends, default=0)
    if path.suffix in _ARCHIVES and path.name != "training_args.bin":
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    return True
