"""MPIJob, kubeflow.org/v2beta1: a Launcher that runs mpirun, and Workers that run an sshd without root."""

from __future__ import annotations

from typing import Any

from cputrain.cluster import pod
from cputrain.cluster.job import HOME, MPI, Job
from cputrain.cluster.manifest import Noted, plain

SSH_PORT = 2222
# Not /root/.ssh: there the operator gives the key a mode that only root can read.
SSH_FOLDER = f"{HOME}/.ssh"


def documents(job: Job) -> list[dict[str, Any]]:
    spec = {
        "mpiImplementation": MPI[job.mpi],
        "slotsPerWorker": job.sizing.processes,
        "sshAuthMountPath": Noted(SSH_FOLDER, "the default, /root/.ssh, is for root only"),
        "launcherCreationPolicy": Noted("WaitForWorkersReady", "mpirun doesn't wait for an sshd that isn't there yet"),
        "runPolicy": {
            "cleanPodPolicy": Noted("Running", "the workers' sshd never ends by itself"),
            "backoffLimit": Noted(job.backoff_limit, "without it a launcher that fails starts again 6 times"),
        },
        "mpiReplicaSpecs": {"Launcher": _launcher(job), "Worker": _worker(job)},
    }
    return [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": pod.metadata(job), "spec": spec}]


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
        "template": {"metadata": pod.pod_metadata(job), "spec": pod.spec(job, [container], with_data=False)},
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
    return {
        "replicas": job.workers,
        "restartPolicy": "OnFailure",
        "template": {"metadata": pod.pod_metadata(job), "spec": pod.spec(job, [container])},
    }


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
