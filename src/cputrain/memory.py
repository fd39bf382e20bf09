"""Freed memory stays with the process, so that a training step doesn't ask the kernel for the same buffers again.

glibc gives large blocks back to the kernel when they are freed, and the next step pays for them once more: a page fault
and 4 KB of zeros at a time. `keep_freed_memory` tells it to keep them, except for those of 32 MB and more, and torch
takes its blocks in a way that lets them fit again (csrc/aligned_blocks.cpp). Nothing has to be preloaded, and a process
that did preload another allocator is left alone.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass

from cputrain.log import logger

_MB = 1 << 20
# From <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4

# Blocks of 32 MB and more (logits, a vocabulary's gradient) are mapped and given back at once, although that costs
# their page faults: they have another size in each step, and in a heap that never shrinks they leave holes that the
# next ones don't fit. The allocations of training on 4 - 8 sequences of 64 - 256 tokens with AdamW, replayed on an AMD
# EPYC (glibc 2.36, 4 KB pages): page faults of a step (median), peak memory.
#                                        BERT 6x384, masked LM   SmolLM-135M
#   allocated at one time, at most                    923 MB              3,609 MB
#   glibc's own setting                  179,000      994       275,000   4,235     (stock: 1,478 and 4,943 MB)
#   these                                179,000      993       298,000   4,237
#   nothing mapped, as it was before           6    1,614            33   4,386
#   the same, malloc_trim at 1.1 x live  152,000    1,026
# Models without such blocks have no faults at all: BERT 6x384 for questions, 12x384 tokens, 1 where glibc's own setting
# has 79,000 (Emerald Rapids).
_KEEP = {
    _MMAP_MAX: 65536,
    _MMAP_THRESHOLD: 32 * _MB,  # the largest that glibc accepts
    _TRIM_THRESHOLD: 2**31 - 1,  # the heap never shrinks
}
# What glibc's own adaptation arrives at in any process that has freed a block of 32 MB, as torch's do.
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * _MB, _TRIM_THRESHOLD: 64 * _MB}


@dataclass(frozen=True)
class Kept:
    """Whether freed memory stays with the process, and why or why not."""

    active: bool
    reason: str


def keep_freed_memory() -> Kept:
    """Keep freed buffers for reuse from now on, in this process; harmless when repeated."""
    found = why_not()
    if found:
        logger.info("freed memory is left to the allocator: %s", found)
        return Kept(False, found)
    _set(_KEEP)
    if not _blocks_that_fit_again(True):
        return Kept(True, "glibc keeps freed blocks for reuse; torch's own way to take them leaves gaps")
    return Kept(True, "glibc keeps freed blocks for reuse")


def release() -> None:
    """Back to glibc's usual behaviour, and what is free goes back to the kernel."""
    if not why_not():
        _set(_USUAL)
        _blocks_that_fit_again(False)
        give_back()


def give_back() -> None:
    """What is free now goes back to the kernel."""
    if not why_not():
        ctypes.CDLL(None).malloc_trim(0)


def _set(options: dict[int, int]) -> None:
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in options.items():
        if mallopt(option, value) != 1:
            raise RuntimeError(f"glibc refused mallopt({option}, {value})")


def _blocks_that_fit_again(ours: bool) -> bool:
    """Whether torch now takes its blocks from our library, or again from glibc."""
    from cputrain import native  # here: it imports torch

    try:
        return native.aligned_blocks("libc10.so", ours)
    except native.LibraryError:
        return False


def why_not() -> str:
    """Why glibc's malloc can't be told anything here; empty if it can."""
    if sys.platform != "linux":
        return f"only glibc's allocator is known to cputrain, this is {sys.platform}"
    if platform.libc_ver()[0] != "glibc":
        return "the C library isn't glibc"
    glibc = _home_of("gnu_get_libc_version")
    # An executable with fixed addresses, as Debian's python3, shows its own entry for malloc, wherever it leads. There
    # is none for what it doesn't call, and every allocator that serves a whole process brings malloc_usable_size.
    own = (glibc, _home_of("Py_Initialize"))
    for function, homes in (("malloc", own), ("posix_memalign", own), ("malloc_usable_size", (glibc,))):
        if _home_of(function) not in homes:
            return f"another allocator serves this process ({_home_of(function)})"
    return ""


class _Place(ctypes.Structure):
    """`Dl_info`: where an address belongs."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _home_of(function: str) -> str:
    """The library that a function of this process comes from."""
    process = ctypes.CDLL(None)
    place = _Place()
    if not process.dladdr(ctypes.cast(getattr(process, function), ctypes.c_void_p), ctypes.byref(place)):
        return "unknown"
    return (place.file or b"unknown").decode()
