"""Finds and loads the native library and binds the kernels of one instruction set.

The library is plain C (see csrc/api.h) and resolves its OpenMP symbols to the runtime that torch loaded, so torch is
imported first. `kernels()` is the one function table; every operator calls through it. Kernels allocate nothing: the
table gives each its working memory, which torch allocates, and which this thread keeps for the next call.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch  # also brings the OpenMP runtime that the library's symbols resolve to

from cputrain import __version__, hardware, settings

LIBRARY = Path(__file__).parents[1] / "lib" / "libcputrain_native.so"

_POINTER, _INT, _KEY, _FLOAT, _DOUBLE = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_float,
    ctypes.c_double,
)

# One letter an argument: p pointer, i int64, k uint64 (random key), f float, d double, s working memory, which comes
# last and which callers don't give. Mirrors csrc/api.h, and COLLECTIVES csrc/api_collectives.h; a test compares them.
SIGNATURES = {
    "activation": "pppp" + "iii",
    "activation_backward": "ppipppp" + "iii" + "s",
    "round_to_bf16": "ppp" + "ii",
    "read_bf16": "pppp" + "ii",
    "round_to_int16": "ppii",
    "read_int16": "ppii",
    "attention_forward": "ps",
    "attention_backward": "pps",
    "adam": "ipppppp" + "ddddd" + "is",
    "sgd": "ippppddddis",
    "sum_of_squares": "ippps",
    "scale": "ippfs",
    "ccl_reduce": "iippiiip",
    "cross_entropy": "pippppp" + "ii" + "ffif",
    "dropout": "ppiifk",
    "gated": "pppii",
    "gated_backward": "ppppppii",
    "int16_packed_bytes": "iiip",
    "int16_pack": "piiii" + "pipi" + "ps",
    "int16_pack_activated": "ppi" + "iii" + "p",
    "int16_product": "pppi" + "iii" + "ppis",
    "int16_use_vnni": "i",
    "embed": "ppppppppppp" + "iiffk",
    "embed_backward": "ppppppppppppp" + "iifks",
    "embedding_grad": "ppp" + "iii",
    "find_outside": "piip",
    "low_rank": "pipp" + "iiifks",
    "low_rank_a_grad": "ppip" + "iiifks",
    "low_rank_x_grad": "ppp" + "iiifks",
    "layer_norm": "ppppppp" + "iif",
    "norm_backward": "ppippppppppp" + "iifks",
    "rms_norm": "ppfppiif",
    "rms_norm_backward": "ppppfpp" + "iis",
    "unpack_weight": "ppii",
    "residual_norm": "pppppppppp" + "iiffk",
}
# Compiled once, not once per instruction set.
COLLECTIVES = {
    "ccl_absent": "pp",
    "ccl_collective": "pppi",
    "ccl_leave": "p",
    "ccl_readable": "pip",
    "ccl_receive": "pipipi",
    "ccl_report": "pii",
    "ccl_segment_bytes": "ip",
    "ccl_send": "pipipi",
}
_TYPES = {"p": _POINTER, "i": _INT, "k": _KEY, "f": _FLOAT, "d": _DOUBLE, "s": _POINTER}

# Working memory above this is given back after the call. What attention needs for 1,500 tokens is below it; for longer
# sequences new pages take 1 – 2% of the time of the arithmetic, and less the longer they are.
MOST_KEPT_PER_THREAD = 4 << 20


class LibraryError(ValueError):
    """The native library is missing, can't be loaded or is of another version."""


class _Scratch(ctypes.Structure):
    """Scratch of csrc/api.h."""

    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("needed", ctypes.c_int64)]


class _WorkingMemory(threading.local):
    """What this thread's kernels work in; an OpenMP team uses the memory of the thread that started it."""

    def __init__(self) -> None:
        self.scratch = _Scratch()
        self.address = ctypes.addressof(self.scratch)
        self.memory: torch.Tensor | None = None

    def allocate(self, size: int) -> None:
        self.release()  # first, so that both never exist together
        self.memory = torch.empty(size, dtype=torch.uint8)
        self.scratch.data, self.scratch.bytes = self.memory.data_ptr(), size

    def release(self) -> None:
        self.memory = None
        self.scratch.data, self.scratch.bytes = None, 0


_working_memory = _WorkingMemory()


def release_working_memory() -> None:
    """Gives up what this thread keeps for its next kernels."""
    _working_memory.release()


def _with_working_memory(function: Callable) -> Callable:
    """`function` without its last argument. A kernel that says that it needs more has done nothing, and runs again."""

    def run(*args: object) -> None:
        mine = _working_memory
        scratch = mine.scratch
        function(*args, mine.address)
        if scratch.needed <= scratch.bytes:
            return
        mine.allocate(scratch.needed)
        function(*args, mine.address)
        fits = scratch.needed <= scratch.bytes
        if scratch.bytes > MOST_KEPT_PER_THREAD * torch.get_num_threads():
            mine.release()
        if not fits:
            raise RuntimeError("the number of threads changed during a call of a kernel; call it again.")

    return run


def why_not() -> str | None:
    """Why no kernel runs on this platform; None where they should, even if the library is missing or broken."""
    if sys.platform == "linux" and platform.machine().lower() in ("x86_64", "amd64"):
        return None
    return f"cputrain's kernels need Linux on x86-64, this is {platform.system()} on {platform.machine()}"


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    path = Path(settings.value_of(settings.LIBRARY) or LIBRARY)
    if not path.exists():
        raise LibraryError(
            f"cputrain's native library was not found at {path}; reinstall cputrain (pip install --force-reinstall "
            "--no-deps cputrain), or run `make build` in a source tree."
        )
    try:
        library = ctypes.CDLL(str(path))
        library.cputrain_version.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise LibraryError(f"cputrain's native library {path} can't be loaded: {error}; reinstall cputrain.") from error
    version = library.cputrain_version().decode()
    if version != __version__:
        raise LibraryError(
            f"cputrain's native library {path} is version {version}, the Python package is {__version__}; "
            "reinstall cputrain, or run `make build` in a source tree."
        )
    return library


@cache
def kernels_of(isa: str) -> SimpleNamespace:
    """Every kernel, compiled for `isa` ("portable", "avx2" or "avx512"), by its name; and the collectives."""
    table = SimpleNamespace(isa=isa)
    for name, letters in SIGNATURES.items():
        function = _bound(f"cputrain_{name}_{isa}", letters, f"{name} for {isa}")
        setattr(table, name, _with_working_memory(function) if letters.endswith("s") else function)
    for name, letters in COLLECTIVES.items():
        setattr(table, name, _bound(f"cputrain_{name}", letters, name))
    return table


def aligned_blocks(library: str, ours: bool) -> bool:
    """Whether this loaded library takes aligned memory from csrc/aligned_blocks.cpp now, or again from glibc."""
    places = _INT()
    _bound("cputrain_aligned_blocks", "pip", "aligned_blocks")(library.encode(), ours, ctypes.byref(places))
    return places.value > 0


def _bound(symbol: str, letters: str, description: str) -> Callable:
    function = getattr(_library(), symbol, None)
    if function is None:
        raise LibraryError(
            f"cputrain's native library {_library()._name} is older than the Python package: it has no "
            f"{description}; reinstall cputrain, or run `make build` in a source tree."
        )
    function.argtypes = [_TYPES[letter] for letter in letters]
    function.restype = None
    return function


@lru_cache(maxsize=1)
def kernels() -> SimpleNamespace:
    """The kernels of the best instruction set of this CPU (or of CPUTRAIN_ISA)."""
    return kernels_of(hardware.best_isa()[0])
