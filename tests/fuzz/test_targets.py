"""Every parser of this folder with what hypothesis makes of its seeds and words."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz import under_atheris

EXAMPLES = int(os.environ.get("CPUTRAIN_FUZZ_EXAMPLES", "300"))


def inputs(target: str) -> st.SearchStrategy[bytes]:
    """Words and noise in a row, or a seed of which a piece is replaced by some."""
    module = importlib.import_module(f"tests.fuzz.{target}")
    noise = st.one_of(st.binary(max_size=6), st.text(max_size=6).map(lambda text: text.encode(errors="surrogatepass")))
    made = st.lists(st.one_of(st.sampled_from(module.WORDS), noise), max_size=20).map(b"".join)
    return st.one_of(made, st.builds(_spliced, st.sampled_from(module.SEEDS), made, st.floats(0, 1), st.floats(0, 0.2)))


def _spliced(whole: bytes, piece: bytes, place: float, length: float) -> bytes:
    begin = int(place * len(whole))
    return whole[:begin] + piece + whole[begin + int(length * len(whole)) :]


@pytest.mark.parametrize("target", under_atheris.targets())
def test_nonsense_is_answered(target: str) -> None:
    check = importlib.import_module(f"tests.fuzz.{target}").check

    @seed(int(os.environ.get("CPUTRAIN_TEST_SEED", "0")))
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    @given(inputs(target))
    def tries(data: bytes) -> None:
        check(data)

    tries()


@pytest.mark.parametrize("target", under_atheris.targets())
def test_the_seeds_are_answered(target: str) -> None:
    module = importlib.import_module(f"tests.fuzz.{target}")
    for data in [*module.SEEDS, b"", *_found(target)]:
        module.check(data)


def _found(target: str) -> list[bytes]:
    """Inputs that once went wrong."""
    folder = Path(__file__).parent / "found" / target
    return [path.read_bytes() for path in sorted(folder.glob("*"))]


def test_every_parser_has_a_file() -> None:
    assert {"hostfile", "configuration", "manifest"} <= set(under_atheris.targets())
