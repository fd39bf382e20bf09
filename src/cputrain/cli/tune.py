"""`cputrain tune SCRIPT ARGS…`: the fastest settings of this machine for a training, found by real steps."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from cputrain import hardware, log, settings, text_files
from cputrain.cli.app import command, new_app, option
from cputrain.launch import config_file, processes, ranks
from cputrain.launch.config import Config
from cputrain.tune import candidates, outcome
from cputrain.tune.session import Session
from cputrain.tune.trial import Training
from cputrain.tune.tried import Tried, fingerprint

app = new_app()
EXAMPLES = """
    cputrain tune run_qa.py --do_train --per_device_train_batch_size 12
    cputrain tune --dtypes fp32,int16 --budget 30min run_qa.py --do_train
    cputrain tune --dry-run run_qa.py --do_train
    cputrain tune --it-may-write --batch-option --batch loop.py --batch 32
"""
_DEFAULT_FILE = Path("cputrain-tuned.yaml")
_LEAST_SECONDS = 10
_LEAST_STEPS = 4


@command(app, EXAMPLES, allow_interspersed_args=False)  # what follows the script is the script's
def tune(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to tune, or with -m the module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    budget: Annotated[str, option("How long it may take: 90s, 10min, 2h.", "--budget", metavar="TIME")] = "10min",
    dtypes: Annotated[
        str | None,
        option(
            "Number formats that may be used, with commas between them; default: what the script asks for.",
            "--dtypes",
            metavar=",".join(settings.DTYPES),
        ),
    ] = None,
    file: Annotated[
        Path,
        option(
            "Where the winner goes, for `cputrain launch --config_file`.",
            "--config_file",
            "--config-file",
            metavar="FILE",
        ),
    ] = _DEFAULT_FILE,
    steps: Annotated[
        int | None, option("Steps of each trial; default: what the budget allows.", "--steps", metavar="N")
    ] = None,
    batch_option: Annotated[
        str | None,
        option(
            "The script's own option for the batch of a process, which ranks share; not needed with Trainer.",
            "--batch-option",
            metavar="NAME",
        ),
    ] = None,
    may_write: Annotated[
        bool, option("The script trains in a loop of its own, and may write what it writes.", "--it-may-write")
    ] = False,
    anew: Annotated[bool, option("Forget what was measured before.", "--anew")] = False,
    dry: Annotated[bool, option("List what would be tried; start nothing.", "--dry-run")] = False,
    module: Annotated[bool, option("SCRIPT is a module.", "-m", "--module")] = False,
) -> None:
    """Find the fastest settings of this machine for a training: ranks, threads, binding, allocator, number format.

    A few real steps of each are run by `cputrain launch`, with the same global batch, in rounds of fewer and fewer
    until one has won. Trainer's scripts write into a temporary folder, to no hub and no tracker; others are stopped
    after some steps. What was measured is kept: the same command goes on where it was stopped.
    """
    words = (*(["-m"] if module else []), script, *(arguments or []))
    training = Training(words, may_write, batch_option)
    seconds = _seconds(budget)
    if steps is not None and steps < _LEAST_STEPS:
        raise ValueError(f"--steps must be at least {_LEAST_STEPS}, found {steps}: the first two warm up.")
    formats = _formats(dtypes)
    base = _base(file)
    if place := ranks.find(os.environ):
        raise ValueError(f"tune starts ranks itself: run it once, and not by a launcher ({place.reason}).")
    _check_script(script, training, module)
    machine = hardware.this_machine()
    found = candidates.candidates(machine, formats, candidates.allocators())
    if dry:
        print(
            log.printable(
                "\n".join([f"{len(found)} candidates, the simplest first:", *(f"  {one.words}" for one in found)])
            )
        )
        return
    mark = fingerprint(words, machine, dtypes=formats, steps=steps, batch_option=batch_option)
    tried = Tried(file.with_suffix(".tried.jsonl"), mark, anew)
    screen = _Screen()
    session = Session(training, base, tried, seconds, screen.say, screen.watch, steps)
    with processes.sigterm_interrupts():
        try:
            _search(session, found, file, screen)
        except KeyboardInterrupt as interrupt:
            kept = f"{tried.path} keeps what was measured, and the same command goes on from there"
            screen.say(f"stopped; {kept if tried.facts else 'nothing was measured yet'}")
            raise typer.Exit(processes.interrupted_code(interrupt)) from None


def _search(session: Session, found: list[candidates.Candidate], file: Path, screen: _Screen) -> None:
    if session.tried.goes_on:
        screen.say(f"{session.tried.path} has measurements of this training: they count (--anew forgets them)")
    plan = session.plan(found)
    batch = f", a batch of {plan.batch * plan.accumulation}" if plan.batch else ""
    screen.say(f"{len(plan.candidates)} of {len(found)} candidates{batch}, {plan.steps} steps a trial")
    verdict = session.search(plan)
    lines = outcome.table(plan, verdict, session.tried)
    winner = plan.candidates[verdict.winner]
    run = outcome.command(session.training, winner, plan, str(file))
    text_files.make_folder(file.parent)
    text_files.write(file, outcome.text(session.base, winner, lines, verdict.why, run))
    screen.say("\n".join(["", *lines, "", f"{verdict.why}: {winner.words}"]))
    if not verdict.is_settled:
        screen.say("not settled: the same command goes on from here, or give a larger --budget")
    screen.say(f"{file} is written; train by it:\n  {run}")


def _seconds(budget: str) -> float:
    found = settings.seconds_of(budget)
    if found is None or found < _LEAST_SECONDS:
        raise ValueError(
            f"--budget must be a time like 90s, 10min or 2h, at least {_LEAST_SECONDS}s, found {budget!r}."
        )
    return found


def _formats(dtypes: str | None) -> list[str]:
    found = list(dict.fromkeys(word.strip() for word in dtypes.split(","))) if dtypes is not None else []
    for one in found:
        if one not in settings.DTYPES:
            raise ValueError(f"--dtypes takes {', '.join(settings.DTYPES)} with commas between them, found {one!r}.")
    return found


def _base(file: Path) -> Config:
    """The settings that aren't tuned: of the file that is written anew, else of the default one."""
    base = config_file.read(file) if file.exists() else config_file.read_default()[0]
    if base.hostfile or base.num_machines > 1:
        raise ValueError("tune measures one machine, and the configuration has several: give a --config_file without.")
    return base


def _check_script(script: str, training: Training, module: bool) -> None:
    """A look at the script is enough to see most loops of their own before they run; a trial sees the rest."""
    if module:
        return
    text = text_files.read(Path(script))
    if not training.may_write and not re.search(r"\b\w*Trainer\b", text):
        raise ValueError(
            f"{script} has no Trainer: it trains in a loop of its own, and what that writes can't be kept from it. "
            "Give --it-may-write to have it run and stopped after some steps."
        )
    if training.batch_option:
        training.sharing_batch(1)


class _Screen:
    """Lines that stay, and on a terminal one below them that moves."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()

    def watch(self, text: str) -> None:
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{log.printable(text)[:width]}", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self._is_live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(log.printable(text), flush=True)
