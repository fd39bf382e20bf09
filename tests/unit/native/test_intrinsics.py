"""Intrinsics, builtins of one CPU and assembly stand in two headers: all other code is plain C++ with their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[3] / "csrc"
HOMES = {CSRC / "kernels" / "simd.h", CSRC / "kernels" / "simd_int16.h"}
INTRINSIC = re.compile(
    r"""\b_mm\d*_\w+ | \b__m\d+\w*\b | \b__mmask\d+\b | \b_MM_\w+ | \b_cvt\w+    # Intel's functions and types
    | \b__builtin_(?:ia32|cpu|aarch64|neon)_\w+ | \b_?_?cpuid\w* | \w*_pause\b   # compilers' own
    | \b(?:__)?asm(?:__)?\b
    | \#\s*include\s*[<"][^>"]*(?:intrin|cpuid|arm_neon|arm_sve)[^>"]*\.h""",
    re.VERBOSE,
)


def code_of(file: Path) -> str:
    return re.sub(r"//.*", "", file.read_text())


def sources() -> list[Path]:
    return sorted(file for file in CSRC.rglob("*") if file.suffix in (".h", ".cpp"))


@pytest.mark.parametrize(
    "line",
    [
        "#include <immintrin.h>",
        "#include <cpuid.h>",
        "Vec v = (Vec)_mm256_add_ps(a, b);",
        "typedef __m128i Words;",
        "__builtin_ia32_pause();",
        "_mm_pause();",
        '__builtin_cpu_supports("avx2")',
        'asm volatile("" : "+x"(v));',
        "__cpuid(1, a, b, c, d);",
        "_cvtsh_ss(x)",
    ],
)
def test_what_is_looked_for_is_found(line: str) -> None:
    assert INTRINSIC.search(line)


def test_only_two_headers_have_intrinsics() -> None:
    assert set(sources()) >= HOMES
    found = {
        str(file.relative_to(CSRC)): sorted(set(INTRINSIC.findall(code_of(file))))
        for file in sources()
        if file not in HOMES and INTRINSIC.search(code_of(file))
    }
    assert not found, f"use or add a name of kernels/simd.h or kernels/simd_int16.h: {found}"


def test_no_file_is_long() -> None:
    long = {str(file.relative_to(CSRC)): len(file.read_text().splitlines()) for file in sources()}
    assert not {name: lines for name, lines in long.items() if lines > 380}
