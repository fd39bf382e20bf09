"""`cputrain checkpoints FOLDER`: which checkpoints an output folder has, and whether they are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain import log, output_folder
from cputrain.checkpoints import folder
from cputrain.checkpoints.folder import Found
from cputrain.checkpoints.manifest import files_in
from cputrain.cli.app import command, new_app, option

app = new_app()
EXAMPLES = """
    cputrain checkpoints out
    cputrain checkpoints out --json
"""


@command(app, EXAMPLES)
def checkpoints(
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="Output folder of a training.")],
    as_json: Annotated[bool, option("Print JSON, for programs.", "--json")] = False,
) -> None:
    """List the checkpoints of a training, the last one first: step, size, good or bad, and of which run.

    All of each is read. Ends with 1 if one is bad. A checkpoint that stock wrote has no sums: it counts as good if
    its files are whole. Bad ones that a training has met lie in FOLDER/_cputrain/bad.
    """
    if not output.is_dir():
        raise ValueError(f"there is no folder {output}; give the output folder of a training.")
    found = [_described(one) for one in folder.listed(output)]
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(log.printable("\n".join(_lines(output, found))))
    raise typer.Exit(any(not one["good"] for one in found))


def _described(found: Found) -> dict[str, Any]:
    answer = folder.verdict(found.path)
    size = sum((found.path / name).stat().st_size for name in files_in(found.path))
    run = answer.manifest.run if answer.manifest else ""
    good = answer.manifest is not None
    return {"step": found.step, "bytes": size, "good": good, "why": answer.reason, "run": run, "path": str(found.path)}


def _lines(output: Path, found: list[dict[str, Any]]) -> list[str]:
    aside = output_folder.path(output) / folder.BAD
    number = len(list(aside.iterdir())) if aside.is_dir() else 0
    lines = [f"{'step':>9}  {'size':>9}  {'':4}  run"] if found else [f"{output} has no checkpoints"]
    for one in found:
        state = "good" if one["good"] else "bad"
        words = ", ".join(filter(None, (one["run"], one["why"])))
        lines.append(f"{one['step']:>9,}  {one['bytes'] / 1e6:>6,.1f} MB  {state:4}  {words}".rstrip())
    return [*lines, *([f"{number} that were bad lie in {aside}"] if number else [])]
