"""The doctor fits one screen, says why, and tells apart what the user can mend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from cputrain import hardware
from cputrain.cli import doctor, env


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cputrain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.fixture(scope="module")
def found() -> Mapping[str, object]:
    """What `doctor --json` prints here, with the portable kernels forced."""
    answer = run("doctor", "--json", CPUTRAIN_ISA="portable", OMP_NUM_THREADS="1")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def facts(machine: hardware.Hardware) -> Mapping[str, hardware.Fact]:
    return {name: fact for name, fact in vars(machine).items() if isinstance(fact, hardware.Fact)}


def test_json_has_every_fact_with_its_source(found) -> None:
    expected = facts(hardware.detect())
    assert found["hardware"].keys() == expected.keys()
    for name, fact in found["hardware"].items():
        assert fact["source"], name
    assert found["hardware"]["usable_cores"]["value"] == expected["usable_cores"].value


def test_json_says_which_kernels_run_and_why(found) -> None:
    assert found["kernels"] == {"isa": "portable", "reason": "CPUTRAIN_ISA=portable", "problem": None}


def test_json_says_what_auto_means_here_and_why(found) -> None:
    assert found["auto"]["value"] in ("fp32", "int16", "bf16")
    assert hardware.this_machine().model.value in found["auto"]["source"]


def test_json_has_threads_and_one_openmp_runtime(found) -> None:
    assert found["threads"]["torch"] == 1
    assert found["threads"]["omp_num_threads"] == "1"
    assert len(found["threads"]["runtimes"]) == 1, "ours must share torch's"


def test_json_says_what_is_installed_around(found) -> None:
    installed = found["installation"]
    assert installed["python"]["value"].startswith("{}.{}.".format(*sys.version_info))
    assert "Linux" in installed["system"]["value"]
    assert installed["allocator"]["value"].startswith("glibc's")
    assert installed["bad_preloads"] == []


def test_warnings_count_only_under_strict() -> None:
    environment = {"CPUTRAIN_ISA": "portable", "COLUMNS": "400"}
    lenient, strict = run("doctor", **environment), run("doctor", "--strict", **environment)
    assert (lenient.returncode, strict.returncode) == (0, 1)
    assert "! CPUTRAIN_ISA=portable chooses the kernels" in strict.stdout and "unset it." in strict.stdout


def test_a_library_that_cannot_be_preloaded_is_named_with_a_remedy() -> None:
    answer = run("doctor", COLUMNS="400", LD_PRELOAD="/nowhere/libtcmalloc.so.4")
    assert "! LD_PRELOAD names /nowhere/libtcmalloc.so.4, which can't be loaded: correct its path" in answer.stdout


def test_one_screen_of_eighty_columns() -> None:
    answer = run("doctor", COLUMNS="80", CPUTRAIN_ISA="portable")
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0, answer.stderr
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    labels = {line.split()[0] for line in lines if line and not line.startswith(" ")}
    assert {"CPU", "sets", "cores", "sockets", "NUMA", "caches", "memory"} <= labels
    assert {"affinity", "cpuset", "quota", "limit", "usable", "kernels", "auto", "threads", "packages"} <= labels
    assert {"Python", "system", "malloc", "MPI"} <= labels
    assert "CPUTRAIN_ISA=portable" in answer.stdout


def test_a_missing_library_is_told_and_ends_with_one() -> None:
    answer = run("doctor", CPUTRAIN_LIBRARY="/nowhere/lib.so", COLUMNS="400")
    assert answer.returncode == 1
    assert "does NOT load" in answer.stdout
    assert "/nowhere/lib.so" in answer.stdout
    assert "Traceback" not in answer.stderr


def test_a_missing_torch_is_told(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    answer = run("doctor", PYTHONPATH=str(tmp_path), COLUMNS="400")
    assert answer.returncode == 1
    assert "torch can't be imported (no torch here)" in answer.stdout
    assert "Traceback" not in answer.stderr


def test_a_wrong_isa_is_one_sentence_and_exit_code_two() -> None:
    answer = run("doctor", CPUTRAIN_ISA="avx1024")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("cputrain: CPUTRAIN_ISA must be one of avx512, avx2, portable, found 'avx1024'")
    assert len(answer.stderr.splitlines()) == 1


def test_version_and_help() -> None:
    assert run("--version").stdout == "cputrain 0.1.0\n"
    assert "doctor" in run("--help").stdout


def test_an_error_of_a_library_keeps_its_traceback() -> None:
    code = (
        "import json, sys\n"
        "from cputrain import cli\n"
        "from cputrain.cli import doctor\n"
        "doctor.examine = lambda: json.loads('{')\n"
        "sys.argv = ['cputrain', 'doctor']; cli.main()"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "JSONDecodeError" in answer.stderr


ALL_WELL = doctor.Kernels("avx2", "it has avx2", None)


def advice_for(threads: doctor.Threads, usable: int, kernels: doctor.Kernels = ALL_WELL) -> list[str]:
    machine = hardware.detect()
    cores = hardware.Fact(usable, "a test")
    machine = hardware.Hardware(**{**facts(machine), "usable_cores": cores})
    return list(doctor._advice(machine, kernels, threads))


def test_advice() -> None:
    one_runtime = ("/lib/libgomp.so.1",)
    assert advice_for(doctor.Threads(2, None, one_runtime), usable=2) == []
    assert advice_for(doctor.Threads(8, None, one_runtime), usable=2) == [
        "torch uses 8 threads, but 2 cores may be used: set OMP_NUM_THREADS=2."
    ]
    assert advice_for(doctor.Threads(1, "1", one_runtime), usable=4) == [
        "torch uses 1 thread, but 4 cores may be used: set OMP_NUM_THREADS=4."
    ]
    two = advice_for(doctor.Threads(2, None, ("/a/libgomp.so.1", "/b/libiomp5.so")), usable=2)
    assert len(two) == 1
    assert "libiomp5.so" in two[0] and "Keep torch's" in two[0]
    broken = doctor.Kernels("avx2", "it has avx2", "the library is gone")
    assert advice_for(doctor.Threads(2, None, one_runtime), 2, broken) == ["the library is gone"]


def test_advice_on_packages() -> None:
    installed = env.Installation(*[hardware.Fact("x", "a test")] * 4, bad_preloads=())
    missing = list(doctor._advice_on(installed, {"torch": "2.8", "numpy": None, "transformers": None}))
    assert len(missing) == 2 and "pip install numpy" in missing[0] and 'pip install "cputrain[hf]"' in missing[1]
    assert list(doctor._advice_on(installed, {"torch": "2.8", "numpy": "2", "transformers": "5"})) == []


def test_openmp_runtimes_are_found_in_folders_with_blanks() -> None:
    mapped = ("/a b/torch/lib/libgomp-1.so.1.0.0", "/x/libiomp5.so", "/x/libgompy.so")
    maps = "".join(f"7f r-xp 00 08 1  {path}\n" for path in mapped)
    assert env.openmp_runtimes(maps) == mapped[:2]


def test_env_has_what_a_bug_report_needs_and_no_secret() -> None:
    secrets = {"CPUTRAIN_TOKEN": "hush", "HF_TOKEN": "hush", "ACCELERATE_API_KEY": "hush"}
    answer = run("env", OMP_NUM_THREADS="1", CPUTRAIN_ISA="portable", **secrets)
    assert answer.returncode == 0, answer.stderr
    lines = dict(line.split(maxsplit=1) for line in answer.stdout.splitlines())
    assert (
        lines["cputrain"].startswith("0.1.0, /") and lines["torch"][0].isdigit() and lines["OMP_NUM_THREADS"] == "'1'"
    )
    assert {
        "Python",
        "system",
        "transformers",
        "CPU",
        "kernels",
        "OpenMP",
        "allocator",
        "MPI",
        "warning",
    } <= lines.keys()
    assert (
        lines["CPUTRAIN_TOKEN"] == "(set, not shown)"
        and "hush" not in answer.stdout
        and "HF_TOKEN" not in answer.stdout
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "unknown"), (0, "0 B"), (49152, "48 KiB"), (272629760, "260 MiB"), (25274793984, "23.5 GiB")],
)
def test_bytes(number: int | None, text: str) -> None:
    assert doctor.in_bytes(number) == text


def test_ranges_read_as_the_kernel_writes_them() -> None:
    assert doctor._ranges((0, 1, 2, 8)) == "0-2,8"
    assert doctor._ranges(()) == "none"


def test_the_avx512_family_says_its_name_once() -> None:
    assert doctor._sets(("avx2", "avx512_vnni", "avx512bw", "avx512f")) == "avx2 avx512(bw f _vnni)"
    assert doctor._sets(("avx2",)) == "avx2"
