"""Whether `auto` chooses what it would choose on an idle machine while other programs use every core many times over.

    python benchmarks/auto_under_load.py                          # load of 20, 20 empty caches: two minutes on 2 cores
    CPUTRAIN_ISA=avx2 python benchmarks/auto_under_load.py --expect int16

Prints what each measurement found, and ends with 1 if one chose another format than expected (on an idle machine, if
none is named).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time

from cputrain.formats import choose, speed


def main() -> int:
    settings = _arguments()
    expected = settings.expect or _choice_with_an_empty_cache()[0]
    print(f"expected: {expected}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the busy processes end, too
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(settings.load)]
    try:
        wrong = sum(_measure_once(number, expected) for number in range(settings.caches))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{settings.caches - wrong} of {settings.caches} right at a load of {settings.load}")
    return int(wrong > 0)


def _measure_once(number: int, expected: str) -> bool:
    """Whether it chose wrongly."""
    begin = time.perf_counter(), time.thread_time()
    dtype, reason = _choice_with_an_empty_cache()
    wall, cpu = time.perf_counter() - begin[0], time.thread_time() - begin[1]
    print(f"{number + 1:3}  {dtype}  {wall:5.1f} s wall, {cpu:.2f} s CPU  {reason}", flush=True)
    return dtype != expected


def _choice_with_an_empty_cache() -> tuple[str, str]:
    """As in a new process on a new machine."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        speed._found.clear()
        choose.automatic.cache_clear()
        choice = choose.choose("auto")
    return choice.dtype, choice.reason


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=int, default=20, help="processes that never rest")
    parser.add_argument("--caches", type=int, default=20, help="how often auto decides")
    parser.add_argument("--expect", choices=("fp32", "bf16", "int16"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
