"""A job on the cluster: its pods, volumes and logs, its state, and in words why it doesn't train."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cputrain.cluster import kinds, syntax
from cputrain.cluster.containers import mounted, named
from cputrain.cluster.kubectl import Kubectl, Refused
from cputrain.cluster.manifest import mapping, mappings, within

if TYPE_CHECKING:
    from rich.console import Group

_ENDS = {"Succeeded": "Succeeded", "Complete": "Succeeded", "Failed": "Failed"}
_PULLING = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")
# `cputrain launch` puts the rank before each line of a rank.
_RANK_LABEL = re.compile(r"\[(\d+)\] ")


@dataclass(frozen=True)
class ClusterJob:
    """The job as the API server has it."""

    value: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.value.get("kind"))

    @property
    def module(self) -> kinds.JobKind:
        return kinds.BY_NAME[self.kind]

    @property
    def _spec(self) -> dict[str, Any]:
        return mapping(self.value.get("spec"))

    @property
    def name(self) -> str:
        return str(mapping(self.value.get("metadata")).get("name"))

    @property
    def conditions(self) -> list[dict[str, Any]]:
        return mappings(self.value, "status", "conditions")

    @property
    def state(self) -> str:
        """Kubeflow's word for where it is: the last condition that holds."""
        holding = [str(row.get("type")) for row in self.conditions if row.get("status") == "True"]
        ended = [_ENDS[word] for word in holding if word in _ENDS]
        return ended[-1] if ended else holding[-1] if holding else "not seen by its operator"

    @property
    def is_over(self) -> bool:
        return self.state in ("Succeeded", "Failed")

    @property
    def pods_wanted(self) -> int:
        """How many pods must run before ranks can meet."""
        counts = [within(self._spec, *place) for place in self.module.PODS]
        return next((count for count in counts if isinstance(count, int)), 1)

    @property
    def processes(self) -> int:
        """Ranks of each pod."""
        count = within(self._spec, *self.module.PROCESSES) or 1
        return int(count) if str(count).isdecimal() else 1

    @property
    def shares_logs(self) -> bool:
        """Whether several ranks write into one log."""
        return self.module.ONE_LOG or self.processes > 1

    def pod_specs(self, kubectl: Kubectl) -> list[dict[str, Any]]:
        return kinds.pod_specs(self.value, kubectl)

    def pod_of_rank(self, pods: list[dict[str, Any]], rank: int) -> str:
        """The name of the pod whose log has what a rank wrote; `pods` are in the order of their numbers."""
        size = self.processes * (self.pods_wanted if self.module.ONE_LOG else len(pods))
        found = self.module.pods_with_logs(self._spec, pods)
        if not found or not 0 <= rank < size:
            why = f"the ranks end at {size - 1}" if pods else "there are no pods yet"
            raise ValueError(f"rank {rank} has no pod: {why}.")
        return str(found[0 if self.module.ONE_LOG else rank // self.processes]["metadata"]["name"])


def find(kubectl: Kubectl, name: str) -> ClusterJob:
    """The job of this name, whatever its kind. The kinds that a cluster lacks aren't asked for."""
    syntax.subdomain(name, "the job's name")
    known = {(version.partition("/")[0], kind) for version, kind in kubectl.kinds()}
    asked = [module for module in kinds.JOBS.values() if (module.API.partition("/")[0], module.KIND) in known]
    if not asked:
        raise ValueError("the cluster knows no PyTorchJob, TrainJob or MPIJob: Kubeflow's operator isn't installed.")
    for module in asked:
        text = kubectl.run("get", kinds.resource(module), name, "--ignore-not-found", "--output=json")
        if text.strip():
            return ClusterJob(json.loads(text))
    missing = ", ".join(module.KIND for module in asked)
    raise ValueError(f"there is no {missing} called {name!r} here: see kubectl get, or give --namespace.")


def pods(kubectl: Kubectl, job: ClusterJob) -> list[dict[str, Any]]:
    """The job's pods, workers in the order of their numbers."""
    found = kubectl.json("get", "pods", f"--selector={job.module.POD_LABEL}={job.name}")["items"]
    return sorted(found, key=lambda pod: _order(pod["metadata"]["name"]))


def _order(name: str) -> list[tuple[int, str]]:
    """worker-2 before worker-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split("-")]


def claims(pod: dict[str, Any]) -> list[tuple[str, str]]:
    """(claim, mount path) of every claim that a pod of this specification mounts."""
    mounts = [mounted(container, pod) for _, container in named(pod)]
    rows = [
        (within(volume, "persistentVolumeClaim", "claimName"), path) for each in mounts for path, volume in each.items()
    ]
    return list(dict.fromkeys((str(claim), path) for claim, path in rows if claim))


def has_claim(kubectl: Kubectl, name: str, *where: str) -> bool:
    """Whether a claim exists: a job may wait for ever for one that was never made."""
    found = kubectl.run("get", "persistentvolumeclaims", name, "--ignore-not-found", "--output=name", *where)
    return bool(found.strip())


def show_log(command: list[str], rank: int, say: Callable[[str], None]) -> int:
    """Runs a command and says its lines but those of other ranks; lines without a rank's label are said, too."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout
        for line in process.stdout:
            label = _RANK_LABEL.match(line)
            if label is None or int(label[1]) == rank:
                say(line)
    return process.returncode


@dataclass(frozen=True)
class Status:
    """A job at one moment."""

    job: ClusterJob
    rows: list[tuple[str, ...]]  # of each pod: name, phase, restarts, node, trouble
    notes: list[str]


def status_of(kubectl: Kubectl, name: str) -> Status:
    job = find(kubectl, name)
    found = pods(kubectl, job)
    names = sorted({claim for pod in found for claim, _ in claims(mapping(pod.get("spec")))})
    volumes = [_claim_of(kubectl, claim) for claim in names]
    return Status(job, [_row(pod) for pod in found], list(troubles_of_job(job, found, volumes)))


def _claim_of(kubectl: Kubectl, name: str) -> dict[str, Any]:
    try:
        return kubectl.json("get", "persistentvolumeclaims", name)
    except Refused as refusal:
        if refusal.reason == "NotFound":
            return {"metadata": {"name": name}}
        raise


def _row(pod: dict[str, Any]) -> tuple[str, ...]:
    status = mapping(pod.get("status"))
    restarts = sum(int(row.get("restartCount") or 0) for row in mappings(status, "containerStatuses"))
    node = str(within(pod, "spec", "nodeName") or "–")
    return pod["metadata"]["name"], str(status.get("phase") or "Pending"), str(restarts), node, trouble_of_pod(pod)


def status_table(status: Status) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table("pod", "phase", "restarts", "node", "what is wrong", title=f"{status.job.kind} {status.job.name}")
    for row in status.rows:
        # Text, not markup: what a cluster says may hold brackets.
        made.add_row(*map(Text, row))
    colour = {"Succeeded": "green", "Failed": "red"}.get(status.job.state, "yellow")
    lines = [Text(f"state: {status.job.state}", style=colour), *map(Text, _conditions(status.job))]
    lines += [Text(f"! {note}") for note in status.notes]
    return Group(*([made] if status.rows else [Text(f"{status.job.kind} {status.job.name}: no pods")]), *lines)


def _conditions(job: ClusterJob) -> list[str]:
    """What the operator says of the job, with the time: a line each."""
    rows = []
    for row in job.conditions:
        said = " ".join(str(row.get(key) or "") for key in ("reason", "message")).strip()
        holds = "" if row.get("status") == "True" else " no longer"
        rows.append(f"{row.get('lastTransitionTime') or '–'} {row.get('type')}{holds}{': ' if said else ''}{said}")
    return rows


def trouble_of_pod(pod: dict[str, Any]) -> str:
    """One pod's trouble, or nothing."""
    status = mapping(pod.get("status"))
    for container in [*mappings(status, "initContainerStatuses"), *mappings(status, "containerStatuses")]:
        if said := _of_container(container, pod):
            return said
    if status.get("reason") == "Evicted":
        return f"evicted by its node: {status.get('message') or 'without a reason'}"
    if status.get("phase") == "Pending":
        return _pending(mappings(status, "conditions"))
    return ""


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> str:
    waiting, last = mapping(within(container, "state", "waiting")), within(container, "lastState", "terminated")
    ended, reason = mapping(within(container, "state", "terminated")), waiting.get("reason")
    if (ended or mapping(last)).get("reason") == "OOMKilled":
        limits = [within(each, "resources", "limits", "memory") for each in mappings(pod, "spec", "containers")]
        limit = next((f" of {each}" for each in limits if each), "")
        return f"killed for using more memory than its limit{limit}: raise --memory, or take smaller batches"
    if reason in _PULLING:
        why = str(waiting.get("message") or "").rstrip(".") or "no reason given"
        return f"the image {container.get('image')} can't be pulled ({why}): check its name, and --pull-secret"
    if reason == "CrashLoopBackOff":
        code, count = (ended or mapping(last)).get("exitCode", "?"), container.get("restartCount", 0)
        return f"ends with exit code {code} and was started {count} times again: see cputrain k8s logs"
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return f"the container can't be made: {waiting.get('message') or reason}"
    return f"ended with exit code {ended['exitCode']}: see cputrain k8s logs" if ended.get("exitCode") else ""


# What the scheduler says of a pod that no node takes, what that means, and what to do.
_NOT_PLACED = (
    (
        r"PersistentVolumeClaim|persistentvolumeclaim",
        "its volume isn't there",
        "create the claim, or see why it isn't bound",
    ),
    (r"untolerated taint", "nodes are kept for others", "give --toleration"),
    (r"node affinity/selector|node selector", "no node has the labels that were asked for", "check --node-selector"),
)


def _pending(conditions: list[dict[str, Any]]) -> str:
    scheduled = next((row for row in conditions if row.get("type") == "PodScheduled"), {})
    message = str(scheduled.get("message") or "")
    if scheduled.get("status") != "False":
        return ""
    short = sorted(set(re.findall(r"(?:\d+ )?Insufficient ([\w./-]+)", message)))
    if short:
        return f"no node has enough {' and '.join(short)} left ({message.rstrip('.')}): ask for less, or wait"
    for pattern, meaning, remedy in _NOT_PLACED:
        if re.search(pattern, message):
            return f"{meaning} ({message.rstrip('.')}): {remedy}"
    return f"no node takes it: {message.rstrip('.')}" if message else "no node has taken it yet"


def troubles_of_job(job: ClusterJob, pods: list[dict[str, Any]], claims: list[dict[str, Any]]) -> Iterator[str]:
    """What concerns the job as a whole."""
    if not job.conditions and not pods:
        yield f"no operator has looked at this {job.kind} yet: if that stays so, the operator isn't running"
    for row in job.conditions:
        if row.get("type") == "Failed" and row.get("status") == "True" and row.get("message"):
            yield f"failed: {row['message']}"
    for claim in claims:
        name, phase = within(claim, "metadata", "name"), within(claim, "status", "phase")
        if phase != "Bound":
            yield f"the volume claim {name} is {phase or 'not there'}, not Bound: check its storage class and size"
    running = sum(within(pod, "status", "phase") == "Running" for pod in pods)
    if pods and 0 < running < job.pods_wanted and not job.is_over:
        yield f"the rendezvous isn't formed: {running} of {job.pods_wanted} pods run, and wait for the others"
