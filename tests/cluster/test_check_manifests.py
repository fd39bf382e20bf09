"""`k8s check` over files: examples as the operators' projects publish them are in order, each planted fault is found.

Every file says itself what is expected: the comment `# error: part of the sentence` (or warning, or hint) stands in the
line of the finding. Hints that no comment asks for are allowed, warnings and errors aren't.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cputrain.cluster import check
from cputrain.cluster.check import Finding

FOLDER = Path(__file__).parent / "manifests"
GOOD, FAULTY = (sorted((FOLDER / name).glob("*.yaml")) for name in ("good", "faulty"))
_EXPECTED = re.compile(r"# (error|warning|hint): (.+)$")
# Each sentence says what to do: after a colon or a semicolon, or as a question.
_REMEDY = re.compile(r"[:;] \S|did you mean .+\?")


def expected(text: str) -> list[tuple[int, str, str]]:
    """(line, severity, part of the sentence) that the comments of a file ask for."""
    rows = enumerate(text.splitlines(), start=1)
    return [(number, *found.groups()) for number, line in rows if (found := _EXPECTED.search(line))]


def matches(finding: Finding, wanted: tuple[int, str, str]) -> bool:
    line, severity, part = wanted
    return (finding.line, finding.severity) == (line, severity) and part in finding.sentence


@pytest.mark.parametrize("path", [*GOOD, *FAULTY], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_has_the_findings_that_it_says(path: Path) -> None:
    text = path.read_text()
    found, wanted = check.findings(text), expected(text)
    for each in wanted:
        assert [finding for finding in found if matches(finding, each)], (each, found)
    unasked = [finding for finding in found if not any(matches(finding, each) for each in wanted)]
    assert [finding for finding in unasked if finding.severity != "hint"] == []
    assert all(_REMEDY.search(finding.sentence) for finding in found), found
    assert check.unknown_kinds(text) == []


def test_there_are_enough() -> None:
    """At least 30 examples without an error, at least 40 files with exactly one fault."""
    assert len(GOOD) >= 30
    assert all(severity != "error" for path in GOOD for _, severity, _ in expected(path.read_text()))
    assert len(FAULTY) >= 40
    assert {path.name: len(expected(path.read_text())) for path in FAULTY} == {path.name: 1 for path in FAULTY}


def test_a_c_program_gets_no_advice_on_data_loaders() -> None:
    for path in GOOD:
        if re.search("job_pi|flux|nccl_tests|script_and_queue", path.stem):
            assert "data loaders" not in str(check.findings(path.read_text())), path.name
    assert "data loaders" in str(check.findings((FOLDER / "good" / "pytorchjob_torchrun_cpu.yaml").read_text()))
