"""Zeros in memory that is used again as soon as no tensor lies in it.

The gradient of an embedding table is as large as the table and nearly all zeros. Its owner is the user, who drops it
in `zero_grad`; mapped anew in each step, its pages cost more than all that is written to them (4 KB each, cleared by
the kernel and again by us). So the memory belongs to a block here, and a tensor in it holds a reference to the block.
"""

from __future__ import annotations

import mmap
import sys
import threading

import torch
from torch import Tensor

# What lies idle between steps: the table of a small BERT (47 MB), or of a base one (94 MB). A larger model's step is
# long beside its page faults.
MOST_KEPT = 128 << 20
_WORTHWHILE = 1 << 20  # smaller blocks come from the heap, which doesn't give them back


def _references(blocks: list[mmap.mmap], place: int) -> int:
    return sys.getrefcount(blocks[place])


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked process has its own


_IDLE = _references([_map(mmap.PAGESIZE)], 0)  # of a block in which no tensor lies
_blocks: list[mmap.mmap] = []
_lock = threading.Lock()


def zeros(rows: int, cols: int) -> Tensor:
    """As torch's, in fp32."""
    size = 4 * rows * cols
    if not _WORTHWHILE <= size <= MOST_KEPT:
        return torch.zeros(rows, cols, dtype=torch.float32)
    with _lock:
        whole = torch.frombuffer(_block(size), dtype=torch.float32)
    return torch.empty(0, dtype=torch.float32).set_(whole.untyped_storage(), 0, (rows, cols)).zero_()


def clear() -> None:
    """Gives up what is idle; what is in use goes with its tensor."""
    with _lock:
        _blocks.clear()


def _block(size: int) -> mmap.mmap:
    """An idle block of this size; it is in use as soon as a tensor is made of it."""
    idle = (i for i in range(len(_blocks)) if len(_blocks[i]) == size and _references(_blocks, i) <= _IDLE)
    place = next(idle, None)
    block = _map(size) if place is None else _blocks.pop(place)
    _blocks.append(block)
    while sum(map(len, _blocks)) > MOST_KEPT:  # what was used least recently
        _blocks.pop(0)
    return block
