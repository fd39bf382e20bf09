"""`cputrain launch SCRIPT ARGS…`: the configuration's meaning applied, `cputrain run` inside."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain import hardware
from cputrain.integrations import settings
from cputrain.launch import config_file, environment
from cputrain.launch.config import Config


def _option(name: str, text: str, *others: str) -> Any:
    """As accelerate spells its options, with underscores, and as everybody else does, with hyphens."""
    return typer.Option(*dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}", *others]), help=text)


def launch(
    script: Annotated[str, typer.Argument(help="The script to run, or with -m the module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    config: Annotated[Path | None, _option("config_file", "A configuration file; else the default one.")] = None,
    num_processes: Annotated[int | None, _option("num_processes", "Processes in all.", "-n")] = None,
    num_machines: Annotated[int | None, _option("num_machines", "Machines.")] = None,
    machine_rank: Annotated[int | None, _option("machine_rank", "Which of them this is.")] = None,
    main_process_ip: Annotated[str | None, _option("main_process_ip", "The address of rank 0.")] = None,
    main_process_port: Annotated[int | None, _option("main_process_port", "The port of rank 0.")] = None,
    mixed_precision: Annotated[str | None, _option("mixed_precision", "no or bf16.")] = None,
    use_cpu: Annotated[bool | None, typer.Option("--cpu/--no-cpu", "--use_cpu", help="Train on the CPU.")] = None,
    ipex: Annotated[bool | None, typer.Option("--ipex/--no-ipex", help="No: stock, without cputrain.")] = None,
    threads: Annotated[int | None, _option("num_cpu_threads_per_process", "Threads; else all usable cores.")] = None,
    dtype: Annotated[str | None, _option("dtype", "auto, fp32, bf16 or int16; wins over the script.")] = None,
    padding: Annotated[str | None, _option("padding", "drop, or keep for stock's padded numbers.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module.")] = False,
) -> None:
    """Start a training as a configuration file says; options win over the file."""
    given = {
        "num_processes": num_processes,
        "num_machines": num_machines,
        "machine_rank": machine_rank,
        "main_process_ip": main_process_ip,
        "main_process_port": main_process_port,
        "mixed_precision": mixed_precision,
        "use_cpu": use_cpu,
        "ipex": ipex,
    }
    chosen = _configuration(config, {key: value for key, value in given.items() if value is not None})
    _check_single(chosen)
    added = environment.of_training(chosen, hardware.this_machine(), os.environ, threads)
    added |= {name: value for name, value in ((settings.DTYPE, dtype), (settings.PADDING, padding)) if value}
    # A new process: the variables must be there before any library of this one looked at them.
    command = [sys.executable, "-m", "cputrain", "run", *(["-m"] if module else []), script, *(arguments or [])]
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, **added})


def _configuration(path: Path | None, given: dict[str, Any]) -> Config:
    config = config_file.read(path) if path else config_file.read_default()[0]
    several = given.get("num_processes", 1) > 1 or given.get("num_machines", 1) > 1
    return replace(config, **{**({"distributed_type": "MULTI_CPU"} if several else {}), **given})


def _check_single(config: Config) -> None:
    if config.num_processes > 1:
        raise ValueError(
            f"the configuration asks for {config.num_processes} processes, and this version of cputrain launches one; "
            "give --num_processes 1 --num_machines 1."
        )
