"""`cputrain k8s …`: a training on a Kubernetes cluster: written, checked, submitted, followed."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain import text_files
from cputrain.cli.app import Command, command, new_app, option, with_fields
from cputrain.cli.job_options import JobOptions
from cputrain.cli.terminal import on_a_terminal
from cputrain.cluster import syntax
from cputrain.cluster.kubectl import Kubectl, Refused
from cputrain.cluster.manifest import SEVERITIES
from cputrain.launch.processes import sigterm_interrupts

app = new_app(
    help="Train on a Kubernetes cluster with Kubeflow: write the job, check it, submit it, follow it.",
    epilog="""
        cputrain k8s render --image me/train:1 -o job.yaml -- run_qa.py --do_train
        cputrain k8s check job.yaml
        cputrain k8s submit job.yaml
        cputrain k8s status run-qa --watch
    """,
)
RENDER_EXAMPLES = """
    cputrain k8s render --image me/train:1 -o job.yaml -- run_qa.py --do_train
    cputrain k8s render --image me/train:1 --kind trainjob --workers 4 --cpus 16 \\
        --pvc models --create-pvc 50Gi -o job.yaml -- run_qa.py --do_train
"""
CHECK_EXAMPLES = """
    cputrain k8s check job.yaml
    kubectl get pytorchjob run-qa -o yaml | cputrain k8s check -
"""


@command(app, RENDER_EXAMPLES, allow_interspersed_args=False)
@with_fields
def render(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as the image has it.")],
    options: JobOptions,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    out: Annotated[
        Path | None, option("Write there instead of to standard output.", "--out", "-o", metavar="FILE")
    ] = None,
) -> None:
    """Write the manifests of a job: what stands after the options is the script and its arguments."""
    from cputrain.cluster import render

    job = options.job(script, arguments or [])
    text, volume = render.job_text(job), render.volume_text(job)
    if out is None:
        if volume:
            raise ValueError("--create-pvc writes a file of its own, so that the job's never deletes data: give --out.")
        print(text, end="")
        return
    text_files.write(out, text, private=job.makes_token)  # a Secret stands in it
    names = [str(out)]
    if volume:
        names.append(str(out.with_name(f"{out.stem}-volume{out.suffix or '.yaml'}")))
        text_files.write(Path(names[1]), volume)
    print(f"Written: {' and '.join(names)}. Next: cputrain k8s submit {' '.join(reversed(names))}")


@command(app, CHECK_EXAMPLES)
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Manifests; - is standard input.")],
    cluster: Annotated[
        bool, option("Ask the cluster for its schemas, instead of those that are shipped.", "--cluster")
    ] = False,
    context: Annotated[str | None, option("kubectl's context, for --cluster.", "--context")] = None,
    fail_on: Annotated[
        str, option("The mildest that makes the exit code 1: see above.", "--fail-on", metavar="SEVERITY")
    ] = "error",
    as_json: Annotated[bool, option("For programs: all findings as one JSON object.", "--json")] = False,
) -> None:
    """Say what is wrong in manifests or will hurt, with line and remedy.

    An error is refused by the cluster or can't work; a warning starts, but won't do what is meant; a hint could be
    faster or safer. Files that are given together are seen together: a job, its volume, its runtime.

    The exit code is 0 if nothing is as grave as --fail-on (error, warning or hint), 1 with such findings, 2 if a file
    can't be read or has a kind that isn't known here.
    """
    from cputrain.cluster import check as rules

    if fail_on not in SEVERITIES:
        raise ValueError(f"--fail-on must be one of {', '.join(SEVERITIES)}, found {fail_on!r}.")
    schemas = rules.of_cluster(Kubectl(context)) if cluster else None
    texts = {str(file): text_of(file) for file in files}
    found = rules.of_files(texts, schemas)
    unknown = {name: rules.unknown_kinds(text) for name, text in texts.items()}
    (_as_json if as_json else _as_lines)(found, unknown)
    grave = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    failed = any(finding.severity in grave for findings in found.values() for finding in findings)
    raise typer.Exit(2 if any(unknown.values()) else 1 if failed else 0)


def _as_lines(found: dict[str, list[Any]], unknown: dict[str, list[Any]]) -> None:
    for name, findings in found.items():
        for finding in findings:
            place = f" ({finding.path})" if finding.path else ""
            stop = "" if finding.sentence.endswith("?") else "."
            begin = f"{name}:{finding.line}: {finding.severity}: "
            print(on_a_terminal(begin, f"{finding.sentence}{stop}{place}", indent=4))
        for each in unknown[name]:
            print(f"{name}:{each.line}: {each.sentence}", file=sys.stderr)
    counts = [f"{count} {word}{'' if count == 1 else 's'}" for word, count in _counts(found).items()]
    print(f"{', '.join(counts)}.", file=sys.stderr)


def _as_json(found: dict[str, list[Any]], unknown: dict[str, list[Any]]) -> None:
    rows = [{"file": name, **asdict(finding)} for name, findings in found.items() for finding in findings]
    others = [{"file": name, **asdict(each)} for name, kinds in unknown.items() for each in kinds]
    print(json.dumps({"counts": _counts(found), "findings": rows, "unknown_kinds": others}, indent=2))


def _counts(found: dict[str, list[Any]]) -> dict[str, int]:
    said = [finding.severity for findings in found.values() for finding in findings]
    return {severity: said.count(severity) for severity in SEVERITIES}


def text_of(file: Path) -> str:
    if str(file) == "-":
        try:
            return sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise ValueError("standard input is not UTF-8 text.") from None
    return text_files.read(file)


Name = Annotated[str, typer.Argument(help="The job's name.")]
Namespace = Annotated[str | None, option("The namespace; else kubectl's.", "--namespace", "-n")]
Context = Annotated[str | None, option("kubectl's context; else its current one.", "--context")]
SUBMIT_EXAMPLES = """
    cputrain k8s submit job.yaml
    cputrain k8s submit --image me/train:1 --wait -- run_qa.py --do_train
