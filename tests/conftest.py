"""Fixtures that every kernel test shares: each instruction set that this CPU runs, and 1, 2 and 3 threads."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from cputrain import hardware, native
from cputrain.formats import choose

HERE = Path(__file__).parent
WAITING = ("cluster", "distributed", "examples", "launch", "wheels")
_ORDER = ["portable", "avx2", "avx512"]
RUNNABLE = _ORDER[: _ORDER.index(hardware.best_isa(environ={})[0]) + 1]


@pytest.fixture(params=RUNNABLE)
def isa(request, monkeypatch):
    """Runs the test once per instruction set, with `native.kernels()` bound to it."""
    monkeypatch.setattr(native, "kernels", lambda: native.kernels_of(request.param))
    return request.param


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """Runs the test with 1, 2 and 3 OpenMP threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(int(os.environ.get("CPUTRAIN_TEST_SEED", "0")))


@pytest.fixture(autouse=True)
def auto_is_fp32(request, monkeypatch):
    """Tests that name no precision run in fp32, whatever this CPU is fast at; `chooses_precision` leaves the choice."""
    if request.node.get_closest_marker("chooses_precision") is None:
        choice = choose.Choice("fp32", "fp32", "auto: fixed for tests")
        monkeypatch.setattr(choose, "automatic", lambda measured=True: choice)


def pytest_configure() -> None:
    """A shell that starts us in the background has us ignore Ctrl-C, and all that we start: some tests are about it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests wait alternate with files whose tests compute: workers of `-n` take them in this order."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [file for file in files if file.relative_to(HERE).parts[0] in WAITING]
    computing = [file for file in files if file not in waiting]
    pairs = itertools.zip_longest(waiting, computing)
    items[:] = [item for pair in pairs for file in pair if file is not None for item in files[file]]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`needs_program("ip", "iproute2")`: skipped where the program is missing, but CI installs it and must not skip."""
    for mark in item.iter_markers("needs_program"):
        program, package = mark.args
        if shutil.which(program) is None:
            reason = f"needs {program}, from the root package {package}"
            if os.environ.get("CI"):
                pytest.fail(f"{reason}, which .ci/run should have installed", pytrace=False)
            pytest.skip(reason)
