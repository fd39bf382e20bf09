"""`cputrain k8s render|check`: the manifests of a training, and what is wrong with any. Neither needs a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain import text_files
from cputrain.cli.job_options import JobOptions, option
from cputrain.cli.option_fields import with_fields

app = typer.Typer(
    help="Train on a Kubernetes cluster with Kubeflow: write the job, check it, submit it, follow it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(context_settings={"allow_interspersed_args": False})
@with_fields
def render(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as the image has it.")],
    options: JobOptions,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    out: Annotated[Path | None, option("Write there instead of to standard output.", "--out", "-o")] = None,
) -> None:
    """Write the manifests of a job: what stands after the options is the script and its arguments."""
    _write(options.job(script, arguments or []), out)


def _write(job: Any, out: Path | None) -> None:
    from cputrain.cluster import manifests

    text = manifests.job_text(job)
    if out is None:
        if job.volume and job.volume.size:
            raise ValueError("--create-pvc writes a file of its own, so that the job's never deletes data: give --out.")
        print(text, end="")
        return
    files = {out: text}
    if job.volume and job.volume.size:
        files[out.with_name(f"{out.stem}-volume{out.suffix or '.yaml'}")] = manifests.volume_text(job)
    for path, content in files.items():
        text_files.write(path, content)
    print(f"Written: {' and '.join(map(str, files))}. Next: cputrain k8s submit {' '.join(map(str, reversed(files)))}")


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Manifests; - is standard input.")],
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Ask the cluster for its schemas, instead of those that are shipped.")
    ] = False,
    context: Annotated[str | None, typer.Option("--context", help="kubectl's context, for --cluster.")] = None,
) -> None:
    """Say what is wrong in manifests or will hurt, with line and remedy.

    The exit code is 0 if there is nothing to say, 1 with findings, 2 if a file can't be read.
    """
    from cputrain.cluster import check as rules
    from cputrain.cluster.kubectl import Kubectl

    schemas = rules.of_cluster(Kubectl(context)) if cluster else None
    texts = {str(file): text_of(file) for file in files}
    count = 0
    for name, text in texts.items():
        for finding in rules.findings(text, schemas):
            count += 1
            place = f" ({finding.path})" if finding.path else ""
            print(f"{name}:{finding.line}: {finding.sentence}.{place}")
        for kind in rules.unchecked_kinds(text):
            print(f"{name}: {kind} is not a kind that cputrain checks.", file=sys.stderr)
    print(f"{count} findings." if count != 1 else "1 finding.", file=sys.stderr)
    raise typer.Exit(1 if count else 0)


def text_of(file: Path) -> str:
    if str(file) == "-":
        try:
            return sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise ValueError("standard input is not UTF-8 text.") from None
    return text_files.read(file)
