"""Brings files of a volume here: a pod that may only read it, `tar` through kubectl, and nothing left behind."""

from __future__ import annotations

import json
import posixpath
import shutil
import subprocess
import tarfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import IO, Any
from uuid import uuid4

from cputrain.cluster.kubectl import Kubectl, refusal
from cputrain.cluster.manifest import mapping

_MOUNT = "/data"
_SECONDS = 3600  # the reader ends by itself, should no process be left to delete it


def reader(name: str, claim: str, trained: dict[str, Any]) -> dict[str, Any]:
    """A pod that sleeps beside the volume, and may do nothing else: as the user and where the job's own pods run."""
    user = mapping(trained.get("securityContext")).get("runAsUser") or 1000
    profile = {"type": "RuntimeDefault"}
    container = {
        "name": "reader",
        "image": trained["containers"][0]["image"],
        "command": ["sleep", str(_SECONDS)],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {side: {"cpu": "1", "memory": "256Mi"} for side in ("limits", "requests")},
        "volumeMounts": [{"name": "data", "mountPath": _MOUNT, "readOnly": True}],
    }
    spec: dict[str, Any] = {
        **{key: trained[key] for key in ("imagePullSecrets", "nodeSelector", "tolerations") if key in trained},
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _SECONDS,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": user, "fsGroup": user, "seccompProfile": profile},
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}],
    }
    labels = {"app.kubernetes.io/managed-by": "cputrain", "sidecar.istio.io/inject": "false"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def copy(kubectl: Kubectl, claim: str, path: str, target: Path, trained: dict[str, Any], patience: int) -> int:
    """Copies `path` of the volume to `target`, which must not exist, and returns the number of files.

    `trained` is the specification of the pods that wrote it.
    """
    if target.exists():
        raise ValueError(f"{target} exists already: choose another place.")
    if not target.resolve().parent.is_dir():
        raise ValueError(f"{target.parent} is no folder.")
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"the path must lie in the volume, found {path!r}.")
    with _reader(kubectl, reader(f"cputrain-reader-{uuid4().hex[:8]}", claim, trained), patience) as name:
        beside = Path(mkdtemp(prefix=f".{target.name}.", dir=target.resolve().parent))
        try:
            _unpack(kubectl, name, path, beside)
            beside.chmod(0o755)
            beside.rename(target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
    return sum(file.is_file() for file in target.rglob("*"))


@contextmanager
def _reader(kubectl: Kubectl, pod: dict[str, Any], patience: int) -> Iterator[str]:
    name = pod["metadata"]["name"]
    try:
        # From here on it may exist, even if the answer never came: Ctrl-C included.
        kubectl.run("create", "--filename=-", given=json.dumps(pod))
        kubectl.run("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={patience}s")
        yield name
    finally:
        kubectl.run("delete", "pod", name, "--ignore-not-found", "--wait=false", "--grace-period=0")


class _Stream:
    """What comes through, and whether it came to its end: an archive ends with a kilobyte of zeros.

    kubectl 1.27 says nothing when the connection drops, and between two files tarfile doesn't notice either.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._tail = source, b""

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._tail = (self._tail + data)[-1024:]
        return data

    @property
    def is_whole(self) -> bool:
        return self._tail == bytes(1024)


def _extract(stream: _Stream, folder: Path) -> None:
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
            archive.extractall(folder, filter="data")
        while stream.read(1 << 16):  # what stands behind the archive's end
            pass
    except OSError as error:
        raise ValueError(f"what came from the volume can't be written here: {error.strerror}.") from None


def _unpack(kubectl: Kubectl, pod: str, path: str, folder: Path) -> None:
    source = posixpath.join(_MOUNT, path)
    command = kubectl.command("exec", pod, "--container=reader", "--", "tar", "-C", source, "-cf", "-", ".")
    # Complaints go to a file: kubectl would wait for a pipe that isn't read.
    with TemporaryFile() as complaints, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints) as process:
        assert process.stdout
        stream = _Stream(process.stdout)
        try:
            _extract(stream, folder)
        except tarfile.TarError as error:
            process.kill()
            process.wait()
            if said := _last_lines(complaints):
                raise refusal(said) from None
            raise ValueError(f"what came from the volume can't be unpacked safely: {error}.") from None
        except BaseException:
            process.kill()
            raise
        if process.wait():
            raise refusal(_last_lines(complaints))
    if not stream.is_whole:
        raise ValueError("the connection dropped before all had come: try again.")


def _last_lines(file: IO[bytes]) -> str:
    file.seek(0)
    return b"".join(deque(file, maxlen=10))[-10_000:].decode(errors="replace").strip()
