"""The function table says what the C header says, and a library that can't serve is refused in one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cputrain
from cputrain import hardware, native

CSRC = Path(__file__).parents[3] / "csrc"
LETTERS = {"int64_t": "i", "uint64_t": "k", "float": "f", "double": "d"}


def letter(parameter: str) -> str:
    """`const float* x` is p, `int64_t rows` is i."""
    if parameter == "Scratch* scratch":
        return "s"
    if "*" in parameter:
        return "p"
    return LETTERS[parameter.replace("const ", "").split()[0]]


def prototypes(header: str) -> dict[str, str]:
    """Of kernels, KERNEL(name), and of collectives, cputrain_name."""
    code = re.sub(r"//.*", "", header)
    found = re.findall(r"CPUTRAIN_EXPORT void (?:KERNEL\(|cputrain_)(\w+)\)?\((.*?)\);", code, re.DOTALL)
    return {name: "".join(letter(part.strip()) for part in parameters.split(",")) for name, parameters in found}


def test_prototypes_are_read_as_they_are_written() -> None:
    header = (
        "// text\nCPUTRAIN_EXPORT void KERNEL(f)(const float* x, float* const* y,\n  int64_t n, float p, uint64_t key);"
    )
    assert prototypes(header) == {"f": "ppifk"}


def test_the_table_is_the_header() -> None:
    assert prototypes((CSRC / "api.h").read_text()) == native.SIGNATURES
    assert prototypes((CSRC / "api_collectives.h").read_text()) == native.COLLECTIVES


def test_every_kernel_is_there_for_every_instruction_set(isa: str) -> None:
    table = native.kernels_of(isa)
    assert table.isa == isa
    for name, letters in {**native.SIGNATURES, **native.COLLECTIVES}.items():
        function = getattr(table, name)
        if letters.endswith("s"):  # bound with its working memory
            (function,) = (cell.cell_contents for cell in function.__closure__)
        assert len(function.argtypes) == len(letters)


def load(library: Path | str, **environment: str) -> str:
    """What a fresh process says when it is given this library: empty if it loads."""
    code = (
        "from cputrain import native\n"
        "try:\n    native.kernels()\nexcept native.LibraryError as error:\n    print(error)"
    )
    environment = {**os.environ, "CPUTRAIN_LIBRARY": str(library), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def compiled(folder: Path, source: str) -> Path:
    """A small library in place of ours."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    assert compiler, "a C++ compiler built the library, so there is one"
    (folder / "other.cpp").write_text(source)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(folder / "other.so"), str(folder / "other.cpp")], check=True
    )
    return folder / "other.so"


VERSION_FUNCTION = 'extern "C" const char* cputrain_version() { return "%s"; }'


def test_the_library_itself_loads() -> None:
    assert load(native.LIBRARY) == ""


def test_a_missing_library() -> None:
    assert "was not found at /nowhere/lib.so; reinstall cputrain" in load("/nowhere/lib.so")


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("text")
    assert "can't be loaded" in load(tmp_path / "lib.so")


def test_another_library(tmp_path: Path) -> None:
    assert "can't be loaded" in load(compiled(tmp_path, 'extern "C" void nothing() {}'))


def test_a_library_of_another_version(tmp_path: Path) -> None:
    answer = load(compiled(tmp_path, VERSION_FUNCTION % "0.0.1"))
    assert f"is version 0.0.1, the Python package is {cputrain.__version__}; reinstall cputrain" in answer


def test_a_library_that_lacks_a_kernel(tmp_path: Path) -> None:
    answer = load(compiled(tmp_path, VERSION_FUNCTION % cputrain.__version__))
    assert "is older than the Python package" in answer
    assert str(tmp_path / "other.so") in answer


def test_the_forced_instruction_set_is_the_one_that_is_bound() -> None:
    code = "from cputrain import native; print(native.kernels().isa)"
    environment = {**os.environ, "CPUTRAIN_ISA": "portable"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout == "portable\n"


def test_the_compiler_and_the_choice_agree_on_what_an_instruction_set_needs() -> None:
    """A kernel compiled with a flag that `best_isa` doesn't ask for would crash on some CPU."""
    cmake = (Path(__file__).parents[3] / "CMakeLists.txt").read_text()
    for isa in ("avx2", "avx512"):
        flags = re.search(rf"set\(flags_{isa} ([^)]*)\)", cmake)[1].split()
        used = {flag.removeprefix("-m") for flag in flags if re.fullmatch(r"-m(avx\w*|fma|f16c)", flag)}
        assert used == set(hardware.ISA_NEEDS[isa])


@pytest.mark.parametrize("name", ["-march", "-mtune=native"])
def test_nothing_is_compiled_for_the_build_host(name: str) -> None:
    assert name not in (Path(__file__).parents[3] / "CMakeLists.txt").read_text()


def run_in_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    code = """
import torch
from cputrain.ops.dropout import dropout
dropout(torch.ones(512, 512), 0.5) @ torch.ones(512, 512)
maps = open("/proc/self/maps").read().split()
print(sorted({path for path in maps if "libgomp" in path or "libiomp" in path or "libomp" in path}))
"""
    assert run_in_fresh_process(code).count(".so") == 1


def test_torch_sets_the_number_of_threads() -> None:
    """Counted as the kernel sees them: the threads of a process that has run nothing but one of ours."""
    code = """
import os, torch
from cputrain.ops.dropout import dropout
torch.set_num_threads(1)
x = torch.ones(512, 512)
for threads in (1, 3):
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    dropout(x, 0.5)
    print(len(os.listdir("/proc/self/task")) - before)
"""
    assert run_in_fresh_process(code).split() == ["0", "2"]
