"""The command line of `cputrain run`: read before anything but the standard library is imported."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from cputrain import settings
from cputrain.integrations.settings import check, checked

SUMMARY = "Run a training script with cputrain active, as python would run it."
EXAMPLES = """
    cputrain run run_qa.py --model_name_or_path bert-base-uncased --do_train
    cputrain run --dtype fp32 --padding keep run_qa.py --do_train
    cputrain run --resume auto run_qa.py --do_train --output_dir out
    cputrain run -m my_package.train --epochs 3
"""
_TEXT = f"""
{SUMMARY}

Scripts on transformers' Trainer and on Accelerate are optimised without an edit, and accept --use_ipex, --no_cuda,
--jit_mode_eval and --ddp_backend ccl again. Options of cputrain stand before the script, the script's after it.
"""
OPTIONS = {
    "--dtype": settings.DTYPE,
    "--padding": settings.PADDING,
    "--grad-compression": settings.GRADIENTS,
    "--grad_compression": settings.GRADIENTS,
    "--balance": settings.BALANCE,
    "--progress": settings.PROGRESS,
    "--record": settings.RECORD,
    "--resume": settings.RESUME,
    "--save-every": settings.SAVE_EVERY,
    "--save_every": settings.SAVE_EVERY,
    "--on-nan": settings.ON_NAN,
    "--on_nan": settings.ON_NAN,
}
CHOICES = {
    "--dtype": settings.DTYPES,
    "--padding": settings.PADDINGS,
    "--grad-compression": settings.COMPRESSIONS,
    "--balance": settings.BALANCES,
    "--progress": settings.PROGRESSES,
    "--record": ("off", "FOLDER"),
    "--resume": ("auto", "never", "FOLDER"),
    "--save-every": ("TIME",),
    "--on-nan": settings.ON_NANS,
}
MEANINGS = {
    "--dtype": "The number format of matrix products, whatever the script says; without it fp32, or auto if the "
    "script asks for bf16. auto: the fastest on this CPU that is at least as exact as bf16. int16: block-scaled 16-bit "
    "integers, with a tenth of bf16's error.",
    "--padding": "drop (default): padded positions are not computed. keep: stock's padded numbers.",
    "--grad-compression": "bf16: several ranks send their gradients as bf16.",
    "--balance": "length (default): several ranks get samples of similar length. off: in stock's order.",
    "--progress": "live: one line that moves. lines: a plain line from time to time. off: none. auto (default): live "
    "on a terminal.",
    "--record": "off: the run leaves no record. FOLDER: where it goes; without it the script's output folder.",
    "--resume": "auto: go on from the newest checkpoint that is whole and fits. FOLDER: from that one. never: begin. "
    "Without it only a restart goes on, from a checkpoint of its own run.",
    "--save-every": "Save a checkpoint every 30s, 10min or 2h, too; with auto or restarts: 10min.",
    "--on-nan": "What Trainer does about a loss that isn't a number. stock (default): it is named. stop: the training "
    "ends. skip: the step is left out. back: on from the last checkpoint, without that step.",
}


class Target(NamedTuple):
    """What is to run: a file, a module (-m) or code (-c), and its arguments."""

    flag: str  # "", "-m" or "-c"
    what: str
    arguments: list[str]


def is_meant(arguments: list[str]) -> bool:
    """Whether a command line is one of `run`, which may be left out: `python -m cputrain script.py`."""
    first = arguments[0] if arguments else ""
    return first in ("run", "-m", "-c") or first.partition("=")[0] in OPTIONS or first.endswith(".py")


def read(arguments: list[str]) -> Target:
    """Options before the script are ours; they go into the environment, where child processes find them."""
    rest = arguments[1:] if arguments[0] == "run" else list(arguments)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in ("-h", "--help"):
            print(help_text())
            sys.exit(0)
        if name not in ("-m", "-c", *OPTIONS):
            raise ValueError(_unknown(name))
        if name in OPTIONS and equals:
            rest.insert(0, value)
        if not rest:
            raise ValueError(f"{name} needs a value.")
        if name not in OPTIONS:
            return Target(name, rest[0], rest[1:])
        os.environ[OPTIONS[name]] = checked(OPTIONS[name], rest.pop(0), name)
    if not rest:
        raise ValueError("run needs a script: cputrain run [OPTIONS] SCRIPT [ARGUMENTS]...")
    check()
    return Target("", rest[0], rest[1:])


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, [*OPTIONS, "--help"], 1)
    meant = f"did you mean {close[0]}? Options" if close else "options"
    return f"run has no option {name}; {meant} of the script stand after it."


def help_text() -> str:
    from cputrain.cli.terminal import help_page

    options = [(f"{name} {'|'.join(values)}", MEANINGS[name]) for name, values in CHOICES.items()]
    return help_page(
        [
            "cputrain run [OPTIONS] SCRIPT [ARGUMENTS]...",
            "cputrain run [OPTIONS] -m MODULE [ARGUMENTS]...",
            "cputrain run [OPTIONS] -c CODE [ARGUMENTS]...",
        ],
        _TEXT,
        [("Options", [*options, ("-h, --help", "Show this page.")])],
        EXAMPLES,
    )
