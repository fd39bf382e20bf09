"""A shell with the real kubectl, a cluster that it reaches, and a job that may be on it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import command_line
from cluster.api_server import Cluster
from cluster.test_render import TRICKS

from cputrain.cluster import render
from cputrain.cluster.job import Job, Toleration, Volume
from cputrain.cluster.manifest import plain


def kubectls() -> list[Path]:
    """The oldest and the newest kubectl here; several may lie beside the one on the PATH."""
    found = shutil.which("kubectl")
    if found is None:
        return [Path("kubectl")]
    folder = Path(found).resolve().parent
    beside = sorted(folder.glob("kubectl.1.*"), key=lambda path: int(path.name.rpartition(".")[2]))
    return [beside[0], beside[-1]] if beside else [Path(found).resolve()]


@dataclass
class Here:
    """A cluster, and a shell from which it can be reached."""

    cluster: Cluster
    folder: Path
    environ: dict[str, str]

    def cputrain(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return command_line.cputrain("k8s", *words, environ=self.environ, folder=self.folder, given=given)

    def process(self, *words: str) -> subprocess.CompletedProcess[str]:
        """For a command that becomes kubectl."""
        command = [sys.executable, "-m", "cputrain", "k8s", *words]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=False, cwd=self.folder, timeout=120
        )

    def refused(self, *words: str, given: str = "") -> str:
        """The one sentence, with exit code 2 and without a traceback."""
        answer = self.cputrain(*words, given=given)
        assert answer.returncode == 2, answer.stdout + answer.stderr
        assert answer.stderr.startswith("cputrain: "), answer.stderr
        assert answer.stderr.count("\n") == 1, answer.stderr
        return answer.stderr

    def submit(self, job: Job, *words: str) -> subprocess.CompletedProcess[str]:
        return self.cputrain("submit", "-", *words, given=render.job_text(job))


QA = Job(
    "qa", "x:1", "run.py", TRICKS, workers=2, volume=Volume("data", size="1Gi"), script_text="print(1)\n", user=1234,
    tolerations=(Toleration("dedicated"),), pull_secrets=("registry",),
)  # fmt: skip


def pod(number: int, phase: str = "Running", **status: Any) -> dict[str, Any]:
    template = plain(render.of_job(QA)[1])["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"qa-worker-{number}", "labels": {"training.kubeflow.org/job-name": "qa"}},
        "spec": {**template["spec"], "nodeName": "node-a"},
        "status": {"phase": phase, **status},
    }


def add_job(
    cluster: Cluster, *pods: dict[str, Any], conditions: tuple[str, ...] = ("Created",), bound: bool = True
) -> None:
    job = plain(render.of_job(QA)[1])
    job["status"] = {"conditions": [{"type": name, "status": "True", "message": "said so"} for name in conditions]}
    cluster.put("pytorchjobs", job)
    for each in pods:
        cluster.put("pods", each)
    claim = plain(render.of_volume(QA)[0])
    claim["status"] = {"phase": "Bound" if bound else "Pending"}
    cluster.put("persistentvolumeclaims", claim)
