"""Freed memory stays with the process, until it is released; other allocators are left alone."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cputrain import memory, native

MB = 1 << 20
ROOT = Path(__file__).parents[2]


def faults_of_a_buffer(size: int) -> int:
    """Page faults of allocating, filling and freeing it; one of 4 KB each, if its memory was not kept."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(size, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def a_freed_buffer_is_used_again() -> None:
    kept = memory.keep_freed_memory()
    assert kept.active
    # The first one is larger than the second, because an aligned block needs a little more than its size.
    faults_of_a_buffer(28 * MB)
    assert faults_of_a_buffer(24 * MB) < 200  # of 6,144
    assert memory.keep_freed_memory() == kept


def huge_buffers_of_varying_size_cost_no_memory() -> None:
    """As logits do: in each step some larger ones, with something small that stays between them."""
    memory.keep_freed_memory()
    before, stays = resident(), []
    for size in range(40, 64, 4):
        logits = torch.ones(size * MB, dtype=torch.uint8)
        stays.append(torch.ones(MB, dtype=torch.uint8))
        gradient = torch.ones((size + 2) * MB, dtype=torch.uint8)
        stays.append(torch.ones(MB, dtype=torch.uint8))
        del logits, gradient
    assert resident() < before + 32 * MB, "12 MB are in use"


def freed_blocks_have_room_for_the_next_of_their_sizes() -> None:
    """Small blocks that stay, as a program's, take what glibc's aligned blocks leave beside them."""
    memory.keep_freed_memory()
    rng = random.Random(0)
    sizes, stays, found = [rng.randrange(1 << 16, 8 * MB) for _ in range(60)], [], []
    for _step in range(16):
        blocks = []
        for size in sizes:
            blocks.append(torch.ones(size, dtype=torch.uint8))
            stays += [bytearray(700), torch.ones(6)]
            assert blocks[-1].data_ptr() % 64 == 0
        rng.shuffle(blocks)
        while blocks:
            blocks.pop()
        rng.shuffle(sizes)
        found.append(resident())
    assert found[-1] < found[0] + 64 * MB, [size // MB for size in found]


def release_gives_it_back() -> None:
    memory.keep_freed_memory()
    between = torch.ones(28 * MB, dtype=torch.uint8), torch.ones(28 * MB, dtype=torch.uint8)
    stays = torch.ones(MB, dtype=torch.uint8)  # above them in the heap
    del between
    before = resident()
    memory.release()
    assert resident() < before - 48 * MB
    del stays


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
@pytest.mark.parametrize(
    "what",
    [
        a_freed_buffer_is_used_again,
        huge_buffers_of_varying_size_cost_no_memory,
        freed_blocks_have_room_for_the_next_of_their_sizes,
        release_gives_it_back,
    ],
)
def test_freed_memory(what):
    """In a process of its own: where a buffer goes depends on the holes that earlier tests left."""
    script = f"from {__name__} import {what.__name__}; {what.__name__}()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# C's own blocks, and nothing imported that isn't needed: an object of Python's that comes to lie above keeps them all.
_AFTER_RELEASE = """
import ctypes
from cputrain import memory
c = ctypes.CDLL(None)
c.malloc.restype = c.sbrk.restype = ctypes.c_void_p
memory.keep_freed_memory()
memory.release()
several = [c.malloc(28 << 20) for _ in range(6)]
most = c.sbrk(0)
for address in reversed(several):
    c.free(ctypes.c_void_p(address))
print((most - c.sbrk(0)) >> 20)
"""


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
def test_after_release_the_heap_shrinks_again():
    done = subprocess.run([sys.executable, "-c", _AFTER_RELEASE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100, "168 MB were freed, of which glibc usually keeps 64"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("sys.platform", "darwin"), "darwin"),
        (("platform.libc_ver", lambda: ("", "")), "isn't glibc"),
        (("cputrain.memory._home_of", lambda name: f"lib{name}.so"), "libmalloc.so"),
    ],
)
def test_what_isnt_glibcs_is_left_alone(monkeypatch, changed, words):
    monkeypatch.setattr(memory, "_set", lambda options: pytest.fail("mallopt was called"))
    monkeypatch.setattr(*changed)
    record = memory.keep_freed_memory()
    assert not record.active
    assert words in record.reason
    memory.release()


def test_only_a_loaded_library_that_asks_for_aligned_blocks_is_changed() -> None:
    assert not native.aligned_blocks("libnone.so", True)
    assert not native.aligned_blocks(native.LIBRARY.name.replace("native", "other"), True)


@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="there is no python3 of the system's")
def test_an_executable_with_fixed_addresses_is_no_allocator():
    """Debian's python3 is one: malloc's address lies in the executable, and glibc serves it all the same."""
    script = "from cputrain import memory; print('why_not:', memory.why_not())"
    environ = {"PYTHONPATH": str(Path(memory.__file__).parents[1])}
    answer = subprocess.run(["/usr/bin/python3", "-c", script], env=environ, capture_output=True, text=True)
    assert answer.stdout == "why_not: \n", answer.stderr


def test_a_preloaded_allocator_is_recognised(tmp_path):
    """A library that brings a malloc of its own, as tcmalloc and jemalloc do."""
    source = tmp_path / "own.c"
    source.write_text(
        "void *__libc_malloc(unsigned long);\nvoid *malloc(unsigned long n) { return __libc_malloc(n); }\n"
    )
    library = tmp_path / "libown_malloc.so"
    compiled = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    script = "from cputrain import memory; print(memory.keep_freed_memory().reason)"
    path = ":".join(sys.path)
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env={"LD_PRELOAD": str(library), "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "libown_malloc.so" in answer.stdout, answer.stderr
