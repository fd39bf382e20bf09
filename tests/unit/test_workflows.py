"""The workflows of .github: what they start exists, they keep no secret, and only the release may publish.

actionlint checks the rest; it isn't on PyPI with its binary, so that `make lint` can't.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not FILES, reason="an sdist has no workflows")


def jobs(file: Path) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(file)["jobs"]


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(file).values() for step in job.get("steps", [])]


def commands(file: Path) -> str:
    return "\n".join(step.get("run", "") for step in steps(file))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_it_starts_exists(file: Path) -> None:
    said, makefile = commands(file), (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", said, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"(?<![\w/.])(?:examples|src|\.ci)/[\w./]+", said):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"-m (tests[\w.]*)", said):
        assert (ROOT / module.replace(".", "/")).exists(), module
    for called in re.findall(r"uses: \./(\S+)", file.read_text()):
        assert (ROOT / called).is_file(), called


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_artifact_that_is_fetched_was_made(file: Path) -> None:
    made = {step["with"]["name"] for other in FILES for step in steps(other) if "upload-artifact" in str(step)}
    wanted = [step["with"] for step in steps(file) if "download-artifact" in str(step)]
    assert all(one.get("name") in made or one.get("pattern") == "dist-*" for one in wanted)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_may_read_and_nothing_more(file: Path) -> None:
    text = file.read_text()
    assert "secrets." not in text and "password" not in text
    assert re.search(r"^permissions:\n  contents: read\n(?! )", text, re.MULTILINE)
    more = {name: job["permissions"] for name, job in jobs(file).items() if "permissions" in job}
    assert more == ({"publish": {"id-token": "write"}} if file.stem == "release" else {})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_action_has_a_version_and_every_job_an_end(file: Path) -> None:
    assert all(
        re.fullmatch(r"[\w.-]+/[\w.-]+@(?:v\d+|release/v\d+)", step["uses"]) for step in steps(file) if "uses" in step
    )
    assert all("timeout-minutes" in job for job in jobs(file).values() if "uses" not in job)
