"""`cputrain report RUN…`: what runs have recorded, as a page, a picture or a text."""

from __future__ import annotations

import contextlib
import os
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from cputrain import log, output_folder
from cputrain.cli.app import command, new_app, option
from cputrain.record import read
from cputrain.report import charts, page
from cputrain.report.text import text as text_of

app = new_app()
EXAMPLES = """
    cputrain report out
    cputrain report out --open
    cputrain report out-stock out --png
    cputrain report out --text
"""


@command(app, EXAMPLES)
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Output folders of trainings; the first is compared with.")
    ],
    output: Annotated[Path | None, option("Where the page goes.", "--output", "-o", metavar="FILE")] = None,
    show: Annotated[bool, option("Open the page in the browser.", "--open")] = False,
    png: Annotated[bool, option("Write a picture beside the page, too.", "--png")] = False,
    text: Annotated[bool, option("Print a text instead; needs no extra package.", "--text")] = False,
) -> None:
    """Show what runs have recorded: loss, speed, where the time goes, memory, and the command to run it again.

    The page is one file that loads nothing, and may be sent to others. Several runs are compared. Charts need the
    packages of cputrain[report]; --text needs none.
    """
    found = [read.read(run) for run in runs]
    if text:
        print(log.printable(text_of(found)))
        return
    charts.need_altair()
    file = output or _default(runs)
    _write(file, page.page(found).encode())
    if png:
        _write(file.with_suffix(".png"), charts.png(found))
    if show:
        webbrowser.open(file.resolve().as_uri())


def _default(runs: list[str]) -> Path:
    path = Path(runs[0])
    if len(runs) > 1 or path.is_file():
        return Path("cputrain-report.html")
    return (path if path.name == output_folder.NAME else output_folder.path(path)) / "report.html"


def _write(file: Path, content: bytes) -> None:
    """Whole, or not at all."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        os.replace(beside, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ValueError(f"{file} can't be written: {error.strerror}.") from None
    print(file)
