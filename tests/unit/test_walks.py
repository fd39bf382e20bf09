"""The walks of docs/architecture.md (a step, a launch, a render) name files and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# "3. `blocks/encoder.py`, `ragged_forward`: …", within src/cputrain unless it begins with csrc.
HOPS = re.findall(r"^\d+\. `([\w/.]+\.(?:py|cpp))`(?:, `((?!\w+\.py)[\w.]+)`)?", PAGE, re.MULTILINE)


def test_there_are_three_walks() -> None:
    assert len(re.findall(r"^1\. `", PAGE, re.MULTILINE)) == 3
    assert len(HOPS) >= 20


@pytest.mark.parametrize(("file", "name"), HOPS)
def test_a_hop_exists(file: str, name: str) -> None:
    path = ROOT / file if file.startswith("csrc/") else ROOT / "src" / "cputrain" / file
    source = path.read_text()
    for part in filter(None, name.split(".")):
        assert re.search(rf"^ *(?:def|class) {re.escape(part)}\b", source, re.MULTILINE), f"no {part} in {file}"