"""
STATUS_EXAMPLES = """
    cputrain k8s status run-qa
    cputrain k8s status run-qa --watch
"""
LOGS_EXAMPLES = """
    cputrain k8s logs run-qa --follow
    cputrain k8s logs run-qa --rank 3
"""
_PAUSE = 2.0  # seconds between two looks
_PATIENCE = 30  # looks in a row that may fail: a minute of a connection that drops


class _FilesOrScript(Command):
    """Remembers whether `--` was given: then the words are a script and its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["script"] = "--" in args
        return super().parse_args(ctx, args)


@command(app, SUBMIT_EXAMPLES, _FilesOrScript)
@with_fields
def submit(
    ctx: typer.Context,
    options: JobOptions,
    words: Annotated[
        list[str], typer.Argument(metavar="FILES", help="Manifests (- is standard input), or -- SCRIPT ARGUMENTS.")
    ],
    wait: Annotated[bool, option("Follow the job until it ends.", "--wait")] = False,
) -> None:
    """Check manifests, show what will be created, and create it: all of it or nothing.

    With `-- SCRIPT ARGUMENTS` the manifests are those that `render` would write, with the same options.
    """
    from cputrain.cluster import kinds, submission

    kubectl = _kubectl(options.context, options.namespace)
    texts = _rendered(options, words) if ctx.meta["script"] else _read(ctx, words)
    documents = submission.documents_of(texts, lambda line: print(line, file=sys.stderr))
    print("To be created:", ", ".join(map(submission.called, documents)), flush=True)
    submission.submit(kubectl, documents, print)
    jobs = [document for document in documents if document["kind"] in kinds.NAMES]
    if wait and jobs:
        namespace = options.namespace or jobs[0]["metadata"].get("namespace")
        raise typer.Exit(_follow(_kubectl(options.context, namespace), jobs[0]["metadata"]["name"]))


def _rendered(options: JobOptions, words: list[str]) -> dict[str, str]:
    from cputrain.cluster import render

    job = options.job(words[0], words[1:])
    texts = {"the job": render.job_text(job), "the volume": render.volume_text(job)}
    return {name: text for name, text in texts.items() if text}


