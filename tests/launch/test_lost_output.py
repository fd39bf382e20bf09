"""Output that can't be written is dropped, said once and told by the exit code; ranks never wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.launch import output
from tests.launch import lost_output, programs
from tests.launch.programs import CLEAN, LAUNCH

SEED = int(os.environ.get("CPUTRAIN_TEST_SEED", "0"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="small disks in a mount namespace need root")


def cases() -> list:
    """`make soak` tries every place with every engine."""
    return [
        pytest.param(
            place, engine, marks=[pytest.mark.needs_program(*lost_output.PROGRAMS.get(engine, ("sh", "dash")))]
        )
        for place, engine in lost_output.sample(SEED)
    ]


@needs_root
@pytest.mark.parametrize(("place", "engine"), cases())
def test_both_ranks_end(place: str, engine: str, tmp_path: Path) -> None:
    ended = lost_output.run(place, engine, tmp_path)
    assert ended.is_right(place, output.LOST), (ended.code, ended.ranks, ended.stderr[-3000:])


@needs_root
@pytest.mark.parametrize("engine", ["agent", "node"])
def test_the_exit_code_of_a_rank_that_failed_wins(engine: str, tmp_path: Path) -> None:
    ended = lost_output.run("both-full-disk", engine, tmp_path, code=3)
    assert ended.code == 3


@pytest.mark.parametrize(("exits", "code"), [("", output.LOST), ("raise SystemExit(5)", 5), ("raise KeyError", 1)])
def test_one_process_whose_log_cannot_be_written(exits: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    programs.write(tmp_path, script=f"print('shown', flush=True)\nopen('ended', 'w')\n{exits}")
    answer = programs.launch("--log_dir", tmp_path, "script.py", folder=tmp_path)
    assert answer.returncode == code, answer.stderr
    assert answer.stdout == "[0] shown\n" and (tmp_path / "ended").exists()
    said = f"cputrain: output is lost: {tmp_path}/rank-0.log can't be written (No space left on device)"
    assert answer.stderr.count(said) == 1


def test_one_process_without_standard_output_still_has_its_log(tmp_path: Path) -> None:
    programs.write(tmp_path, script="print('kept')")
    words = ["sh", "-c", 'exec "$@" >&-', "sh", *LAUNCH, "--log_dir", "logs", "script.py"]
    answer = subprocess.run(
        words, cwd=tmp_path, env={**CLEAN, "HOME": str(tmp_path)}, stderr=subprocess.PIPE, text=True, timeout=100
    )
    assert answer.returncode == output.LOST
    assert "standard output can't be written (Bad file descriptor)" in answer.stderr
    assert "kept\n" in (tmp_path / "logs" / "rank-0.log").read_text()


def in_a_process(code: str, **options) -> subprocess.CompletedProcess[bytes]:
    """Standard streams are the whole process's."""
    words = [sys.executable, "-c", f"import os, sys\nfrom cputrain.launch import output\n{code}"]
    return subprocess.run(words, capture_output="stdout" not in options, timeout=60, check=False, **options)


def test_a_stream_that_cannot_wait_is_waited_for() -> None:
    """Programs share the flag with whom they inherited the stream from, and some set it."""
    code = "output.take_over()\nos.set_blocking(1, False)\nprint('x' * 10**6)\nsys.exit(output.exit_code(0))"
    answer = in_a_process(code)
    assert (answer.returncode, len(answer.stdout)) == (0, 10**6 + 1)


@pytest.mark.parametrize("before", ["", "print('before')"])
def test_python_ends_without_a_complaint_of_its_own(before: str) -> None:
    """It flushes what a buffer holds, and ends with 120 if it can't."""
    code = f"{before}\noutput.take_over()\nprint('after')\nsys.exit(output.exit_code(0))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        answer = in_a_process(code, stdout=full, stderr=subprocess.PIPE, env=buffered)
    assert answer.returncode == output.LOST
    assert answer.stderr.count(b"\n") == 1, answer.stderr


@pytest.mark.parametrize(
    ("pieces", "lost"),
    [
        ([b"[0] a\ncputrain: output is lost: logs\n"], True),
        ([b"[0] a\ncputrain: outp", b"ut is lost: logs\n"], True),
        ([b"[0]  50%|##", b"cputrain: output is lost: logs\n"], True),
        ([b"[0] cputrain: output is lost: says the script\n"], False),
        ([b"[0] ", b"cputrain: output is lost: ", b"says the script\n", b"[1] more\n"], False),
    ],
)
def test_what_a_copier_says_is_heard_and_what_a_rank_says_is_not(pieces: list[bytes], lost: bool) -> None:
    code = (
        "import time\nread, write = os.pipe()\n"
        "thread = output.pass_on(open(read, 'rb', 0), sys.stdout.buffer)\n"
        f"for piece in {pieces!r}: os.write(write, piece); time.sleep(0.05)\n"
        "os.close(write); thread.join(); sys.exit(output.exit_code(0))"
    )
    answer = in_a_process(code)
    assert answer.returncode == (output.LOST if lost else 0)
    assert answer.stdout == b"".join(pieces)
