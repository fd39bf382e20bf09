"""What a script would train, found out by running it up to `train()` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cputrain.plan.until_train import FOUND

# What must not happen in a plan: taken out of the script's command line.
_NEVER = ("--push_to_hub", "--overwrite_output_dir", "--resume_from_checkpoint")
_OUTPUT = ("--output_dir", "--logging_dir", "--output-dir", "--logging-dir")


def found_by(script: Path, arguments: list[str], folder: Path) -> dict[str, Any]:
    """`folder`: a temporary one, which stands in for the script's output folder. The script's prints go to stderr."""
    words = without_outputs(arguments, folder)
    command = [sys.executable, "-m", "cputrain.plan.until_train", str(folder), str(script), *words]
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    file = folder / FOUND
    if not file.is_file():
        ended = f"ended with code {code}" if code else "ended"
        hint = "its own message is above" if code else "does it need --do_train, or has it a loop of its own?"
        raise ValueError(
            f"{script} {ended} before it reached Trainer.train(): {hint} Without a Trainer, give plan the model."
        )
    answer = json.loads(file.read_text())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def without_outputs(arguments: list[str], folder: Path) -> list[str]:
    """The script's arguments with a temporary folder for all that it writes, and without uploads."""
    words: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        has_value = bool(rest) and not rest[0].startswith("-")
        if name in _NEVER:
            if not equals and has_value:
                rest.pop(0)
        elif name in _OUTPUT:
            words += [name, str(folder / "out")]
            if not equals and has_value:
                rest.pop(0)
        else:
            words.append(word)
    return words


def output_of(arguments: list[str]) -> Path | None:
    """The script's own output folder, in which earlier runs may have left records."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in _OUTPUT[::2]:
            return Path(value) if equals else Path(arguments[place + 1]) if place + 1 < len(arguments) else None
    return None
