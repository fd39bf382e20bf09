"""`cputrain config`: Accelerate's dialog for CPUs, question by question as in its guide."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain import hardware
from cputrain.cli.app import command, new_app, option
from cputrain.launch import config_file
from cputrain.launch.config import PORT, Config

app = new_app()
EXAMPLES = """
    cputrain config                                  asks, writes the default file
    cputrain config --file two_machines.yaml         asks, writes this file
    cputrain config --default --overwrite            asks nothing
    cputrain config --for-accelerate accelerate.yaml
"""
_MACHINES = {"No distributed training": "NO", "multi-CPU": "MULTI_CPU"}
_PRECISIONS = ("no", "bf16")


@command(app, EXAMPLES)
def config(
    file: Annotated[
        Path | None, option("The file to write; else the default one.", "--file", "--config_file", metavar="FILE")
    ] = None,
    default: Annotated[bool, option("Ask nothing: write the defaults.", "--default")] = False,
    update: Annotated[bool, option("Ask nothing: read the file, write it anew.", "--update")] = False,
    for_accelerate: Annotated[
        Path | None,
        option(
            "Ask nothing: write the configuration there as accelerate reads it.", "--for-accelerate", metavar="FILE"
        ),
    ] = None,
    overwrite: Annotated[bool, option("Don't ask whether a file may be overwritten.", "--overwrite")] = False,
) -> None:
    """Answer Accelerate's questions about this machine, and write the configuration that `launch` reads."""
    path = file or config_file.default_path()
    target = for_accelerate or path
    if not (default or update or for_accelerate or sys.stdin.isatty()):
        raise ValueError("config asks questions, and standard input is no terminal: give --default, or --update.")
    if not (overwrite or (update and target == path)):
        _check_overwriting(target)
    if for_accelerate:
        chosen = config_file.read(path) if path.exists() else config_file.read_default()[0]
        config_file.write_for_accelerate(chosen, for_accelerate)
        print(f"accelerate's configuration is in {for_accelerate}")
        return
    chosen = config_file.read(path) if update else Config() if default else ask()
    config_file.write(chosen, path)
    print(config_file.to_text(chosen.to_mapping()), end="")
    option = "" if path == config_file.default_path() else f"--config_file {shlex.quote(str(path))} "
    print(f"The configuration is in {path}: `cputrain launch {option}SCRIPT` reads it.")


def _check_overwriting(path: Path) -> None:
    """Asks first, where standard input is a terminal."""
    if not path.exists():
        return
    if not sys.stdin.isatty():
        raise ValueError(f"{path} exists: give --overwrite, or another file.")
    print(f"{path} exists.")
    if not _yes("Do you want to overwrite it?", False):
        print("Nothing was written.")
        raise typer.Exit(1)


def ask() -> Config:
    """The dialog. Several processes or machines are asked about only where there may be some."""
    _choose("In which compute environment are you running?", ["This machine"])
    kind = _MACHINES[_choose("Which type of machine are you using?", list(_MACHINES))]
    answers: dict[str, Any] = {"distributed_type": kind}
    if kind == "NO":
        answers["use_cpu"] = _yes(
            "Do you want to run your training on CPU only (even if a GPU / Apple Silicon device is available)?", True
        )
    else:
        answers |= _ask_machines()
    answers["ipex"] = _yes("Do you want to use Intel PyTorch Extension (IPEX) to speed up training on CPU?", True)
    if _yes("Do you wish to optimize your script with torch dynamo?", False):
        print("torch dynamo fuses by itself, and cputrain would stay out: the answer is taken as no.")
    if kind == "NO" and _yes("Do you want to use DeepSpeed?", False):
        print("DeepSpeed trains on GPUs, cputrain on CPUs: the answer is taken as no.")
    if kind == "MULTI_CPU":
        answers["num_processes"] = _number(
            "How many CPU(s) should be used for distributed training?",
            answers["num_machines"] * _processes_here(),
            lambda n: n % answers["num_machines"] and f"{answers['num_machines']} machines can't share {n} evenly.",
        )
    answers["mixed_precision"] = _choose("Do you wish to use FP16 or BF16 (mixed precision)?", list(_PRECISIONS))
    return Config(**answers)


def _processes_here() -> int:
    """One for each NUMA node, as far as there are cores for them."""
    machine = hardware.this_machine()
    return max(1, min(len(machine.numa_nodes.value), machine.usable_cores.value))


def _ask_machines() -> dict[str, Any]:
    machines = _number("How many different machines will you use (use more than 1 for multi-node training)?", 1)
    if machines == 1:
        return {"num_machines": 1}
    ranks = [str(rank) for rank in range(machines)]
    return {
        "num_machines": machines,
        "machine_rank": int(_choose("What is the rank of this machine?", ranks)),
        "main_process_ip": _text("What is the IP address of the machine that will host the main process?"),
        "main_process_port": _number("What is the port you will use to communicate with the main process?", PORT),
        "same_network": _yes(
            "Are all the machines on the same local network? Answer `no` if nodes are on the cloud and/or on different "
            "network hosts",
            True,
        ),
    }


# --- Kinds of questions ------------------------------------------------------------------------------------------


def _asked(question: Any) -> Any:
    answer = question.ask()
    if answer is None:  # Ctrl-C
        raise typer.Exit(130)
    return answer


def _choose(question: str, choices: list[str]) -> str:
    import questionary

    return _asked(questionary.select(question, choices=choices))


def _text(question: str, default: str = "", problem: Callable[[str], str | bool | int] = lambda _: False) -> str:
    import questionary

    def valid(answer: str) -> bool | str:
        if not (answer or default):
            return "An answer is needed."
        found = problem(answer or default)
        return str(found) if found else True

    return _asked(questionary.text(question, validate=valid)) or default


def _yes(question: str, default: bool) -> bool:
    def problem(answer: str) -> str | bool:
        return answer.lower() not in ("yes", "no", "y", "n") and "Answer yes or no."

    answer = _text(f"{question} [{'YES/no' if default else 'yes/NO'}]:", "yes" if default else "no", problem)
    return answer.lower().startswith("y")


def _number(question: str, default: int, problem: Callable[[int], str | bool | int] = lambda _: False) -> int:
    def wrong(answer: str) -> str | bool | int:
        if not answer.isdecimal() or int(answer) < 1:
            return "A whole number is needed."
        return problem(int(answer))

    return int(_text(f"{question} [{default}]:", str(default), wrong))
