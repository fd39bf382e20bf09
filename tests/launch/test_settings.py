"""OpenMP's settings, the allocator and variables for other machines: only what is there, and no secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from cputrain.launch import cores, plan
from cputrain.launch.config import Config, environment_of


def test_the_runtime_is_the_one_that_torch_loads(tmp_path: Path) -> None:
    import torch

    del torch
    assert cores.openmp_runtime({})[0] in Path("/proc/self/maps").read_text().replace("libgomp", "GNU").replace(
        "libiomp5", "Intel"
    )
    (tmp_path / "lib").mkdir()
    deps = tmp_path / "lib" / "libtorch_global_deps.so"
    for name, kind in (("libiomp5.so", "Intel"), ("libgomp-a34b3233.so.1", "GNU"), ("libomp.so.5", "LLVM")):
        deps.write_bytes(b"\x7fELF\0libc.so.6\0" + name.encode() + b"\0")
        assert cores.openmp_runtime({}, tmp_path)[0] == kind
    deps.write_bytes(b"\x7fELF\0libc.so.6\0")
    assert cores.openmp_runtime({}, tmp_path)[0] == "unknown"


def test_a_preloaded_runtime_wins() -> None:
    environ = {"LD_PRELOAD": "/x/libtcmalloc.so.4:/opt/lib/libiomp5.so"}
    assert cores.openmp_runtime(environ) == ("Intel", "LD_PRELOAD=/opt/lib/libiomp5.so")


def test_each_runtime_gets_its_own_settings() -> None:
    assert cores.openmp_settings("GNU", crowded=False) == {}
    assert cores.openmp_settings("GNU", crowded=True) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert cores.openmp_settings("Intel", crowded=False) == {"KMP_BLOCKTIME": "1"}
    assert cores.openmp_settings("unknown", crowded=True) == {}


# --- The allocator -----------------------------------------------------------------------------------------------


def some_library() -> str:
    """One that is in every process here, and so can be preloaded."""
    return next(line.split()[-1] for line in open("/proc/self/maps") if "/libm.so" in line or "/libm-" in line)


def test_only_what_loads_is_preloaded(tmp_path: Path) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"nothing")
    there = some_library()
    kept, warnings = cores.preload("default", {"LD_PRELOAD": f"{there}:{broken} libtcmalloc.so.4.5.9"})
    assert kept == there
    assert [f"{broken}, which can't be loaded" in warnings[0], "libtcmalloc.so.4.5.9" in warnings[1]] == [True, True]


def test_an_allocator_is_found_and_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of libjemalloc\.so\.2 was found; apt install libjemalloc2"):
        cores.preload("jemalloc", {}, (str(tmp_path),))
    (tmp_path / "libjemalloc.so.2").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="none of"):
        cores.preload("jemalloc", {}, (str(tmp_path),))
    (tmp_path / "libjemalloc.so.2").unlink()
    (tmp_path / "libjemalloc.so.2").symlink_to(some_library())
    assert cores.preload("jemalloc", {}, (str(tmp_path),)) == (f"{tmp_path}/libjemalloc.so.2", [])


# --- Variables ---------------------------------------------------------------------------------------------------


def test_what_a_training_gets() -> None:
    config = Config(env=("A=b=c", "OMP_NUM_THREADS=2"), cores_for_communication=1, mixed_precision="bf16")
    added, warnings = environment_of(config, {}, threads=5)
    assert added == {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "CPUTRAIN_IPEX": "true",
        "CPUTRAIN_CORES_FOR_COMMUNICATION": "1",
        "A": "b=c",
        "OMP_NUM_THREADS": "2",
    }
    assert warnings == []
    ours = environment_of(Config(grad_compression="bf16", balance="off"), {})[0]
    assert (ours["CPUTRAIN_GRAD_COMPRESSION"], ours["CPUTRAIN_BALANCE"]) == ("bf16", "off")
    assert "OMP_NUM_THREADS" not in environment_of(Config(), {})[0], "each rank counts on its own machine"


def test_what_reaches_other_machines() -> None:
    inherited = {
        "HOME": "/root",
        "HOSTNAME": "here",
        "OMP_NUM_THREADS": "23",
        "HF_TOKEN": "t",
        "CCL_WORKER_COUNT": "1",
        "CPUTRAIN_PARENT": "1",
        "PYTHONPATH": "/x",
        "REQUESTS_CA_BUNDLE": "/ca",
    }
    found = plan.forwarded(inherited, {"MINE": "1"})
    assert inherited.keys() - found.keys() == {"HOME", "HOSTNAME", "CPUTRAIN_PARENT"} and found["MINE"] == "1"
