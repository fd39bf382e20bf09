"""Terminals that know only ASCII, and an impatient Ctrl-C: neither sees a traceback."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from cputrain import log

ASCII = [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"LC_ALL": "C"}]


@pytest.mark.parametrize("environment", ASCII, ids=["ascii", "C without coercion", "C"])
@pytest.mark.parametrize("words", [["doctor"], ["env"], ["--help"], ["help", "launch"]], ids=" ".join)
def test_nothing_ends_in_a_traceback(words: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "cputrain", *words]
    answer = subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)
    assert answer.returncode == 0 and b"Traceback" not in answer.stderr, answer.stderr
    if environment != {"LC_ALL": "C"}:  # there Python chooses UTF-8 by itself
        assert answer.stdout.isascii()


def test_a_file_is_written_as_utf8_whatever_the_locale(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from cputrain import text_files; text_files.write(Path('out'), 'Z\\xfcrich \\u2026')"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, env={**os.environ, **ASCII[1]}, cwd=tmp_path, check=True)
    assert (tmp_path / "out").read_bytes() == "Zürich …".encode()


def test_characters_have_look_alikes() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", errors=log._HANDLER)
    stream.write("2 × 3 … 4 – 5, Zürich, 日")
    stream.seek(0)
    assert stream.read() == "2 x 3 ... 4 - 5, Z\\xfcrich, \\u65e5"
    assert "2 × 3 … Zürich".encode("latin-1", log._HANDLER).decode("latin-1") == "2 × 3 ... Zürich"


FAULTY = Path(__file__).parents[2] / "cluster" / "manifests" / "faulty" / "memory_64M.yaml"


def on_a_terminal(words: list[str], columns: int) -> str:
    """What a command writes to a terminal that is so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "cputrain", *words], stdout=theirs, env=environment, cwd=FAULTY.parent
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error on Linux
        while part := os.read(ours, 65536):
            said += part
    process.wait()
    os.close(ours)
    return said.decode()


@pytest.mark.parametrize("words", [["env"], ["k8s", "check", FAULTY.name]], ids=["env", "check"])
@pytest.mark.parametrize("columns", [80, 140])
def test_lines_are_wrapped_between_words_on_a_terminal_and_whole_elsewhere(words: list[str], columns: int) -> None:
    command = [sys.executable, "-m", "cputrain", *words]
    whole = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FAULTY.parent).stdout
    shown = on_a_terminal(words, columns).splitlines()
    assert max(map(len, whole.splitlines())) > 80
    for line in filter(lambda line: len(line) > columns, shown):  # one word is longer, or stands after a long name
        assert " " not in re.split(r"\s{2,}", line)[-1], line
    assert " ".join(" ".join(shown).split()) == " ".join(whole.split())  # no word is lost or cut


@pytest.mark.parametrize("words", [["doctor"], ["run", "train.py"]], ids=["doctor", "run"])
def test_an_interrupt_while_something_is_imported_has_no_traceback(words: list[str], tmp_path: Path) -> None:
    """A module that is imported is made to wait; Ctrl-C comes then."""
    for module in ("socket", "torch"):  # what `run` and `doctor` import
        (tmp_path / f"{module}.py").write_text("import time\nopen('waits', 'w').close()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "cputrain", *words]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    while not (tmp_path / "waits").exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
