"""`cputrain k8s submit|status|logs|delete|copy`: what needs a cluster, through the user's kubectl."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain.cli.app import Command, command
from cputrain.cli.job_options import JobOptions, option
from cputrain.cli.k8s import app, text_of
from cputrain.cli.option_fields import with_fields
from cputrain.launch.processes import sigterm_interrupts

Name = Annotated[str, typer.Argument(help="The job's name.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="The namespace; else kubectl's.")]
Context = Annotated[str | None, typer.Option("--context", help="kubectl's context; else its current one.")]
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
DELETE_EXAMPLES = "cputrain k8s delete run-qa"
COPY_EXAMPLES = "cputrain k8s copy run-qa /data/output ./trained"
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
    from cputrain.cluster import submission

    kubectl = _kubectl(options.context, options.namespace)
    texts = _rendered(options, words) if ctx.meta["script"] else _read(ctx, words)
    documents = submission.documents_of(texts, lambda line: print(line, file=sys.stderr))
    print("To be created:", ", ".join(map(submission.called, documents)), flush=True)
    submission.submit(kubectl, documents, print)
    jobs = [document for document in documents if document["kind"] in ("PyTorchJob", "TrainJob", "MPIJob")]
    if wait and jobs:
        name, within = jobs[0]["metadata"]["name"], jobs[0]["metadata"].get("namespace")
        raise typer.Exit(_follow(_kubectl(options.context, options.namespace or within), name))


def _rendered(options: JobOptions, words: list[str]) -> dict[str, str]:
    from cputrain.cluster import manifests

    job = options.job(words[0], words[1:])
    volume = {"the volume": manifests.volume_text(job)} if job.volume and job.volume.size else {}
    return {"the job": manifests.job_text(job), **volume}


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
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow it until the job ends.")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show a job's pods, and in words why they don't train. With --watch the exit code is 1 if the job fails."""
    from rich.console import Console

    from cputrain.cluster import status as states

    kubectl = _kubectl(context, namespace)
    if watch:
        raise typer.Exit(_follow(kubectl, name))
    Console().print(states.table(states.read(kubectl, name)))


@command(app, LOGS_EXAMPLES)
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the pod ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Only what this rank wrote; else rank 0's pod.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Show what a rank or its pod wrote. All ranks of an mpijob write through its launcher."""
    from cputrain.cluster import cluster_job

    kubectl = _kubectl(context, namespace)
    job = cluster_job.find(kubectl, name)
    pod = cluster_job.pod_of(job, cluster_job.pods(kubectl, job), rank or 0)
    command = kubectl.command("logs", pod, *(["--follow"] if follow else []))
    if rank is not None and cluster_job.holds_several(job):
        raise typer.Exit(cluster_job.show_log(command, rank, lambda line: print(line, end="", flush=True)))
    sys.stdout.flush()
    os.execv(command[0], command)


@command(app, DELETE_EXAMPLES)
def delete(
    name: Name,
    with_data: Annotated[
        bool, typer.Option("--with-data", help="Delete the volume claims, too, with all that was trained.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Delete a job with its pods, script and runtime. The volume stays, unless --with-data is given."""
    from cputrain.cluster import cluster_job

    kubectl, job, templates = _with_templates(name, context, namespace)
    named = sorted({claim for template in templates for claim, _ in cluster_job.claims(template)})
    claims = [claim for claim in named if cluster_job.has_claim(kubectl, claim)]
    group = str(job.value["apiVersion"]).partition("/")[0]
    kubectl.run("delete", f"{job.kind.lower()}s.{group}", name)
    ours = f"--selector=app.kubernetes.io/managed-by=cputrain,app.kubernetes.io/instance={name}"
    resources = "configmaps" + (",trainingruntimes.trainer.kubeflow.org" if job.kind == "TrainJob" else "")
    kubectl.run("delete", resources, ours)
    print(f"deleted {job.kind} {name}")
    for resource in ("secrets", "networkpolicies.networking.k8s.io"):
        _delete_if_allowed(kubectl, resource, ours)
    for claim in claims:
        if with_data:
            kubectl.run("delete", "persistentvolumeclaims", claim)
            print(f"deleted the volume claim {claim} with its data")
        else:
            print(f"the volume claim {claim} stays with its data")


def _delete_if_allowed(kubectl: Any, resource: str, ours: str) -> None:
    """Who may not create these had none of them in the job."""
    from cputrain.cluster.kubectl import Refused

    try:
        kubectl.run("delete", resource, ours)
    except Refused as refusal:
        if refusal.reason not in ("Forbidden", "NotFound"):
            raise
        print(f"{resource} were not looked for: {refusal}", file=sys.stderr)


@command(app, COPY_EXAMPLES)
def copy(
    name: Name,
    source: Annotated[str, typer.Argument(help="A folder on the volume, as the pods see it, e.g. /data/output.")],
    target: Annotated[Path, typer.Argument(help="Where to put it here; must not exist yet.")],
    patience: Annotated[
        int, typer.Option("--timeout", metavar="SECONDS", help="Seconds to wait for the reader pod.")
    ] = 300,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Copy a trained model from a job's volume: a pod that may only read it is made, and removed in any case."""
    from cputrain.cluster import cluster_job, copying

    kubectl, _, templates = _with_templates(name, context, namespace)
    found = [pair for template in templates for pair in cluster_job.claims(template)]
    chosen = [(claim, mount) for claim, mount in found if f"{source}/".startswith(f"{mount.rstrip('/')}/")]
    if not chosen:
        mounts = ", ".join(mount for _, mount in found) or "none"
        raise ValueError(f"{source} is on no volume of {name}: its volumes are mounted at: {mounts}.")
    claim, mount = max(chosen, key=lambda pair: len(pair[1]))
    path = source.removeprefix(mount.rstrip("/")).strip("/")
    with sigterm_interrupts():  # so that the reader pod is removed then, too
        count = copying.copy(kubectl, claim, path, target, templates[-1]["spec"], patience)
    print(f"{count} files are in {target}")


def _with_templates(name: str, context: str | None, namespace: str | None) -> tuple[Any, Any, list[dict[str, Any]]]:
    """kubectl, the job on the cluster, and the templates of its pods."""
    from cputrain.cluster import cluster_job

    kubectl = _kubectl(context, namespace)
    job = cluster_job.find(kubectl, name)
    return kubectl, job, cluster_job.templates(kubectl, job)


def _kubectl(context: str | None, namespace: str | None) -> Any:
    from cputrain.cluster import names
    from cputrain.cluster.kubectl import Kubectl

    if namespace is not None:
        names.label_1123(namespace, "the namespace")
    return Kubectl(context, namespace)


def _follow(kubectl: Any, name: str) -> int:
    """A live table until the job ends; a connection that drops is waited for."""
    from rich.console import Console
    from rich.live import Live

    from cputrain.cluster import status as states
    from cputrain.cluster.kubectl import Refused

    console, failures = Console(), 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                found = states.read(kubectl, name)
                failures = 0
            except Refused as refusal:
                failures += 1
                if refusal.reason != "Unreachable" or failures > _PATIENCE:
                    raise
                time.sleep(_PAUSE)
                continue
            live.update(states.table(found), refresh=True)
            if found.job.is_over:
                return 0 if found.job.state == "Succeeded" else 1
            time.sleep(_PAUSE)
