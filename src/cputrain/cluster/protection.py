"""What keeps strangers away from a job's pods: a Secret with the run's token, and on request a NetworkPolicy."""

from __future__ import annotations

from typing import Any

from cputrain.cluster import pod
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import Noted


def documents(job: Job) -> list[dict[str, Any]]:
    secret = [_secret(job)] if job.makes_token else []
    return [*secret, *([_network_policy(job)] if job.network_policy else [])]


def _secret(job: Job) -> dict[str, Any]:
    note = "drawn for this run: ranks show each other that they know it; read access to it is access to the run"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": pod.metadata(job, pod.token_name(job)),
        "stringData": {pod.TOKEN_KEY: Noted(job.token, note)},
    }


def _network_policy(job: Job) -> dict[str, Any]:
    own = {"matchLabels": pod.labels(job)}
    note = "only the job's own pods: torch's store and gloo have no authentication of their own"
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pod.metadata(job),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": Noted([{"from": [{"podSelector": own}]}], note),
        },
    }
