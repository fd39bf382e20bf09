"""Options that describe a job, of `k8s render`, `k8s submit` and `slurm render`, and the values that they make."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from cputrain import authentication, text_files
from cputrain.cli.app import setting
from cputrain.cli.recovery_options import RecoveryOptions
from cputrain.cluster.job import Job, SecretVariable, Toleration, Volume
from cputrain.launch import config_file
from cputrain.launch.config import Config


@dataclass(frozen=True)
class JobOptions(RecoveryOptions):
    """Options as they were given. Those that a Job has under the same name are passed on as they are."""

    image: str = setting("The image; `cputrain image` makes one. Needed.", "--image", default="")
    name: str | None = setting("The job's name; else the script's.", "--name")
    kind: str = setting(
        "Kubeflow's kind of job; auto: what the cluster has.",
        "--kind",
        metavar="pytorchjob|trainjob|mpijob|auto",
        default="pytorchjob",
    )
    embed: bool = setting(
        "Put the local file SCRIPT into a ConfigMap: an image with cputrain is enough.", "--embed-script", default=False
    )
    config: Path | None = setting("A file of `cputrain config`; options win over it.", "--config-file")
    workers: int | None = setting("Pods.", "--workers", metavar="N")
    elastic: str | None = setting("Fewest and most pods, of a pytorchjob.", "--elastic", metavar="LEAST:MOST")
    cpus: str = setting("CPUs of a pod, whole.", "--cpus", metavar="N", default="4")
    memory: str = setting("Memory of a pod.", "--memory", metavar="SIZE", default="16Gi")
    shared_memory: str | None = setting(
        "Size of /dev/shm; else an eighth of the memory, at most 8Gi.", "--shm", metavar="SIZE"
    )
    processes: int | None = setting("Processes of a pod; else one for every 64 CPUs.", "--processes", metavar="N")
    threads: int | None = setting("Threads of a process; else its share of the CPUs.", "--threads", metavar="N")
    communication: int | None = setting(
        "Cores of a process for communication; else 1 of 8 or more, with several pods.",
        "--cores-for-communication",
        metavar="N",
    )
    max_restarts: int | None = setting(
        "How often workers may start anew together; else 3 times.", "--max-restarts", metavar="N"
    )
    backoff_limit: int = setting("How often a failed pod is started anew.", "--backoff-limit", metavar="N", default=3)
    mpi: str = setting("The MPI of an mpijob.", "--mpi", metavar="openmpi|intel|mpich", default="openmpi")
    pvc: str | None = setting("The volume claim for data, caches and the trained model.", "--pvc", metavar="CLAIM")
    mount: str = setting("Where pods see the volume.", "--mount", metavar="FOLDER", default="/data")
    create_pvc: str | None = setting(
        "Make the claim, too, in a file of its own beside --out.", "--create-pvc", metavar="SIZE"
    )
    storage_class: str | None = setting("The storage class of a claim that is made.", "--storage-class")
    env: list[str] | None = setting("A variable for every process; may be repeated.", "--env", metavar="NAME=VALUE")
    secret_env: list[str] | None = setting(
        "A variable out of a Secret; may be repeated.", "--secret-env", metavar="NAME=SECRET/KEY"
    )
    preload: list[str] | None = setting(
        "A library for LD_PRELOAD, e.g. libtcmalloc.so.4.", "--preload", metavar="LIBRARY"
    )
    log_level: str = setting("LOGLEVEL of torch's agent.", "--log-level", default="INFO")
    namespace: str | None = setting("The namespace.", "--namespace", "-n")
    context: str | None = setting("kubectl's context, for --kind auto.", "--context")
    node_selector: list[str] | None = setting("Only nodes with this label.", "--node-selector", metavar="KEY=VALUE")
    toleration: list[str] | None = setting(
        "A taint that doesn't keep pods away.", "--toleration", metavar="KEY[=VALUE][:EFFECT]"
    )
    priority_class: str | None = setting("The priority class.", "--priority-class")
    service_account: str | None = setting("The service account.", "--service-account")
    pull_secrets: list[str] | None = setting("An image pull secret.", "--pull-secret", metavar="NAME")
    pull_policy: str = setting(
        "When nodes pull the image.", "--pull-policy", metavar="Always|IfNotPresent|Never", default="IfNotPresent"
    )
    network_policy: bool = setting(
        "A NetworkPolicy, too: only the job's own pods reach its ports.", "--network-policy", default=False
    )
    user: int = setting("The number of the user that pods run as, not 0.", "--user", metavar="NUMBER", default=1000)

    def job(self, script: str, arguments: list[str]) -> Job:
        """The checked job; with `--kind auto` the cluster is asked."""
        if not self.image:
            raise ValueError("--image is missing: `cputrain image` writes a Dockerfile for one.")
        bounds = least_and_most(self.elastic) if self.elastic else None
        said = _configured(self.config, self.workers is not None or bounds is not None)
        same = {name: value for name, value in vars(self).items() if name in Job.__dataclass_fields__}
        # Options win over the file, and what neither says is the job's default.
        same |= {name: said.get(name) for name, value in same.items() if value is None}
        same["max_restarts"] = Job.max_restarts if same["max_restarts"] is None else same["max_restarts"]
        variables = dict(said.get("environment", ())) | dict(assignments(self.env or (), "--env"))
        made = {
            "name": name_of(script) if self.name is None else self.name,
            "kind": self._chosen_kind(bounds is not None),
            "workers": self.workers if self.workers is not None else bounds[1] if bounds else said.get("workers", 1),
            "elastic": bounds,
            "volume": self._volume(),
            "environment": tuple(variables.items()),
            "secrets": tuple(map(_secret, self.secret_env or ())),
            "preload": tuple(self.preload or ()),
            "launch_options": said.get("launch_options", ()),
            "pull_secrets": tuple(self.pull_secrets or ()),
            "node_selector": assignments(self.node_selector or (), "--node-selector"),
            "tolerations": tuple(map(_toleration, self.toleration or ())),
            "script_text": text_files.read(Path(script)) if self.embed else None,
            "recovery": tuple(self.variables().items()),
            "rendezvous": uuid4().hex[:8],
            "token": authentication.new_token(),
        }
        return Job(script=script, arguments=tuple(arguments), **{**same, **made})

    def _chosen_kind(self, elastic: bool) -> str:
        from cputrain.cluster import kinds
        from cputrain.cluster.kubectl import Kubectl

        if self.kind != "auto":
            return self.kind
        kind, reason = kinds.choose(Kubectl(self.context, self.namespace), elastic)
        print(f"cputrain: --kind {kind}: {reason}", file=sys.stderr)
        return kind

    def _volume(self) -> Volume | None:
        if self.pvc is None:
            if self.create_pvc or self.storage_class:
                raise ValueError("--create-pvc and --storage-class need the claim's name: give --pvc NAME.")
            return None
        if self.storage_class and not self.create_pvc:
            raise ValueError("--storage-class is for a claim that is made: give --create-pvc SIZE, too.")
        return Volume(self.pvc, self.mount, self.create_pvc, self.storage_class)


def _configured(path: Path | None, size_is_given: bool) -> dict[str, Any]:
    """What a file of `cputrain config` says about a cluster: machines are pods, and the rest is launch's."""
    if path is None:
        return {}
    config = config_file.read(path)
    if config.hostfile and not size_is_given:
        raise ValueError(f"{path} names the hostfile {config.hostfile}, and a cluster has none: give --workers.")
    found: dict[str, Any] = {
        "workers": config.num_machines,
        "processes": config.ppn or config.num_processes // config.num_machines,
        "communication": config.cores_for_communication or None,
        "environment": assignments(config.env, f"env in {path}"),
    }
    if config_file.says(str(path), "max_restarts"):
        found["max_restarts"] = config.max_restarts
    words = ["--mixed_precision", config.mixed_precision] if config.mixed_precision != "no" else []
    words += [] if config.ipex else ["--no-ipex"]
    for name in ("allocator", "log_dir", "grad_compression", "balance"):
        value = getattr(config, name)
        words += [f"--{name}", value] if value != getattr(Config, name) else []
    return {**found, "launch_options": tuple(words)}


def assignments(texts: Iterable[str], option: str) -> tuple[tuple[str, str], ...]:
    """`NAME=value`; the value may hold anything, `=` too."""
    return tuple(_groups(r"([^=]+)=(.*)", text, f"{option} must be NAME=value") for text in texts)


def _secret(text: str) -> SecretVariable:
    return SecretVariable(*_groups(r"([^=]+)=([^/]+)/(.+)", text, "--secret-env must be NAME=secret/key"))


def _toleration(text: str) -> Toleration:
    form = "--toleration must be key, key:Effect or key=value:Effect"
    return Toleration(*_groups(r"([^=:]+)(?:=([^:]*))?(?::([A-Za-z]+))?", text, form))


def _groups(pattern: str, text: str, form: str) -> tuple[Any, ...]:
    found = re.fullmatch(pattern, text, re.DOTALL)
    if not found:
        raise ValueError(f"{form}, found {text!r}.")
    return found.groups()


def least_and_most(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text, re.ASCII)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"--elastic must be LEAST:MOST such as 1:4, found {text!r}.")
    return int(found[1]), int(found[2])


def name_of(script: str) -> str:
    """A job's name after its script: `examples/run_qa.py` → `run-qa`."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}".rstrip("-"))[:40].rstrip("-")
