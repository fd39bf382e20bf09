"""The pod that all three kinds of job share: restricted, Guaranteed, with its volumes and variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from posixpath import join
from typing import Any

from cputrain import authentication, settings
from cputrain.cluster.job import HOME, SCRIPTS, Job
from cputrain.cluster.manifest import Noted

Mapping = dict[str, Any]

# It reads what the operator sets, and starts the right number of processes.
COMMAND = ("cputrain", "launch")
# The key in the Secret that `core_objects` makes.
TOKEN_KEY = "token"
# The kubelet reads `$$` as `$` and `$(` as a reference; a `$` before a byte beyond ASCII it would garble.
_MEANT = re.compile(r"\$\$+|\$(?=\(|[^\x00-\x7f])")


def metadata(job: Job, name: str | None = None) -> Mapping:
    place = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": name or job.name, **place, "labels": labels(job)}


def labels(job: Job) -> Mapping:
    return {"app.kubernetes.io/managed-by": "cputrain", "app.kubernetes.io/instance": job.name}


def _pod_metadata(job: Job) -> Mapping:
    note = "a mesh's proxy would end the rendezvous' connections, and never end itself"
    return {
        # Istio reads the label today and the annotation in older releases.
        "annotations": {"sidecar.istio.io/inject": Noted("false", note)},
        "labels": {**labels(job), "sidecar.istio.io/inject": "false"},
    }


def escape(value: str) -> str:
    """The text whose expansion is `value`: Kubernetes replaces `$(NAME)` in commands, arguments and variables."""
    return _MEANT.sub(lambda found: found[0] * 2, value)


def arguments(job: Job) -> list[str]:
    return [escape(word) for word in (*job.launch_options, job.script_path, *job.arguments)]


def variables(job: Job) -> list[Any]:
    """Variables in a fixed order; the user's come last and win over ours of the same name."""
    users = {*dict(job.environment), *(secret.name for secret in job.secrets)}
    ours = [(_variable(name, value), note) for name, value, note in _our_variables(job) if name not in users]
    rows: list[Any] = [Noted(row, note) if note else row for row, note in ours]
    rows += [_variable(name, value) for name, value in job.environment]
    rows += [_secret(secret.name, secret.secret, secret.key) for secret in job.secrets]
    return rows + ([_secret(authentication.TOKEN, token_name(job), TOKEN_KEY)] if job.makes_token else [])


def _our_variables(job: Job) -> Iterator[tuple[str, str, str]]:
    """Name, value and why it is set."""
    sizing = job.sizing
    shares = f"{job.cpu_count} CPUs for {sizing.processes} of these, {sizing.communication} of each for communication"
    counted, asked = f"{shares}; OpenMP itself would count the node's CPUs", "threads of each process, as asked for"
    yield "HOME", HOME, "the image's own home may belong to another user"
    yield "LOGLEVEL", job.log_level, ""
    yield "OMP_NUM_THREADS", str(sizing.threads), counted if job.threads is None else asked
    if sizing.communication:
        yield "CCL_WORKER_COUNT", str(sizing.communication), "cores that move gradients while others compute"
    if job.max_restarts or job.backoff_limit:
        named = "by which restarted ranks find this run's checkpoints; another render is another run"
        yield settings.RUN_ID, f"{job.name}-{job.rendezvous}", named
    for name, value in job.recovery:
        yield name, value, ""
    if job.volume:
        # HF_HOME holds models, datasets and the token's place; TRANSFORMERS_CACHE is read by nothing any more.
        yield "HF_HOME", join(job.volume.mount, "huggingface"), "downloaded once, onto the volume"
    if job.preload:
        yield "LD_PRELOAD", ":".join(job.preload), "the loader says so in the log if one isn't in the image"


def _variable(name: str, value: str) -> Mapping:
    return {"name": name, "value": escape(value)}


def _secret(name: str, secret: str, key: str) -> Mapping:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def token_name(job: Job) -> str:
    return f"{job.name}-token"


def resources(job: Job) -> Mapping:
    amounts = {"cpu": str(job.cpu_count), "memory": job.memory}
    return {
        "limits": Noted(dict(amounts), "limits = requests and whole CPUs: Guaranteed, and pinned where nodes do that"),
        "requests": amounts,
    }


def container(job: Job, name: str, with_data: bool = True) -> Mapping:
    """What every container has; the kinds add command, variables and resources."""
    return {
        "name": name,
        "image": job.image,
        "imagePullPolicy": job.pull_policy,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [mount for mount, _ in _volumes(job, with_data)],
    }


def _volumes(job: Job, with_data: bool) -> Iterator[tuple[Mapping, Any]]:
    """The mount of each volume, and the volume."""
    yield {"name": "home", "mountPath": HOME}, {"name": "home", "emptyDir": {"sizeLimit": "10Gi"}}
    if not with_data:
        return
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory_size}}
    note = "data loaders pass batches through /dev/shm, 64 MiB without this; it counts as the pod's memory"
    yield {"name": "shared-memory", "mountPath": "/dev/shm"}, Noted(memory, note)
    if job.volume:
        claim = {"claimName": job.volume.claim}
        yield {"name": "data", "mountPath": job.volume.mount}, {"name": "data", "persistentVolumeClaim": claim}
    if job.script_text is not None:
        mount = {"name": "script", "mountPath": SCRIPTS, "readOnly": True}
        yield mount, {"name": "script", "configMap": {"name": script_map_name(job)}}


def template(job: Job, container: Mapping, with_data: bool = True, **more: Any) -> Mapping:
    """The pod around its container. No restartPolicy but in `more`: most operators overwrite it."""
    standard = {
        "runAsNonRoot": True,
        "runAsUser": job.user,
        "runAsGroup": job.user,
        "fsGroup": job.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    note = 'the "restricted" pod security standard; fsGroup makes the volume writable for this user'
    saved = "seconds from SIGTERM to SIGKILL: the ranks save their state, and end"
    placement = {
        "nodeSelector": dict(job.node_selector),
        "tolerations": [_toleration(item.key, item.value, item.effect) for item in job.tolerations],
        "priorityClassName": job.priority_class,
        "serviceAccountName": job.service_account,
        "imagePullSecrets": [{"name": name} for name in job.pull_secrets],
    }
    spec = {
        **more,
        "securityContext": Noted(standard, note),
        "terminationGracePeriodSeconds": Noted(job.grace, saved),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [volume for _, volume in _volumes(job, with_data)],
        **{key: value for key, value in placement.items() if value},
    }
    return {"metadata": _pod_metadata(job), "spec": spec}


def _toleration(key: str, value: str | None, effect: str | None) -> Mapping:
    made = {"key": key, "operator": "Exists"} if value is None else {"key": key, "operator": "Equal", "value": value}
    return {**made, "effect": effect} if effect else made


def script_map_name(job: Job) -> str:
    return f"{job.name}-script"
