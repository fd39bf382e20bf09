"""`cputrain launch SCRIPT ARGS…`: the configuration's meaning applied, `cputrain run` inside, once or many times."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain import settings
from cputrain.cli.app import command, new_app, setting, with_fields
from cputrain.cli.recovery_options import RecoveryOptions
from cputrain.integrations import notices
from cputrain.integrations.settings import checked
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


def _setting(text: str, *names: str, **more: Any) -> Any:
    """An option that may be spelt with underscores, as accelerate does, and with hyphens; `--yes/--no` isn't."""
    spelt: dict[str, None] = {}
    for name in names:
        others = [] if "/" in name else [name.replace("_", "-"), re.sub(r"(?<=\w)-(?=\w)", "_", name)]
        spelt |= dict.fromkeys([name, *others])
    return setting(text, *spelt, **more)


@dataclass(frozen=True)
class Options(RecoveryOptions):
    """Options as they were given; those that a Config has under the same name win over the file's."""

    config: Path | None = _setting("A file that `cputrain config` wrote; else the default one.", "--config_file")
    num_processes: int | None = _setting("Processes in all.", "--num_processes", "-n", metavar="N")
    ppn: int | None = _setting("Processes on each machine.", "--ppn", metavar="N")
    hostfile: str | None = _setting(
        "A file of hosts, one a line: node1, node1:4, node1 slots=4.", "--hostfile", "--mpirun_hostfile", metavar="FILE"
    )
    num_machines: int | None = _setting("Machines, if launched on each by hand.", "--num_machines", metavar="N")
    machine_rank: int | None = _setting("Which of them this is.", "--machine_rank")
    main_process_ip: str | None = _setting("The address of rank 0.", "--main_process_ip", metavar="ADDRESS")
    main_process_port: int | None = _setting("The port of rank 0.", "--main_process_port")
    engine: str | None = _setting("What starts the processes.", "--engine", metavar="|".join(ENGINES))
    env: list[str] | None = _setting("A variable for every rank; may be repeated.", "--env", metavar="NAME=VALUE")
    cores_for_communication: int | None = _setting(
        "Cores of each rank that don't compute.", "--cores-for-communication", "--mpirun_ccl", metavar="N"
    )
    allocator: str | None = _setting(
        "The memory allocator; default: glibc's.", "--allocator", metavar="|".join(ALLOCATORS)
    )
    log_dir: str | None = _setting("Write what each rank prints into a file there, too.", "--log_dir", metavar="FOLDER")
    max_restarts: int | None = _setting("How often to start anew after a failure.", "--max_restarts", metavar="N")
    mpirun: str | None = _setting("Which mpirun; else the first that is found.", "--mpirun", metavar="PROGRAM")
    mixed_precision: str | None = _setting(
        "bf16: as if the script asked for it.", "--mixed_precision", metavar="|".join(PRECISIONS)
    )
    use_cpu: bool | None = _setting(
        "--no-cpu: the script may choose a GPU, and cputrain stays out then.",
        "--cpu/--no-cpu",
        " /--no_cpu",
        "--use_cpu",
    )
    ipex: bool | None = _setting("--no-ipex: stock, without cputrain.", "--ipex/--no-ipex", " /--no_ipex")
    threads: int | None = _setting(
        "Threads of each rank; else its cores.", "--num_cpu_threads_per_process", metavar="N"
    )
    dtype: str | None = _setting(
        "The number format of matrix products; wins over the script.", "--dtype", metavar="|".join(settings.DTYPES)
    )
    padding: str | None = _setting(
        "keep: stock's padded numbers; else padding is not computed.", "--padding", metavar="|".join(settings.PADDINGS)
    )
    grad_compression: str | None = _setting(
        "bf16: gradients travel at half the size.", "--grad-compression", metavar="|".join(settings.COMPRESSIONS)
    )
    balance: str | None = _setting(
        "off: deal samples to ranks in stock's order; else by length.", "--balance", metavar="|".join(settings.BALANCES)
    )
    progress: str | None = _setting(
        "live: one line that moves; lines: from time to time; default: by terminal.",
        "--progress",
        metavar="|".join(settings.PROGRESSES),
    )
    record: str | None = _setting(
        "Where the run's record goes; off: nowhere; default: the script's output folder.",
        "--record",
        metavar="off|FOLDER",
    )
    same_network: bool | None = _setting("", "--same_network", hidden=True)
    rdzv_backend: str | None = _setting("", "--rdzv_backend", hidden=True)
    dry: bool = _setting("Print what would run, and where; start nothing.", "--dry-run", default=False)
    module: bool = _setting("SCRIPT is a module.", "-m", "--module", default=False)


# Options that become variables of every rank, and win over the script.
_OF_RANKS = (
    (settings.DTYPE, "dtype"),
    (settings.PADDING, "padding"),
    (settings.PROGRESS, "progress"),
    (settings.RECORD, "record"),
)


@command(app, EXAMPLES, allow_interspersed_args=False)  # what follows the script is the script's
@with_fields
def launch(
    options: Options,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run, or with -m the module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
) -> None:
    """Start a training as a configuration file says, as one process or many, here or on other machines.

    Options win over the file, and may be spelt with - or _ between their words. What follows the script belongs to it.
    """
    notices.show()
    chosen = _configuration(options.config, _given(options))
    added, warnings = environment_of(chosen.config, os.environ, options.threads)
    for warning in warnings:
        logger.warning(warning)
    for variable, name in _OF_RANKS:
        value = getattr(options, name)
        added |= {variable: checked(variable, value, f"--{name}")} if value is not None else {}
    added |= (recovery := options.variables())
    os.environ.update(recovery)  # how long we wait for the ranks
    if os.isatty(2) and not settings.value_of(settings.PROGRESS):
        added.setdefault(settings.PROGRESS, "live")  # the ranks' own stderr is a pipe of ours
    program = (*(["-m"] if options.module else []), script, *(arguments or []))
    task = plan.Task(program, os.getcwd(), added, os.environ, os.isatty(2))
    sys.exit(_launched(chosen, task, options.mpirun, options.dry))


def _given(options: Options) -> dict[str, Any]:
    found = {**vars(options), "env": tuple(options.env or ()) or None}
    return {name: value for name, value in found.items() if name in Config.__dataclass_fields__ and value is not None}


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
    if config.main_process_ip and not any(map(settings.value_of, (settings.MASTER_ADDR, settings.PET_MASTER_ADDR))):
        added |= {
            settings.MASTER_ADDR: config.main_process_ip,
            settings.MASTER_PORT: str(config.main_process_port or PORT),
        }
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
