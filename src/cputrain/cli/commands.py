"""The sub-commands, as typer sees them: one small module each.

Modules here import nothing heavy at their top, so that `--help` answers at once and without torch.
"""

from __future__ import annotations

import typer

from cputrain import __version__
from cputrain.cli import config, doctor, image, k8s_live, launch, run, slurm

app = typer.Typer(
    name="cputrain",
    help="Train transformer models on CPUs several times faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's table of options cuts long names short
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="What this CPU is, what runs on it, and why.")(doctor.doctor)
app.command(short_help="Answer Accelerate's questions; writes what launch reads.")(config.config)
# What stands after the script is the script's.
app.command(
    short_help="Start a script as one process or many, here or elsewhere.",
    context_settings={"allow_interspersed_args": False},
)(launch.launch)
app.add_typer(k8s_live.app, name="k8s", short_help="Train on Kubernetes with Kubeflow's operators.")
app.add_typer(slurm.app, name="slurm", short_help="Train on a Slurm cluster.")
app.command(short_help="Write a Dockerfile for trainings, or build the image.")(image.image)


@app.command(
    "run", help=run.SUMMARY, short_help="Run a training script, optimised, as python would.", add_help_option=False
)
def _listed_run() -> None:
    raise AssertionError("cli.main starts `run` by itself, before typer is imported: here it is only listed")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"cputrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Train transformer models on CPUs several times faster."""
