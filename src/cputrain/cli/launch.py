"""`cputrain launch SCRIPT ARGS…`: the configuration's meaning applied, `cputrain run` inside, once or many times."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain.cli.app import command, new_app
from cputrain.integrations import notices, settings
from cputrain.launch import config_file, import_path, join, output, plan, ranks
from cputrain.launch.config import ENGINES, PORT, PRECISIONS, Config, environment_of
from cputrain.launch.cores import ALLOCATORS
from cputrain.log import logger

app = new_app()
EXAMPLES = """
    cputrain launch nlp_example.py --epochs 3
    cputrain launch -n 2 nlp_example.py
    cputrain launch -n 4 --ppn 2 --hostfile hosts run_qa.py --ddp_backend ccl
    cputrain launch --config_file two_machines.yaml --dry-run nlp_example.py
"""


def _option(name: str, text: str, *others: str, value: str | None = None) -> Any:
    """As accelerate spells its options, with underscores, and as everybody else does, with hyphens.

    `value` stands for the option's value in the help; else the last word of the name does.
    """
    return typer.Option(*_spellings(f"--{name}", *others), help=text, metavar=value)


def _spellings(*names: str) -> dict[str, None]:
    """Each as it is written, and with the other sign between its words."""
    words = [(name, name.replace("_", "-"), re.sub(r"(?<=\w)-(?=\w)", "_", name)) for name in names]
    return dict.fromkeys(word for spelt in words for word in spelt)


@command(app, EXAMPLES, allow_interspersed_args=False)  # what follows the script is the script's
def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run, or with -m the module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    config: Annotated[
        Path | None, _option("config_file", "A file that `cputrain config` wrote; else the default one.")
    ] = None,
    num_processes: Annotated[int | None, _option("num_processes", "Processes in all.", "-n", value="N")] = None,
    ppn: Annotated[int | None, _option("ppn", "Processes on each machine.", value="N")] = None,
    hostfile: Annotated[
        str | None,
        _option(
            "hostfile", "A file of hosts, one a line: node1, node1:4, node1 slots=4.", "--mpirun_hostfile", value="FILE"
        ),
    ] = None,
    num_machines: Annotated[
        int | None, _option("num_machines", "Machines, if launched on each by hand.", value="N")
    ] = None,
    machine_rank: Annotated[int | None, _option("machine_rank", "Which of them this is.")] = None,
    main_process_ip: Annotated[
        str | None, _option("main_process_ip", "The address of rank 0.", value="ADDRESS")
    ] = None,
    main_process_port: Annotated[int | None, _option("main_process_port", "The port of rank 0.")] = None,
    engine: Annotated[str | None, _option("engine", "What starts the processes.", value="|".join(ENGINES))] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="A variable for every rank; may be repeated."),
    ] = None,
    cores: Annotated[
        int | None,
        _option("cores-for-communication", "Cores of each rank that don't compute.", "--mpirun_ccl", value="N"),
    ] = None,
    allocator: Annotated[
        str | None, _option("allocator", "The memory allocator; default: glibc's.", value="|".join(ALLOCATORS))
    ] = None,
    log_dir: Annotated[
        str | None, _option("log_dir", "Write what each rank prints into a file there, too.", value="FOLDER")
    ] = None,
    max_restarts: Annotated[
        int | None, _option("max_restarts", "How often to start anew after a failure.", value="N")
    ] = None,
    mpirun: Annotated[
        str | None, _option("mpirun", "Which mpirun; else the first that is found.", value="PROGRAM")
    ] = None,
    mixed_precision: Annotated[
        str | None, _option("mixed_precision", "bf16: as if the script asked for it.", value="|".join(PRECISIONS))
    ] = None,
    use_cpu: Annotated[
        bool | None,
        typer.Option(
            "--cpu/--no-cpu",
            " /--no_cpu",
            *_spellings("--use_cpu"),
            help="--no-cpu: the script may choose a GPU, and cputrain stays out then.",
        ),
    ] = None,
    ipex: Annotated[
        bool | None, typer.Option("--ipex/--no-ipex", " /--no_ipex", help="--no-ipex: stock, without cputrain.")
    ] = None,
    threads: Annotated[
        int | None, _option("num_cpu_threads_per_process", "Threads of each rank; else its cores.", value="N")
    ] = None,
    dtype: Annotated[
        str | None,
        _option(
            "dtype", "The number format of matrix products; wins over the script.", value="|".join(settings.DTYPES)
        ),
    ] = None,
    padding: Annotated[
        str | None,
        _option(
            "padding", "keep: stock's padded numbers; else padding is not computed.", value="|".join(settings.PADDINGS)
        ),
    ] = None,
    compression: Annotated[
        str | None,
        _option("grad-compression", "bf16: gradients travel at half the size.", value="|".join(settings.COMPRESSIONS)),
    ] = None,
    balance: Annotated[
        str | None,
        _option(
            "balance", "off: deal samples to ranks in stock's order; else by length.", value="|".join(settings.BALANCES)
        ),
    ] = None,
    same_network: Annotated[bool | None, typer.Option(*_spellings("--same_network"), hidden=True)] = None,
    rdzv_backend: Annotated[str | None, typer.Option(*_spellings("--rdzv_backend"), hidden=True)] = None,
    dry: Annotated[bool, _option("dry-run", "Print what would run, and where; start nothing.")] = False,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module.")] = False,
) -> None:
    """Start a training as a configuration file says, as one process or many, here or on other machines.

    Options win over the file, and may be spelt with - or _ between their words. What follows the script belongs to it.
    """
    given = {
        "num_processes": num_processes,
        "ppn": ppn,
        "hostfile": hostfile,
        "num_machines": num_machines,
        "machine_rank": machine_rank,
        "main_process_ip": main_process_ip,
        "main_process_port": main_process_port,
        "engine": engine,
        "env": tuple(env) if env else None,
        "cores_for_communication": cores,
        "allocator": allocator,
        "log_dir": log_dir,
        "max_restarts": max_restarts,
        "grad_compression": compression,
        "balance": balance,
        "mixed_precision": mixed_precision,
        "use_cpu": use_cpu,
        "ipex": ipex,
        "same_network": same_network,
        "rdzv_backend": rdzv_backend,
    }
    notices.show()
    chosen = _configuration(config, {key: value for key, value in given.items() if value is not None})
    added, warnings = environment_of(chosen.config, os.environ, threads)
    for warning in warnings:
        logger.warning(warning)
    for name, value, option in ((settings.DTYPE, dtype, "--dtype"), (settings.PADDING, padding, "--padding")):
        added |= {name: settings.checked(name, value, option)} if value is not None else {}
    program = (*(["-m"] if module else []), script, *(arguments or []))
    task = plan.Task(program, os.getcwd(), added, os.environ, os.isatty(2))
    sys.exit(_launched(chosen, task, mpirun, dry))


@dataclass(frozen=True)
class _Chosen:
    """A configuration, the number of processes if one was named, and where it came from."""

    config: Config
    size: int | None
    source: str


def _configuration(path: Path | None, given: dict[str, Any]) -> _Chosen:
    config, source = (config_file.read(path), str(path)) if path else config_file.read_default()
    if "num_processes" not in given and given.get("num_machines", 1) > 1 and "ppn" in given:
        given = {**given, "num_processes": given["ppn"] * given["num_machines"]}
    several = any(given.get(name, 1) > 1 for name in ("num_processes", "num_machines", "ppn")) or "hostfile" in given
    merged = replace(config, **{**({"distributed_type": "MULTI_CPU"} if several else {}), **given})
    named = "num_processes" in given or config_file.says(source, "num_processes")
    return _Chosen(merged, merged.num_processes if named else None, source)


def _launched(chosen: _Chosen, task: plan.Task, mpirun: str | None, dry: bool) -> int:
    place = ranks.find(os.environ)
    if isinstance(place, ranks.Place):
        return _as_rank(chosen, task, place, dry)
    config = chosen.config
    several = config.num_processes > 1 or config.hostfile or (config.ppn or 1) > 1 or config.engine == "mpi"
    if place is None and not several and not config.max_restarts:
        return _here(task, _labels(config, task), None, dry)
    made = plan.make(config, chosen.size, task, place, mpirun)
    if dry:
        print(plan.text(made, task), end="")
        return 0
    output.take_over()
    notices.show()  # on the streams that were taken over
    here = "rank" if made.size == 1 else "ranks"
    logger.info(f"{made.size} {here} by {made.engine}: {made.reason}")
    return made.start()


def _as_rank(chosen: _Chosen, task: plan.Task, place: ranks.Place, dry: bool) -> int:
    """Another launcher started the ranks: this process is one of them, and starts none."""
    if chosen.size is not None and chosen.size != place.size:
        raise ValueError(
            f"{chosen.source} asks for {chosen.size} processes, but {place.size} were started ({place.reason}): "
            "change one of them."
        )
    config = chosen.config
    added = _labels(config, task)
    if config.max_restarts and place.rank == 0:
        logger.warning("max_restarts has no effect: the launcher that started this rank would have to start it anew")
    if config.main_process_ip and not (os.environ.get("MASTER_ADDR") or os.environ.get("PET_MASTER_ADDR")):
        added |= {"MASTER_ADDR": config.main_process_ip, "MASTER_PORT": str(config.main_process_port or PORT)}
    return _here(task, added, place, dry)


def _labels(config: Config, task: plan.Task) -> dict[str, str]:
    """A file per rank also where no agent of ours reads what a rank prints: the rank keeps it itself."""
    return {join.LABEL: f"{int(task.bars)}:{config.log_dir}"} if config.log_dir else {}


def _here(task: plan.Task, more: dict[str, str], place: ranks.Place | None, dry: bool) -> int:
    """A new process: the variables must be there before any library of this one looked at them."""
    added = {**task.added, **more}
    command = [sys.executable, import_path.program("__main__.py"), "run", *task.program]
    if dry:
        print(plan.text_of_one(place, command, added, os.environ), end="")
        return 0
    if sys.stdout:
        sys.stdout.flush()
    if join.LABEL in more:  # what is printed is copied into a file, also if standard output is closed
        output.reserve_descriptors()
    os.execve(command[0], command, {**os.environ, **added})
