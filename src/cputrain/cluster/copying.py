"""Brings files of a volume here: a pod that may only read it, `tar` through kubectl, and nothing left behind."""

from __future__ import annotations

import json
import posixpath
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from cputrain.cluster.kubectl import Kubectl, refusal

_MOUNT = "/data"
_SECONDS = 3600  # the reader ends by itself, should nobody be left to delete it


def reader(name: str, claim: str, image: str, pull_secrets: list[str]) -> dict[str, Any]:
    """A pod that sleeps beside the volume, and may do nothing else."""
    container = {
        "name": "reader",
        "image": image,
        "command": ["sleep", str(_SECONDS)],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {side: {"cpu": "1", "memory": "256Mi"} for side in ("limits", "requests")},
        "volumeMounts": [{"name": "data", "mountPath": _MOUNT, "readOnly": True}],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _SECONDS,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}],
        "imagePullSecrets": [{"name": secret} for secret in pull_secrets],
    }
    metadata = {
        "name": name,
        "labels": {"app.kubernetes.io/managed-by": "cputrain", "sidecar.istio.io/inject": "false"},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def copy(
    kubectl: Kubectl, claim: str, path: str, target: Path, image: str, pull_secrets: list[str], patience: int
) -> int:
    """Copies `path` of the volume to `target`, which must not exist, and returns the number of files."""
    if target.exists():
        raise ValueError(f"{target} exists already: choose another place.")
    if not target.resolve().parent.is_dir():
        raise ValueError(f"{target.parent} is no folder.")
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"the path must lie in the volume, found {path!r}.")
    with _reader(kubectl, claim, image, pull_secrets, patience) as name:
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.resolve().parent))
        try:
            _unpack(kubectl, name, path, beside)
            beside.chmod(0o755)
            beside.rename(target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
    return sum(file.is_file() for file in target.rglob("*"))


@contextmanager
def _reader(kubectl: Kubectl, claim: str, image: str, secrets: list[str], patience: int) -> Iterator[str]:
    name = f"cputrain-reader-{uuid4().hex[:8]}"
    try:
        # From here on it may exist, even if the answer never came: Ctrl-C included.
        kubectl.run("create", "--filename=-", given=json.dumps(reader(name, claim, image, secrets)))
        kubectl.run("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={patience}s")
        yield name
    finally:
        kubectl.run("delete", "pod", name, "--ignore-not-found", "--wait=false", "--grace-period=0")


def _unpack(kubectl: Kubectl, pod: str, path: str, folder: Path) -> None:
    source = posixpath.join(_MOUNT, path)
    command = kubectl.command("exec", pod, "--container=reader", "--", "tar", "-C", source, "-cf", "-", ".")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                archive.extractall(folder, filter="data")
            process.stdout.read()
        except tarfile.TarError as error:
            process.kill()
            said = process.stderr.read().decode(errors="replace").strip()
            if said:
                raise refusal(said) from None
            raise ValueError(f"what came from the volume can't be unpacked safely: {error}.") from None
        except BaseException:
            process.kill()
            raise
        said = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise refusal(said)
