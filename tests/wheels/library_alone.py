"""Loads the native library with nothing but Python and an OpenMP runtime, multiplies in int16 and normalises in fp32.

python3 library_alone.py libcputrain_native.so

It runs in Debian 11's Python 3.9, where there is neither torch nor numpy. Each instruction set that the CPU has is
tried, and compared with Python's own floats.
"""

from __future__ import annotations

import ctypes
import math
import operator
import platform
import random
import sys

ROWS, COLS, DEPTH = 37, 29, 650  # neither a multiple of a tile, and two blocks of the depth
NEEDED = {"portable": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
INT16_ERROR = 1e-3  # of the largest result; bf16 has 3e-3, a wrong tile 1
FP32_ERROR = 1e-5
_int, _pointer = ctypes.c_int64, ctypes.c_void_p


class Operand(ctypes.Structure):
    """Int16Operand of csrc/api.h."""

    _fields_ = [(name, _int if name in ("kind", "stride", "by_columns") else _pointer)
                for name in ("source", "kind", "stride", "by_columns", "sums", "packed")]  # fmt: skip


class Scratch(ctypes.Structure):
    """Scratch of csrc/api.h."""

    _fields_ = [("data", _pointer), ("bytes", _int), ("needed", _int)]


class Memory:
    """Bytes that begin at a cache line."""

    def __init__(self, size: int) -> None:
        self._held = ctypes.create_string_buffer(size + 64)
        self.address = (ctypes.addressof(self._held) + 63) // 64 * 64


def matrix(rows: int, cols: int, seed: int) -> list[list[float]]:
    """Random values that float32 has exactly."""
    draw = random.Random(seed)
    return [[ctypes.c_float(draw.gauss(0, 1)).value for _ in range(cols)] for _ in range(rows)]


def floats(values: list[list[float]]) -> ctypes.Array[ctypes.c_float]:
    flat = [value for row in values for value in row]
    return (ctypes.c_float * len(flat))(*flat)


def multiply(library: ctypes.CDLL, isa: str, left: list[list[float]], right: list[list[float]]) -> list[float]:
    """left · rightᵀ by the int16 kernel."""
    held, sides = [], []
    for role, values in enumerate((left, right)):
        size, source = _int(), floats(values)
        count = [_int(number) for number in (len(values), DEPTH, role)]
        getattr(library, f"cputrain_int16_packed_bytes_{isa}")(*count, ctypes.byref(size))
        packed = Memory(size.value)
        held += [source, packed]
        sides.append(Operand(ctypes.addressof(source), 0, DEPTH, 0, None, packed.address))
    out, scratch = (ctypes.c_float * (ROWS * COLS))(), Scratch(None, 0, 0)
    sizes = [_int(number) for number in (COLS, ROWS, COLS, DEPTH)]
    product = getattr(library, f"cputrain_int16_product_{isa}")
    arguments = [*map(ctypes.byref, sides), out, *sizes, None, None, _int(0), ctypes.byref(scratch)]
    product(*arguments)  # the first call says how much working memory is needed
    memory = Memory(scratch.needed)
    scratch.data, scratch.bytes = memory.address, scratch.needed
    product(*arguments)
    return list(out)


def normalise(library: ctypes.CDLL, isa: str, rows: list[list[float]]) -> list[float]:
    """LayerNorm without weight and bias by the fp32 kernel."""
    out, mean, rstd = (ctypes.c_float * (len(rows) * DEPTH))(), *((ctypes.c_float * len(rows))() for _ in range(2))
    kernel = getattr(library, f"cputrain_layer_norm_{isa}")
    kernel(floats(rows), None, None, out, None, mean, rstd, _int(len(rows)), _int(DEPTH), ctypes.c_float(1e-5))
    return list(out)


def exact_norm(row: list[float]) -> list[float]:
    mean = math.fsum(row) / len(row)
    variance = math.fsum((value - mean) ** 2 for value in row) / len(row)
    return [(value - mean) / math.sqrt(variance + 1e-5) for value in row]


def error(found: list[float], exact: list[float]) -> float:
    """The largest difference, as a part of the largest value; a NaN is no small difference."""
    differences = map(abs, map(operator.sub, found, exact))
    return max(math.inf if math.isnan(d) else d for d in differences) / max(map(abs, exact))


def instruction_sets() -> list[str]:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = set(next(line for line in file if line.startswith("flags")).split())
    return [isa for isa, needed in NEEDED.items() if needed <= flags]


def main(path: str) -> int:
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)  # torch's job elsewhere
    library = ctypes.CDLL(path)
    left, right = matrix(ROWS, DEPTH, seed=1), matrix(COLS, DEPTH, seed=2)
    exact = [math.fsum(map(operator.mul, x, y)) for x in left for y in right]
    norms = [value for row in left for value in exact_norm(row)]
    print(f"Python {platform.python_version()}, {' '.join(platform.libc_ver())}")
    failed = False
    for isa in instruction_sets():
        product, norm = error(multiply(library, isa, left, right), exact), error(normalise(library, isa, left), norms)
        print(f"{isa}: int16 product's error {product:.1e}, fp32 LayerNorm's {norm:.1e}")
        failed |= product > INT16_ERROR or norm > FP32_ERROR
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
