"""Manifests for Kubernetes, as `k8s check` reads them."""

from __future__ import annotations

from cputrain.cluster import check as manifest_check
from cputrain.cluster import render
from cputrain.cluster.job import KINDS, Job, Volume

_JOBS = [Job("qa", "x:1", "run.py", ("--lr", "1"), kind=kind, workers=2, volume=Volume("data")) for kind in KINDS]
SEEDS = [
    *(render.job_text(job).encode() for job in _JOBS),
    b"apiVersion: v1\nkind: ConfigMap\nmetadata: &a {name: x}\ndata:\n  <<: *a\n  b: 0b_\n---\n- 1\n",
]
WORDS = [
    *b"kubeflow.org/v1 PyTorchJob MPIJob TrainJob spec: template: env: containers: resources: limits: 16Gi".split(),
    *b"0x_ 0b_ 0o_ 1e999 -.5 1_0 yes ~ *a [ ] { } , ' \" \\x1b $( ?".split(),
    *(word + b": " for word in b"apiVersion kind name value cpu memory replicas command args <<".split()),
    *(b"- ", b"&a ", b"!!binary ", b"\n", b"\n  ", b"\n---\n", b"\t", b"|\n"),
]


def check(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:  # a sentence of text_files, which reads the file
        return
    lines = len(text.splitlines()) + 2  # "\r" alone ends a line, too, for YAML
    for finding in manifest_check.findings(text):
        assert 1 <= finding.line <= lines, finding
        assert finding.sentence.isprintable() and finding.path.isprintable(), finding
    manifest_check.unknown_kinds(text)
