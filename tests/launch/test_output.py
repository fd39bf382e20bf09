"""What ranks print: labelled, kept in files, and one progress bar."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.launch.output import Output


def printed(writes: list[tuple[int, bytes]], bars: bool, folder: Path | None = None) -> bytes:
    shown = io.BytesIO()
    output = Output(str(folder) if folder else None, bars)
    pipes = {rank: os.open(output.pipe(rank, shown), os.O_WRONLY) for rank, _ in writes}
    for rank, data in writes:
        os.write(pipes[rank], data)
    for pipe in pipes.values():
        os.close(pipe)
    output.close()
    return shown.getvalue()


def test_lines_are_labelled_and_kept(tmp_path: Path) -> None:
    assert sorted(printed([(0, b"a\nb"), (11, b"c\r\n")], False, tmp_path).splitlines()) == [
        b"[0] a",
        b"[0] b",
        b"[11] c",
    ]
    assert (tmp_path / "rank-0.log").read_bytes() == b"a\nb\n"
    assert (tmp_path / "rank-11.log").read_bytes() == b"c\n"


BAR = b"\r  0%|    |\r 50%|##  |\r100%|####|\n"


@pytest.mark.parametrize("bars", [False, True])
def test_one_bar_is_shown(bars: bool) -> None:
    shown = printed([(0, BAR), (1, BAR)], bars)
    assert shown.count(b"100%") == 1 and b"[1]" not in shown
    assert b"50%" not in shown, "it came in one piece: only the last state counts"


def test_a_bar_that_moves_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    assert printed([(0, b"\r 10%|#|")], False, tmp_path) == b"[0]  10%|#|\n", "at the end, its last state"
    assert b"[0]  10%|#|\r\x1b[K[0]  10%|#|\n" in printed([(0, b"\r 10%|#|")], True)


def test_what_stands_behind_a_bar_gets_a_line_of_its_own(tmp_path: Path) -> None:
    data = b"\r  0%|    | 0/30 [00:00<?, ?it/s][rank0]:[W1116 warning\n\r100%|####| 30/30 [00:02<00:00, loss=3]   \n"
    assert printed([(0, data)], False, tmp_path).splitlines() == [
        b"[0] [W1116 warning",
        b"[0] 100%|####| 30/30 [00:02<00:00, loss=3]   ",
    ]
    assert (tmp_path / "rank-0.log").read_bytes().startswith(b"[W1116 warning\n")
    shown = printed([(0, data)], True)
    assert b"[0]   0%|    | 0/30 [00:00<?, ?it/s]\r\x1b[K[0] [W1116 warning\n" in shown
    assert b"[1] behind\n" in printed([(1, b"\r 1/2 [00:00<?]behind\n")], True), "though the bar isn't shown"


def test_one_label_is_enough() -> None:
    shown = printed([(1, b"[rank1]: Traceback\n[rank0]: of another\n[rank1]:[W1 careful\n")], False)
    assert shown.splitlines() == [b"[1] Traceback", b"[1] [rank0]: of another", b"[1] [W1 careful"]


def test_what_cputrain_says_is_shown_once_and_kept_by_each(tmp_path: Path) -> None:
    said, other = b"cputrain: it is so\n", b"cputrain: here it is otherwise\n"
    shown = printed([(0, said), (1, said), (1, other), (0, b"a\n"), (1, b"a\n")], False, tmp_path)
    assert shown.count(b"it is so") == 1 and shown.count(b"otherwise") == 1 and shown.count(b"] a\n") == 2
    assert [(tmp_path / f"rank-{rank}.log").read_bytes().count(b"it is so") for rank in (0, 1)] == [1, 1]


def test_a_folder_that_cannot_be_made_is_one_sentence_of_one_process() -> None:
    for call in ("Output('/dev/null/x', False)", "label(0, '/dev/null/x', False)"):
        code = f"from cputrain.launch import output\ntry: output.{call}\nexcept ValueError as error: print(error)"
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert answer.stdout == "the folder /dev/null/x can't be made: Not a directory.\n", answer.stderr


def test_a_labelled_process_loses_nothing_even_when_it_dies(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom cputrain.launch import output\n"
        f"output.label(7, {str(tmp_path)!r}, False)\n"
        "print('first'); sys.stdout.flush(); print('last', file=sys.stderr)\n"
        "os.system('echo from a child')\nos.kill(os.getpid(), 9)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == -9
    assert answer.stdout == "[7] first\n[7] from a child\n" and answer.stderr == "[7] last\n"
    assert sorted((tmp_path / "rank-7.log").read_text().splitlines()) == ["first", "from a child", "last"]