def _read(ctx: typer.Context, words: list[str]) -> dict[str, str]:
    """Files; options that would describe a job can't change them."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source and source.name == "COMMANDLINE" and parameter.name not in ("words", "wait", "namespace", "context"):
            raise ValueError(f"{parameter.opts[0]} is for a job that is made here: give -- SCRIPT ARGUMENTS after it.")
    return {word: text_of(Path(word)) for word in words}


@command(app, STATUS_EXAMPLES)
def status(
    name: Name,
    watch: Annotated[bool, option("Follow it until the job ends.", "--watch", "-w")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show a job's pods, and in words why they don't train. With --watch the exit code is 1 if the job fails."""
    from rich.console import Console

    from cputrain.cluster import cluster_job

    kubectl = _kubectl(context, namespace)
    if watch:
        raise typer.Exit(_follow(kubectl, name))
    Console().print(cluster_job.status_table(cluster_job.status_of(kubectl, name)))


@command(app, LOGS_EXAMPLES)
def logs(
    name: Name,
    follow: Annotated[bool, option("Go on until the pod ends.", "--follow", "-f")] = False,
    rank: Annotated[int | None, option("Only what this rank wrote; else rank 0's pod.", "--rank")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show what a rank or its pod wrote. All ranks of an mpijob write through its launcher."""
    from cputrain.cluster import cluster_job

    kubectl = _kubectl(context, namespace)
    job = cluster_job.find(kubectl, name)
    pod = job.pod_of_rank(cluster_job.pods(kubectl, job), rank or 0)
    command = kubectl.command("logs", pod, *(["--follow"] if follow else []))
    if rank is not None and job.shares_logs:
        raise typer.Exit(cluster_job.show_log(command, rank, lambda line: print(line, end="", flush=True)))
    sys.stdout.flush()
    os.execv(command[0], command)


@command(app, "cputrain k8s delete run-qa")
def delete(
    name: Name,
    with_data: Annotated[
        bool, option("Delete the volume claims, too, with all that was trained.", "--with-data")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Delete a job with its pods, script and runtime. The volume stays, unless --with-data is given."""
    from cputrain.cluster import submission

    kubectl = _kubectl(context, namespace)
    submission.delete(kubectl, name, with_data, print, lambda line: print(line, file=sys.stderr))


@command(app, "cputrain k8s copy run-qa /data/output ./trained")
def copy(
    name: Name,
    source: Annotated[str, typer.Argument(help="A folder on the volume, as the pods see it, e.g. /data/output.")],
    target: Annotated[Path, typer.Argument(help="Where to put it here; must not exist yet.")],
    patience: Annotated[int, option("Seconds to wait for the reader pod.", "--timeout", metavar="SECONDS")] = 300,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Copy a trained model from a job's volume: a pod that may only read it is made, and removed in any case."""
    from cputrain.cluster import cluster_job, copying

    kubectl = _kubectl(context, namespace)
    pods = cluster_job.find(kubectl, name).pod_specs(kubectl)
    found = [pair for pod in pods for pair in cluster_job.claims(pod)]
    chosen = [(claim, mount) for claim, mount in found if f"{source}/".startswith(f"{mount.rstrip('/')}/")]
    if not chosen:
        mounts = ", ".join(mount for _, mount in found) or "none"
        raise ValueError(f"{source} is on no volume of {name}: its volumes are mounted at: {mounts}.")
    claim, mount = max(chosen, key=lambda pair: len(pair[1]))
    path = source.removeprefix(mount.rstrip("/")).strip("/")
    with sigterm_interrupts():  # so that the reader pod is removed then, too
        count = copying.copy(kubectl, claim, path, target, pods[-1], patience)
    print(f"{count} files are in {target}")


def _kubectl(context: str | None, namespace: str | None) -> Kubectl:
    if namespace is not None:
        syntax.label_1123(namespace, "the namespace")
    return Kubectl(context, namespace)


def _follow(kubectl: Kubectl, name: str) -> int:
    """A live table until the job ends; a connection that drops is waited for."""
    from rich.console import Console
    from rich.live import Live

    from cputrain.cluster import cluster_job

    console, failures = Console(), 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                found, failures = cluster_job.status_of(kubectl, name), 0
                live.update(cluster_job.status_table(found), refresh=True)
                if found.job.is_over:
                    return 0 if found.job.state == "Succeeded" else 1
            except Refused as refusal:
                failures += 1
                if refusal.reason != "Unreachable" or failures > _PATIENCE:
                    raise
            time.sleep(_PAUSE)
