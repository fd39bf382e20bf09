"""Lets atheris search for inputs that a parser doesn't answer, guided by which of its lines are reached.

python -m tests.fuzz.under_atheris hostfile --seconds 600
python -m tests.fuzz.under_atheris --seconds 600            # every parser, each for so long

An input that raises, or takes longer than 10 s, is written to build/fuzz/TARGET, and the exit code is not 0. Put it in
tests/fuzz/found/TARGET, where `make test` tries it from then on.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

_NO_TARGETS = ("sentences", "test_targets", "under_atheris")
_HANG_SECONDS = 10
_ROOT = Path(__file__).parents[2]


def targets() -> list[str]:
    return [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]) if found.name not in _NO_TARGETS]


def _dictionary_line(word: bytes) -> str:
    """As libFuzzer reads it."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n'


def _fuzz(target: str, seconds: int) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    # What an editable install's finder loads, atheris can't instrument.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
    sys.path.insert(0, str(_ROOT / "src"))
    with atheris.instrument_imports(include=["cputrain"]):
        module = importlib.import_module(f"tests.fuzz.{target}")
    place = _ROOT / "build" / "fuzz" / target
    for name in ("corpus", "seeds"):
        (place / name).mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(module.SEEDS):
        (place / "seeds" / str(number)).write_bytes(data)
    words = place / "words"
    words.write_text("".join(map(_dictionary_line, module.WORDS)))
    options = [f"-max_total_time={seconds}", f"-timeout={_HANG_SECONDS}", f"-dict={words}", "-print_final_stats=1"]
    atheris.Setup(
        [target, *options, f"-artifact_prefix={place}/", str(place / "corpus"), str(place / "seeds")], module.check
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=targets(), help="else all")
    parser.add_argument("--seconds", type=int, default=600)
    arguments = parser.parse_args()
    if arguments.target:
        _fuzz(arguments.target, arguments.seconds)
    failed = []
    for target in targets():
        words = [sys.executable, "-m", "tests.fuzz.under_atheris", target, "--seconds", str(arguments.seconds)]
        if subprocess.run(words, check=False, cwd=_ROOT).returncode:
            failed.append(target)
    sys.exit(f"not answered: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
