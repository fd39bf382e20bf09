"""What Kubernetes does with a manifest before a process starts, written from its sources: the tests' oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)`, byte by byte as the kubelet's expansion does; unknown names stay, `$$` is `$`."""
    data, out, at = text.encode(), bytearray(), 0
    while at < len(data):
        if data[at : at + 1] != b"$" or at + 1 == len(data):
            out += data[at : at + 1]
            at += 1
        elif data[at + 1 : at + 2] == b"$":
            out += b"$"
            at += 2
        elif data[at + 1 : at + 2] == b"(":
            end = data.find(b")", at + 2)
            if end < 0:
                out += b"$("
                at += 2
            else:
                name = data[at + 2 : end].decode()
                out += variables.get(name, f"$({name})").encode()
                at = end + 1
        else:  # the byte after it is taken for a character of its own, which garbles anything beyond ASCII
            out += b"$" + chr(data[at + 1]).encode()
            at += 2
    return out.decode()


def environment(
    container: Mapping[str, Any], operators: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """The operator's variables are appended to the container's; each sees those before it."""
    made: dict[str, str] = {}
    for row in container.get("env", ()):
        if "value" in row:
            made[row["name"]] = expand(row["value"], made)
        else:
            reference = row["valueFrom"]["secretKeyRef"]
            made[row["name"]] = secrets[f"{reference['name']}/{reference['key']}"]
    return {**made, **operators}


def command(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    return [expand(word, variables) for word in (*container.get("command", ()), *container.get("args", ()))]


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every pod template within manifests, by the name of its replica."""
    found = {}
    for document in documents:
        spec = document.get("spec", {})
        for replicas in ("pytorchReplicaSpecs", "mpiReplicaSpecs"):
            found |= {name: replica["template"] for name, replica in spec.get(replicas, {}).items()}
        if document["kind"] == "TrainingRuntime":
            jobs = spec["template"]["spec"]["replicatedJobs"]
            found |= {job["name"]: job["template"]["spec"]["template"] for job in jobs}
    return found


def restricted_faults(template: Mapping[str, Any]) -> list[str]:
    """What the "restricted" pod security standard would refuse."""
    spec = template["spec"]
    security, faults = spec.get("securityContext", {}), []
    if spec.get("hostNetwork") or spec.get("hostPID") or spec.get("hostIPC"):
        faults.append("host namespaces")
    kinds = {"name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}
    faults += [f"volume {volume['name']}" for volume in spec.get("volumes", ()) if set(volume) - kinds - {"secret"}]
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            faults.append("allowPrivilegeEscalation")
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            faults.append("capabilities")
        if not own.get("runAsNonRoot", security.get("runAsNonRoot")):
            faults.append("runAsNonRoot")
        if own.get("runAsUser", security.get("runAsUser")) == 0:
            faults.append("runAsUser")
        if own.get("seccompProfile", security.get("seccompProfile", {})).get("type") != "RuntimeDefault":
            faults.append("seccompProfile")
    return faults


def is_guaranteed(template: Mapping[str, Any]) -> bool:
    resources = [container["resources"] for container in template["spec"]["containers"]]
    return all({"cpu", "memory"} == set(each["limits"]) and each["limits"] == each["requests"] for each in resources)
