"""MPIJob, kubeflow.org/v2beta1: a Launcher that runs mpirun, and Workers that run an sshd without root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cputrain.cluster import pod
from cputrain.cluster.check_command import COUNT, MPIRUN, Word, calls, option, place, words
from cputrain.cluster.containers import Container, Manifest, check_replicas, check_restarts, of_replicas
from cputrain.cluster.job import HOME, MPI, Job
from cputrain.cluster.manifest import Noted, Problem, Where, mapping, plain, warning, within

API, KIND = "kubeflow.org/v2beta1", "MPIJob"
POD_LABEL = "training.kubeflow.org/job-name"
ONE_LOG = True
RENDERED_BESIDE: tuple[str, ...] = ()
PODS: tuple[tuple[str, ...], ...] = (("mpiReplicaSpecs", "Worker", "replicas"),)
PROCESSES: tuple[str, ...] = ("slotsPerWorker",)
SSH_PORT = 2222
# Not /root/.ssh: there the operator gives the key a mode that only root can read.
SSH_FOLDER = f"{HOME}/.ssh"
# Options of mpirun by which the slots of the operator's hostfile don't count: more ranks than slots on purpose,
# another list of hosts, a number of hosts that changes.
_OWN_PLACES = (
    "--oversubscribe", "-oversubscribe", "--hostfile", "-hostfile", "-f", "--host", "-host", "-H",
    "--host-discovery-script", "-ppn", "-N",
)  # fmt: skip
_WITH_TWO_VALUES = ("mca", "gmca", "prtemca", "pmixmca", "genv", "env")
_WITHOUT_VALUE = (
    "allow-run-as-root", "oversubscribe", "tag-output", "timestamp-output", "report-bindings", "display-map", "v",
    "verbose", "q", "l", "nolocal", "bynode", "byslot", "print-all-exitcodes", "prepend-rank", "genvall", "envall",
)  # fmt: skip


def documents(job: Job) -> list[dict[str, Any]]:
    uncounted = "without it 6; preemptions count, too: an MPIJob can't tell them from failures of the training"
    spec = {
        "mpiImplementation": MPI[job.mpi],
        "slotsPerWorker": job.sizing.processes,
        "sshAuthMountPath": Noted(SSH_FOLDER, "the default, /root/.ssh, is for root only"),
        "launcherCreationPolicy": Noted("WaitForWorkersReady", "mpirun doesn't wait for an sshd that isn't there yet"),
        "runPolicy": {
            "cleanPodPolicy": Noted("Running", "the workers' sshd never ends by itself"),
            "backoffLimit": Noted(job.backoff_limit, uncounted),
        },
        "mpiReplicaSpecs": {"Launcher": _launcher(job), "Worker": _worker(job)},
    }
    return [{"apiVersion": API, "kind": KIND, "metadata": pod.metadata(job), "spec": spec}]


def _launcher(job: Job) -> dict[str, Any]:
    variables = pod.variables(job)
    forwarded = ",".join(row["name"] for row in plain(variables))
    amounts = {"cpu": "1", "memory": "1Gi"}
    container = {
        **pod.container(job, "launcher", with_data=False),
        "command": ["python3", "-m", "cputrain.cluster.mpi_launcher"],
        "args": [f"--mpi={job.mpi}", f"--forward={forwarded}", "--", *pod.COMMAND, *pod.arguments(job)],
        "env": Noted(variables, "ranks are started by sshd, which passes none of its own variables on: mpirun does"),
        "resources": {"limits": dict(amounts), "requests": amounts},
    }
    return {
        "replicas": 1,
        "restartPolicy": Noted("Never", "a launcher that fails is made anew, and the old one's log stays"),
        "template": pod.template(job, container, with_data=False),
    }


def _worker(job: Job) -> dict[str, Any]:
    container = {
        **pod.container(job, "worker"),
        "command": ["/usr/sbin/sshd"],
        "args": Noted(sshd_arguments(), "all settings here, none from the image; a port that needs no capability"),
        "ports": [{"containerPort": SSH_PORT, "name": "ssh"}],
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2},
        "resources": pod.resources(job),
    }
    return {"replicas": job.workers, "restartPolicy": "OnFailure", "template": pod.template(job, container)}


def sshd_arguments() -> list[str]:
    """The Secret's key is the host key too, so that the launcher knows every host by it."""
    options = {
        "AuthorizedKeysFile": f"{SSH_FOLDER}/authorized_keys",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        # The Secret's files belong to root and are readable for the group: right here, and refused by strict modes.
        "StrictModes": "no",
        "PidFile": "none",
        "MaxStartups": "1000",
    }
    words = ["-D", "-e", "-f", "/dev/null", "-p", str(SSH_PORT), "-h", f"{SSH_FOLDER}/id_rsa"]
    return words + [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def pods_with_logs(spec: dict[str, Any], pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All ranks write through the launcher. The last one counts: a launcher that failed is followed by another."""
    started = [pod for pod in pods if "-launcher" in pod["metadata"]["name"]]
    return sorted(started, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))[-1:]


def containers(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Container]:
    return of_replicas(manifest, "mpiReplicaSpecs", "mpi")


def problems(manifest: Manifest, others: Sequence[Manifest] = ()) -> Iterator[Problem]:
    spec = mapping(manifest.get("spec"))
    yield from _webhook(spec)
    # Its launcher is a Job of Kubernetes' own, which has a limit by itself.
    often = "a launcher that fails starts again 6 times, each time from the beginning"
    yield from check_restarts(spec, "mpiReplicaSpecs", often)
    for container in containers(manifest):
        if container.trains and "Launcher" in container.where:
            yield from _mpirun(manifest, container)


def _webhook(spec: dict[str, Any]) -> Iterator[Problem]:
    replicas = mapping(spec.get("mpiReplicaSpecs"))
    here: Where = ("spec", "mpiReplicaSpecs")
    yield from check_replicas(spec, "mpiReplicaSpecs", {"Launcher", "Worker"}, None)
    for name, replica in replicas.items():
        policy = mapping(replica).get("restartPolicy")
        if policy in ("Always", "ExitCode"):
            yield Problem((*here, name, "restartPolicy"), f"an MPIJob doesn't take {policy}: write Never or OnFailure")
    if "Launcher" not in replicas:
        yield Problem(here, "an MPIJob needs a Launcher, which runs mpirun: add it")
    elif mapping(replicas["Launcher"]).get("replicas") not in (None, 1):
        yield Problem((*here, "Launcher", "replicas"), "there must be exactly one Launcher: write replicas: 1")
    if isinstance(spec.get("slotsPerWorker"), int) and spec["slotsPerWorker"] < 1:
        said = "slotsPerWorker must be at least 1: write the number of ranks of a Worker"
        yield Problem(("spec", "slotsPerWorker"), said)
    clean = within(spec, "runPolicy", "cleanPodPolicy")
    if clean not in (None, "None", "Running", "All"):
        yield Problem(("spec", "runPolicy", "cleanPodPolicy"), f"there is no {clean!r}: write None, Running or All")


def _of_mpirun(words: Sequence[Word]) -> Iterator[Word]:
    """The words before the program that mpirun starts, which may have a `-n` of its own."""
    values = 0  # that may still follow the last option
    for word in words:
        if word.text.startswith("-"):
            values = 0 if "=" in word.text or word.text.lstrip("-") in _WITHOUT_VALUE else 1
            values += word.text.lstrip("-") in _WITH_TWO_VALUES
        elif values:
            values -= 1
        else:
            return
        yield word


def _mpirun(manifest: dict[str, Any], container: Container) -> Iterator[Problem]:
    """mpirun's count against the slots that the operator writes into the hostfile."""
    spec, slots = mapping(manifest.get("spec")), container.ranks.processes or 1
    pods = container.ranks.pods + (1 if spec.get("runLauncherAsWorker") is True else 0)
    for call in calls(words(container), MPIRUN):
        own = list(_of_mpirun(call))
        found, mapped = option(own, "-n", "-np", "--np", "--n"), option(own, "--map-by", "-map-by")
        if not found or not COUNT.fullmatch(found[0]) or option(own, *_OWN_PLACES) or (mapped and ":" in mapped[0]):
            continue
        size, total = int(found[0]), slots * pods
        remedy = f"{pods} Workers of {slots} slots have {total}: write {total}, or change slotsPerWorker"
        if size > total and spec.get("mpiImplementation") in (None, "OpenMPI"):
            said = f"mpirun is asked for {size} ranks, and Open MPI refuses more than there are slots; {remedy}"
            yield Problem(place(container, found[1]), said)
        elif size != total:
            yield warning(place(container, found[1]), f"mpirun is asked for {size} ranks; {remedy}")
