"""`cputrain k8s …`: a training on Kubernetes, from manifest to trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Train on a Kubernetes cluster with Kubeflow: write the job, check it, submit it, follow it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WHAT = "What to train"
_SIZE = "How much of the cluster"
_DATA = "Data and variables"
_PLACE = "Where pods run"
_OUT = "Output"


def _option(text: str, *names: str, panel: str | None = None, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=True)


@app.command(context_settings={"allow_interspersed_args": False})
def render(
    script: Annotated[str, typer.Argument(help="The script, as the image has it.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    image: Annotated[str, _option("The image; `cputrain image` makes one.", "--image", panel=_WHAT)] = "",
    name: Annotated[str | None, _option("The job's name; else the script's.", "--name", panel=_WHAT)] = None,
    kind: Annotated[
        str, _option("pytorchjob, trainjob, mpijob, or auto: what the cluster has.", "--kind", panel=_WHAT)
    ] = "pytorchjob",
    embed: Annotated[
        bool,
        _option(
            "Put the local file SCRIPT into a ConfigMap: an image with cputrain is enough.",
            "--embed-script",
            panel=_WHAT,
        ),
    ] = False,
    config: Annotated[
        Path | None, _option("A file of `cputrain config`; options win over it.", "--config-file", panel=_WHAT)
    ] = None,
    workers: Annotated[int | None, _option("Pods.", "--workers", panel=_SIZE)] = None,
    elastic: Annotated[
        str | None, _option("Fewest and most pods, of a pytorchjob.", "--elastic", panel=_SIZE, metavar="LEAST:MOST")
    ] = None,
    cpus: Annotated[str, _option("CPUs of a pod, whole.", "--cpus", panel=_SIZE)] = "4",
    memory: Annotated[str, _option("Memory of a pod.", "--memory", panel=_SIZE)] = "16Gi",
    shm: Annotated[
        str | None, _option("Size of /dev/shm; else an eighth of the memory, at most 8Gi.", "--shm", panel=_SIZE)
    ] = None,
    processes: Annotated[
        int | None, _option("Processes of a pod; else one for every 64 CPUs.", "--processes", panel=_SIZE)
    ] = None,
    threads: Annotated[
        int | None, _option("Threads of a process; else its share of the CPUs.", "--threads", panel=_SIZE)
    ] = None,
    communication: Annotated[
        int | None,
        _option(
            "Cores of a process for communication; else 1 of 8 or more, with several pods.",
            "--cores-for-communication",
            panel=_SIZE,
        ),
    ] = None,
    max_restarts: Annotated[
        int, _option("How often workers may start anew together.", "--max-restarts", panel=_SIZE)
    ] = 3,
    backoff_limit: Annotated[
        int, _option("How often a failed pod is started anew.", "--backoff-limit", panel=_SIZE)
    ] = 3,
    mpi: Annotated[str, _option("openmpi, intel or mpich, of an mpijob.", "--mpi", panel=_SIZE)] = "openmpi",
    pvc: Annotated[
        str | None, _option("The volume claim for data, caches and the trained model.", "--pvc", panel=_DATA)
    ] = None,
    mount: Annotated[str, _option("Where pods see it.", "--mount", panel=_DATA)] = "/data",
    create_pvc: Annotated[
        str | None,
        _option("Make the claim, too, in a file of its own beside --out.", "--create-pvc", panel=_DATA, metavar="SIZE"),
    ] = None,
    storage_class: Annotated[str | None, _option("Its storage class.", "--storage-class", panel=_DATA)] = None,
    env: Annotated[list[str] | None, _option("A variable.", "--env", panel=_DATA, metavar="NAME=VALUE")] = None,
    secret_env: Annotated[
        list[str] | None,
        _option("A variable out of a Secret.", "--secret-env", panel=_DATA, metavar="NAME=SECRET/KEY"),
    ] = None,
    preload: Annotated[
        list[str] | None, _option("A library for LD_PRELOAD, e.g. libtcmalloc.so.4.", "--preload", panel=_DATA)
    ] = None,
    log_level: Annotated[str, _option("LOGLEVEL of torch's agent.", "--log-level", panel=_DATA)] = "INFO",
    namespace: Annotated[str | None, _option("The namespace.", "--namespace", "-n", panel=_PLACE)] = None,
    context: Annotated[str | None, _option("kubectl's context, for --kind auto.", "--context", panel=_PLACE)] = None,
    node_selector: Annotated[
        list[str] | None, _option("Only nodes with this label.", "--node-selector", panel=_PLACE, metavar="KEY=VALUE")
    ] = None,
    toleration: Annotated[
        list[str] | None,
        _option("A taint that doesn't keep pods away.", "--toleration", panel=_PLACE, metavar="KEY[=VALUE][:EFFECT]"),
    ] = None,
    priority: Annotated[str | None, _option("The priority class.", "--priority-class", panel=_PLACE)] = None,
    service_account: Annotated[str | None, _option("The service account.", "--service-account", panel=_PLACE)] = None,
    pull_secret: Annotated[list[str] | None, _option("An image pull secret.", "--pull-secret", panel=_PLACE)] = None,
    pull_policy: Annotated[
        str, _option("Always, IfNotPresent or Never.", "--pull-policy", panel=_PLACE)
    ] = "IfNotPresent",
    user: Annotated[int, _option("The number of the user that pods run as, not 0.", "--user", panel=_PLACE)] = 1000,
    out: Annotated[
        Path | None, _option("Write there instead of to standard output.", "--out", "-o", panel=_OUT)
    ] = None,
) -> None:
    """Write the manifests of a job: what stands after the options is the script and its arguments."""
    from uuid import uuid4

    from cputrain.cluster import kubectl, options
    from cputrain.cluster.job import Job, Volume

    if not image:
        raise ValueError("--image is missing: `cputrain image` writes a Dockerfile for one.")
    bounds = options.least_and_most(elastic) if elastic else None
    said = _configured(config, bounds is not None)
    if kind == "auto":
        kind, reason = kubectl.training_kind(kubectl.Kubectl(context, namespace), bounds is not None)
        print(f"cputrain: --kind {kind}: {reason}", file=sys.stderr)
    job = Job(
        name=options.name_of(script) if name is None else name,
        image=image,
        script=script,
        arguments=tuple(arguments or ()),
        kind=kind,
        namespace=namespace,
        workers=workers if workers is not None else bounds[1] if bounds else said.get("workers", 1),
        elastic=bounds,
        max_restarts=max_restarts,
        backoff_limit=backoff_limit,
        cpus=cpus,
        memory=memory,
        shared_memory=shm,
        processes=processes if processes is not None else said.get("processes"),
        threads=threads,
        communication=communication,
        mpi=mpi,
        volume=_volume(Volume, pvc, mount, create_pvc, storage_class),
        environment=(*said.get("environment", ()), *options.assignments(env or (), "--env")),
        secrets=options.secrets(secret_env or ()),
        preload=tuple(preload or ()),
        log_level=log_level,
        launch_options=said.get("launch_options", ()),
        pull_policy=pull_policy,
        pull_secrets=tuple(pull_secret or ()),
        node_selector=options.assignments(node_selector or (), "--node-selector"),
        tolerations=options.tolerations(toleration or ()),
        priority_class=priority,
        service_account=service_account,
        user=user,
        script_text=_script_text(script) if embed else None,
        rendezvous=uuid4().hex[:8],
    )
    _write(job, out)


def _volume(make: Any, claim: str | None, mount: str, size: str | None, storage_class: str | None) -> Any:
    if claim is None:
        if size or storage_class:
            raise ValueError("--create-pvc and --storage-class need the claim's name: give --pvc NAME.")
        return None
    if storage_class and not size:
        raise ValueError("--storage-class is for a claim that is made: give --create-pvc SIZE, too.")
    return make(claim, mount, size, storage_class)


def _configured(path: Path | None, elastic: bool) -> dict[str, Any]:
    """What a file of `cputrain config` says about a cluster: machines are pods, and the rest is launch's."""
    from cputrain.launch import config_file

    if path is None:
        return {}
    config = config_file.read(path)
    found: dict[str, Any] = {
        "workers": config.num_machines,
        "processes": config.num_processes // config.num_machines,
    }
    if elastic:  # torchrun knows no such options: the variables that launch would set
        variables = {"ACCELERATE_MIXED_PRECISION": config.mixed_precision, "CPUTRAIN_IPEX": str(config.ipex).lower()}
        return {**found, "environment": tuple(variables.items())}
    words = ["--mixed_precision", config.mixed_precision] if config.mixed_precision != "no" else []
    return {**found, "launch_options": (*words, *(() if config.ipex else ("--no-ipex",)))}


def _script_text(script: str) -> str:
    from cputrain.cluster.manifest_reader import read_text

    return read_text(Path(script))


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
        try:
            path.write_text(content)
        except OSError as error:
            raise ValueError(f"{path} can't be written: {error.strerror}.") from None
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
    from cputrain.cluster.manifest_reader import read_text

    if str(file) == "-":
        try:
            return sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise ValueError("standard input is not UTF-8 text.") from None
    return read_text(file)
