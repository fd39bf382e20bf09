"""`cputrain k8s render|check`: the manifests of a training, and what is wrong with any. Neither needs a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cputrain import text_files
from cputrain.cli.app import command, new_app
from cputrain.cli.job_options import JobOptions, option
from cputrain.cli.option_fields import with_fields
from cputrain.cli.wrapping import on_a_terminal

app = new_app(
    help="Train on a Kubernetes cluster with Kubeflow: write the job, check it, submit it, follow it.",
    epilog="""
        cputrain k8s render --image me/train:1 -o job.yaml -- run_qa.py --do_train
        cputrain k8s check job.yaml
        cputrain k8s submit job.yaml
        cputrain k8s status run-qa --watch
    """,
)
RENDER_EXAMPLES = """
    cputrain k8s render --image me/train:1 -o job.yaml -- run_qa.py --do_train
    cputrain k8s render --image me/train:1 --kind trainjob --workers 4 --cpus 16 \\
        --pvc models --create-pvc 50Gi -o job.yaml -- run_qa.py --do_train
"""
CHECK_EXAMPLES = """
    cputrain k8s check job.yaml
    kubectl get pytorchjob run-qa -o yaml | cputrain k8s check -
"""


@command(app, RENDER_EXAMPLES, allow_interspersed_args=False)
@with_fields
def render(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as the image has it.")],
    options: JobOptions,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.")] = None,
    out: Annotated[
        Path | None, option("Write there instead of to standard output.", "--out", "-o", metavar="FILE")
    ] = None,
) -> None:
    """Write the manifests of a job: what stands after the options is the script and its arguments."""
    _write(options.job(script, arguments or []), out)


def _write(job: Any, out: Path | None) -> None:
    from cputrain.cluster import manifests

    text = manifests.job_text(job)
    if out is None:
        if job.volume and job.volume.size:
            raise ValueError("--create-pvc writes a file of its own, so that the job's never deletes data: give --out.")
        print(text, end="")
        return
    text_files.write(out, text, private=job.makes_token)  # a Secret stands in it
    files = {}
    if job.volume and job.volume.size:
        files[out.with_name(f"{out.stem}-volume{out.suffix or '.yaml'}")] = manifests.volume_text(job)
    for path, content in files.items():
        text_files.write(path, content)
    names = [out, *files]
    print(f"Written: {' and '.join(map(str, names))}. Next: cputrain k8s submit {' '.join(map(str, reversed(names)))}")


@command(app, CHECK_EXAMPLES)
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Manifests; - is standard input.")],
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Ask the cluster for its schemas, instead of those that are shipped.")
    ] = False,
    context: Annotated[str | None, typer.Option("--context", help="kubectl's context, for --cluster.")] = None,
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="SEVERITY", help="The mildest that makes the exit code 1: see above.")
    ] = "error",
    as_json: Annotated[bool, typer.Option("--json", help="For programs: all findings as one JSON object.")] = False,
) -> None:
    """Say what is wrong in manifests or will hurt, with line and remedy.

    An error is refused by the cluster or can't work; a warning starts, but won't do what is meant; a hint could be
    faster or safer. Files that are given together are seen together: a job, its volume, its runtime.

    The exit code is 0 if nothing is as grave as --fail-on (error, warning or hint), 1 with such findings, 2 if a file
    can't be read or has a kind that isn't known here.
    """
    from cputrain.cluster import check as rules
    from cputrain.cluster.kubectl import Kubectl
    from cputrain.cluster.manifest import SEVERITIES, reaches

    if fail_on not in SEVERITIES:
        raise ValueError(f"--fail-on must be one of {', '.join(SEVERITIES)}, found {fail_on!r}.")
    schemas = rules.of_cluster(Kubectl(context)) if cluster else None
    texts = {str(file): text_of(file) for file in files}
    found = rules.of_files(texts, schemas)
    unknown = {name: rules.unknown_kinds(text) for name, text in texts.items()}
    (_as_json if as_json else _as_lines)(found, unknown)
    failed = any(reaches(finding.severity, fail_on) for findings in found.values() for finding in findings)
    raise typer.Exit(2 if any(unknown.values()) else 1 if failed else 0)


def _as_lines(found: dict[str, list[Any]], unknown: dict[str, list[Any]]) -> None:
    for name, findings in found.items():
        for finding in findings:
            place = f" ({finding.path})" if finding.path else ""
            stop = "" if finding.sentence.endswith("?") else "."
            begin = f"{name}:{finding.line}: {finding.severity}: "
            print(on_a_terminal(begin, f"{finding.sentence}{stop}{place}", indent=4))
        for each in unknown[name]:
            print(f"{name}:{each.line}: {each.sentence}", file=sys.stderr)
    counts = [f"{count} {word}{'' if count == 1 else 's'}" for word, count in _counts(found).items()]
    print(f"{', '.join(counts)}.", file=sys.stderr)


def _as_json(found: dict[str, list[Any]], unknown: dict[str, list[Any]]) -> None:
    import json
    from dataclasses import asdict

    rows = [{"file": name, **asdict(finding)} for name, findings in found.items() for finding in findings]
    others = [{"file": name, **asdict(each)} for name, kinds in unknown.items() for each in kinds]
    print(json.dumps({"counts": _counts(found), "findings": rows, "unknown_kinds": others}, indent=2))


def _counts(found: dict[str, list[Any]]) -> dict[str, int]:
    from cputrain.cluster.manifest import SEVERITIES

    said = [finding.severity for findings in found.values() for finding in findings]
    return {severity: said.count(severity) for severity in SEVERITIES}


def text_of(file: Path) -> str:
    if str(file) == "-":
        try:
            return sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise ValueError("standard input is not UTF-8 text.") from None
    return text_files.read(file)
