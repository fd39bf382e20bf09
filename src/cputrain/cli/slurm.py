"""`cputrain slurm …`: a training on a Slurm cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cputrain import text_files
from cputrain.cli.app import command, new_app
from cputrain.cli.job_options import assignments, name_of, with_fields

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
class SlurmOptions:
    """Options as they were given, under the names that SlurmJob has for them."""

    name: Annotated[str | None, typer.Option("--name", help="The job's name; else the script's.")] = None
    nodes: Annotated[int, typer.Option("--nodes", "-N", metavar="N", help="Nodes.")] = 1
    cpus: Annotated[int, typer.Option("--cpus", metavar="N", help="CPUs of each node.")] = 4
    tasks: Annotated[
        int | None,
        typer.Option("--tasks-per-node", metavar="N", help="Processes of a node; else one for every 64 CPUs."),
    ] = None
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads of a process; else its share.")
    ] = None
    communication: Annotated[
        int | None, typer.Option("--cores-for-communication", metavar="N", help="Cores of a process for communication.")
    ] = None
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Memory of each node, e.g. 64G.")] = (
        None
    )
    time: Annotated[str | None, typer.Option("--time", "-t", help="The limit, e.g. 12:00:00.")] = None
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="The partition.")] = None
    account: Annotated[str | None, typer.Option("--account", "-A", help="The account.")] = None
    environment: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="A variable for every process; may be repeated."),
    ] = None
    activate: Annotated[
        str | None, typer.Option("--activate", metavar="FOLDER", help="A virtual environment to run in.")
    ] = None
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="Queue the job again when a node fails or time is up.")
    ] = True
    resume: Annotated[
        list[str] | None,
        typer.Option("--resume-argument", metavar="WORD", help="A word for the script when the job comes back."),
    ] = None


@command(app, RENDER_EXAMPLES, allow_interspersed_args=False)
@with_fields
def render(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as the nodes see it.")],
    options: SlurmOptions,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write there, not to standard output.")
    ] = None,
) -> None:
    """Write a batch script: what stands after the options is the script and its arguments."""
    from cputrain.cluster import slurm as cluster

    made = {
        "name": name_of(script) if options.name is None else options.name,
        "environment": assignments(options.environment or (), "--env"),
        "resume": tuple(options.resume or ()),
    }
    job = cluster.SlurmJob(script=script, arguments=tuple(arguments or ()), **{**vars(options), **made})
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
    from cputrain.cluster import slurm as cluster

    number = cluster.submit(file)
    print(f"Slurm has the job as number {number}: squeue --job {number}")
