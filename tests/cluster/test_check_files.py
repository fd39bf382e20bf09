"""`cputrain k8s check` as a command: exit codes, severities, JSON, several files, kinds that it doesn't know."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster.command_line import cputrain

from cputrain.cluster import check, render
from cputrain.cluster.job import Job, Volume

JOB = Job(
    "qa", "x:1", "run.py", ("--output_dir", "/data/out"), workers=2, volume=Volume("d", size="1Gi"), namespace="a"
)
TEXT, CLAIM = render.job_text(JOB), render.volume_text(JOB)
HINT = re.sub(r"cpu: .*", "cpu: 3500m", TEXT).replace('value: "4"', 'value: "3"')
WARNING = TEXT.replace("/data/out", "/out")
ERROR = TEXT.replace('nprocPerNode: "1"', "nprocPerNode: 1")


@pytest.mark.parametrize(
    ("text", "severity", "codes"),
    [
        (TEXT, None, {"error": 0, "warning": 0, "hint": 0}),
        (HINT, "hint", {"error": 0, "warning": 0, "hint": 1}),
        (WARNING, "warning", {"error": 0, "warning": 1, "hint": 1}),
        (ERROR, "error", {"error": 1, "warning": 1, "hint": 1}),
    ],
    ids=["none", "hint", "warning", "error"],
)
def test_what_fails(text: str, severity: str | None, codes: dict[str, int]) -> None:
    assert {finding.severity for finding in check.findings(text)} == ({severity} if severity else set())
    for threshold, code in codes.items():
        answer = cputrain("k8s", "check", "--fail-on", threshold, "-", given=text)
        assert answer.returncode == code, answer.stdout
        assert (f": {severity}: " in answer.stdout) == (severity is not None)
    assert cputrain("k8s", "check", "-", given=text).returncode == codes["error"]


def test_a_severity_that_there_is_not() -> None:
    answer = cputrain("k8s", "check", "--fail-on", "never", "-", given=TEXT)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "--fail-on must be one of error, warning, hint, found 'never'" in answer.stderr


def test_json(tmp_path: Path) -> None:
    file = tmp_path / "qa.yaml"
    file.write_text(WARNING)
    answer = cputrain("k8s", "check", "--json", str(file))
    found = json.loads(answer.stdout)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert found["counts"] == {"error": 0, "warning": 1, "hint": 0}
    [row] = found["findings"]
    assert (row["file"], row["severity"]) == (str(file), "warning")
    assert "--output_dir" in WARNING.splitlines()[row["line"] - 1]
    assert row["path"].endswith("args.1")
    assert "write a path under /data" in row["sentence"]
    assert found["unknown_kinds"] == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("TFJob", "TFJob is not a kind that cputrain checks."),
        ("PytorchJob", "PytorchJob is not a kind that cputrain checks; did you mean PyTorchJob?"),
    ],
)
def test_a_kind_that_it_doesnt_know(tmp_path: Path, kind: str, said: str) -> None:
    """Neither praise nor blame: exit code 2, whatever else is in the file."""
    text = f"{TEXT}---\napiVersion: kubeflow.org/v1\nkind: {kind}\nmetadata:\n  name: x\n"
    line = text.splitlines().index(f"kind: {kind}") + 1
    answer = cputrain("k8s", "check", "-", given=text)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert f"-:{line}: {said}\n" in answer.stderr
    answer = cputrain("k8s", "check", "--json", "-", given=text)
    assert answer.returncode == 2
    assert json.loads(answer.stdout)["unknown_kinds"] == [{"file": "-", "line": line, "kind": kind}]


def test_kinds_that_stand_beside_a_job() -> None:
    policy = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: qa}\nspec: {podSelector: {}}\n"
    secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: qa}\n"
    answer = cputrain("k8s", "check", "-", given=f"{TEXT}---\n{policy}---\n{secret}")
    assert (answer.returncode, answer.stdout) == (0, "")
    [found] = check.findings(policy.replace("networking.k8s.io/v1", "v1"))
    assert (found.line, found.severity) == (1, "error")
    assert "NetworkPolicy is served as networking.k8s.io/v1, found v1" in found.sentence


def test_a_claim_in_another_namespace(tmp_path: Path) -> None:
    """The two stand in files of their own, as `render` writes them, and are seen together."""
    job, claim = tmp_path / "qa.yaml", tmp_path / "qa-volume.yaml"
    job.write_text(TEXT)
    claim.write_text(CLAIM)
    assert cputrain("k8s", "check", str(job), str(claim), "--fail-on", "hint").returncode == 0
    claim.write_text(CLAIM.replace("namespace: a", "namespace: b"))
    answer = cputrain("k8s", "check", str(job), str(claim))
    line = next(number for number, row in enumerate(TEXT.splitlines(), start=1) if "claimName: d" in row)
    assert answer.returncode == 1
    assert answer.stdout.startswith(
        f"{job}:{line}: error: PersistentVolumeClaim d is in namespace b, and nothing in a "
    )
    claim.write_text(CLAIM.replace("  namespace: a\n", ""))
    answer = cputrain("k8s", "check", str(job), str(claim))
    assert answer.returncode == 0
    assert "warning: PersistentVolumeClaim d is in kubectl's namespace, and this is in namespace a" in answer.stdout
    assert cputrain("k8s", "check", str(job), "--fail-on", "hint").returncode == 0  # the claim may be there already


def test_a_claim_that_nodes_cant_share(tmp_path: Path) -> None:
    """Only a claim that a job of several pods mounts."""
    once = CLAIM.replace("ReadWriteMany", "ReadWriteOnce")
    found = check.of_files({"job": TEXT, "claim": once})
    assert found["job"] == []
    assert ["write ReadWriteMany" in finding.sentence for finding in found["claim"]] == [True]
    assert check.of_files({"job": TEXT, "claim": once.replace("name: d", "name: other")})["claim"] == []


def test_a_list_is_its_items() -> None:
    """The lines are those of the file."""
    rows = [f"  {line}" for line in ERROR.splitlines() if not line.startswith("#")]
    text = "\n".join(["apiVersion: v1", "kind: List", "items:", "- " + rows[0].strip(), *rows[1:]])
    [found] = check.findings(text)
    assert text.splitlines()[found.line - 1].strip() == "nprocPerNode: 1"
    assert 'found 1; write it in quotes: "1"' in found.sentence


@pytest.mark.parametrize("written", ["3e-5", "1_000", "0x10", "yes", "010", "1e3", "~5", "0.50"])
def test_a_value_keeps_its_spelling(written: str) -> None:
    text = TEXT.replace("value: INFO", f"value: {written}")
    assert text != TEXT
    found = [finding.sentence for finding in check.findings(text)]
    if written == "~5":
        assert found == []  # a string
    else:
        assert found == [f'it must be a string, found {written}; write it in quotes: "{written}"']
