"""`cputrain slurm …`: a training on a Slurm cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cputrain import text_files
from cputrain.cli.app import command, new_app, option, setting, with_fields
from cputrain.cli.job_options import assignments, name_of
from cputrain.cli.recovery_options import RecoveryOptions
from cputrain.cluster import slurm as cluster

app = new_app(
    help="Train on a Slurm cluster: write the batch script, submit it.",
    epilog="""
        cputrain slurm render --nodes 2 --cpus 32 -o job.sh -- run_qa.py --do_train
        cputrain slurm submit job.sh
    """,
)
RENDER_EXAMPLES = """
    cputrain slurm render --nodes 2 --cpus 32 -o job.sh -- run_qa.py --do_train
    cputrain slurm render -t 12:00:00 --activate ~/venv -- run_qa.py --do_train
"""


@dataclass(frozen=True)
class SlurmOptions(RecoveryOptions):
    """Options as they were given, under the names that SlurmJob has for them."""

    name: str | None = setting("The job's name; else the script's.", "--name")
    nodes: int = setting("Nodes.", "--nodes", "-N", metavar="N", default=1)
    cpus: int = setting("CPUs of each node.", "--cpus", metavar="N", default=4)
    tasks: int | None = setting("Processes of a node; else one for every 64 CPUs.", "--tasks-per-node", metavar="N")
    threads: int | None = setting("Threads of a process; else its share.", "--threads", metavar="N")
    communication: int | None = setting(
        "Cores of a process for communication.", "--cores-for-communication", metavar="N"
    )
    memory: str | None = setting("Memory of each node, e.g. 64G.", "--memory", metavar="SIZE")
    time: str | None = setting("The limit, e.g. 12:00:00.", "--time", "-t")
    partition: str | None = setting("The partition.", "--partition", "-p")
    account: str | None = setting("The account.", "--account", "-A")
    environment: list[str] | None = setting(
        "A variable for every process; may be repeated.", "--env", metavar="NAME=VALUE"
    )
    activate: str | None = setting("A virtual environment to run in.", "--activate", metavar="FOLDER")
    requeue: bool = setting(
        "Queue the job again when a node fails or time is up.", "--requeue/--no-requeue", default=True
    )


@command(app, RENDER_EXAMPLES, allow_interspersed_args=False)
@with_fields
def render(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as the nodes see it.")],
    options: SlurmOptions,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    out: Annotated[Path | None, option("Write there, not to standard output.", "--out", "-o", metavar="FILE")] = None,
) -> None:
    """Write a batch script: what stands after the options is the script and its arguments."""
    made = {
        "name": name_of(script) if options.name is None else options.name,
        "environment": assignments(options.environment or (), "--env"),
        "recovery": tuple(options.variables().items()),
    }
    same = {name: value for name, value in vars(options).items() if name in cluster.SlurmJob.__dataclass_fields__}
    job = cluster.SlurmJob(script=script, arguments=tuple(arguments or ()), **{**same, **made})
    text = cluster.to_text(job)
    if out is None:
        print(text, end="")
        return
    text_files.write(out, text)
    print(f"Written: {out}. Next: cputrain slurm submit {out}")


@command(app, "cputrain slurm submit job.sh")
def submit(
    file: Annotated[Path, typer.Argument(help="The batch script.")],
) -> None:
    """Hand a batch script to Slurm."""
    number = cluster.submit(file)
    print(f"Slurm has the job as number {number}: squeue --job {number}")
