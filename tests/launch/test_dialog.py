"""`cputrain config` in a real terminal: the guide's answers, typed and chosen with arrows, give the guide's files."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.test_config_file import ONE, SIXTEEN

DOWN, ENTER = "\x1b[B", "\r"
# (what the screen asks, what is typed), as in both scenes of Accelerate's guide.
ALONE = [
    ("In which compute environment are you running?", ENTER),
    ("Which type of machine are you using?", ENTER),
    ("CPU only", "yes" + ENTER),
    ("IPEX", "yes" + ENTER),
    ("torch dynamo", "NO" + ENTER),
    ("DeepSpeed", "NO" + ENTER),
    ("FP16 or BF16", DOWN + ENTER),
]
FOUR_MACHINES = [
    ("In which compute environment are you running?", ENTER),
    ("Which type of machine are you using?", DOWN + ENTER),
    ("How many different machines", "4" + ENTER),
    ("What is the rank of this machine?", ENTER),
    ("IP address of the machine", "36.112.23.24" + ENTER),
    ("What is the port", "29500" + ENTER),
    ("same local network", "yes" + ENTER),
    ("IPEX", "yes" + ENTER),
    ("torch dynamo", "NO" + ENTER),
    ("How many CPU(s)", "16" + ENTER),
    ("FP16 or BF16", DOWN + ENTER),
]


class Terminal:
    """`cputrain config` behind a pseudo-terminal."""

    def __init__(self, *arguments: str, home: Path) -> None:
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "COLUMNS": "300"}
        command = [sys.executable, "-m", "cputrain", "config", *arguments]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.screen = ""

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Until the text is on the screen, after what was waited for before."""
        end = time.monotonic() + seconds
        while text not in self.screen:
            if not select.select([self.ours], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} did not appear; the screen ends with {self.screen[-500:]!r}")
            try:
                new = os.read(self.ours, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                new = ""
            if not new:
                raise AssertionError(f"the program ended before {text!r}: {self.screen[-500:]!r}")
            self.screen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", new)
        self.screen = self.screen.partition(text)[2]

    def type(self, keys: str) -> None:
        time.sleep(0.05)  # a person reads the question first, and prompt_toolkit drops what comes before its prompt
        os.write(self.ours, keys.encode())

    def answer(self, dialog: list[tuple[str, str]]) -> None:
        for question, keys in dialog:
            self.wait_for(question)
            self.type(keys)

    def end(self) -> int:
        code = self.process.wait(60)
        os.close(self.ours)
        return code


@pytest.mark.parametrize(("dialog", "expected"), [(ALONE, ONE), (FOUR_MACHINES, SIXTEEN)], ids=["one", "four machines"])
def test_the_guides_answers_give_the_guides_file(dialog, expected: str, tmp_path: Path) -> None:
    terminal = Terminal("--file", str(tmp_path / "out.yaml"), home=tmp_path)
    terminal.answer(dialog)
    terminal.wait_for(f"`cputrain launch --config_file {tmp_path}/out.yaml SCRIPT` reads it")
    assert terminal.end() == 0
    assert (tmp_path / "out.yaml").read_text() == expected


def test_a_wrong_answer_is_asked_again_and_deepspeed_gets_a_sentence(tmp_path: Path) -> None:
    terminal = Terminal(home=tmp_path)
    terminal.answer(ALONE[:2])
    terminal.wait_for("CPU only")
    terminal.type("perhaps" + ENTER)
    terminal.wait_for("Answer yes or no.")
    terminal.type("\x7f" * len("perhaps") + "no" + ENTER)
    terminal.answer([*ALONE[3:5], ("DeepSpeed", "yes" + ENTER), ("the answer is taken as no", "")])
    terminal.answer(
        [("FP16 or BF16", ENTER), ("The configuration is in", ""), ("`cputrain launch SCRIPT` reads it", "")]
    )
    assert terminal.end() == 0
    written = (tmp_path / ".config/cputrain/default_config.yaml").read_text()
    assert "use_cpu: false" in written and "mixed_precision: 'no'" in written


@pytest.mark.parametrize("answer", ["", "no"], ids=["just Enter", "no"])
def test_a_file_is_overwritten_only_if_the_user_says_so(answer: str, tmp_path: Path) -> None:
    (tmp_path / "out.yaml").write_text("mine")
    terminal = Terminal("--file", str(tmp_path / "out.yaml"), home=tmp_path)
    terminal.answer(
        [("out.yaml exists.", ""), ("Do you want to overwrite it?", answer + ENTER), ("Nothing was written.", "")]
    )
    assert terminal.end() == 1
    assert (tmp_path / "out.yaml").read_text() == "mine"


def test_a_user_who_agrees_is_asked_the_questions(tmp_path: Path) -> None:
    (tmp_path / "out.yaml").write_text("mine")
    terminal = Terminal("--file", str(tmp_path / "out.yaml"), home=tmp_path)
    terminal.answer(
        [("out.yaml exists.", ""), ("Do you want to overwrite it?", "yes" + ENTER), *ALONE, ("reads it", "")]
    )
    assert terminal.end() == 0
    assert (tmp_path / "out.yaml").read_text() == ONE


def test_without_a_terminal_only_overwrite_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "out.yaml"
    path.write_text("mixed_precision: bf16\n")
    for arguments in (["--default", "--file", str(path)], ["--for-accelerate", str(path)]):
        answer = run(*arguments)
        assert (answer.returncode, answer.stderr) == (
            2,
            f"cputrain: {path} exists: give --overwrite, or another file.\n",
        )
        assert path.read_text() == "mixed_precision: bf16\n"
    assert run("--default", "--overwrite", "--file", str(path)).returncode == 0
    assert "mixed_precision: 'no'" in path.read_text()


def test_an_interrupt_writes_nothing(tmp_path: Path) -> None:
    terminal = Terminal("--file", str(tmp_path / "out.yaml"), home=tmp_path)
    terminal.answer(ALONE[:1])
    terminal.wait_for("Which type of machine")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.parametrize(("nodes", "cores", "expected"), [(1, 8, 1), (2, 8, 2), (4, 2, 2), (0, 1, 1)])
def test_the_number_of_processes_is_proposed_from_the_machine(nodes, cores, expected, monkeypatch) -> None:
    from cputrain import hardware
    from cputrain.cli import config

    machine = dataclasses.replace(
        hardware.detect(), numa_nodes=hardware.Fact((None,) * nodes, "x"), usable_cores=hardware.Fact(cores, "x")
    )
    monkeypatch.setattr(hardware, "this_machine", lambda: machine)
    assert config._processes_here() == expected


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cputrain", "config", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_default_and_update_ask_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "out.yaml")
    assert run("--default", "--file", path).returncode == 0
    before = Path(path).read_text()
    assert "num_processes: 1" in before
    Path(path).write_text("# mine\nmixed_precision: bf16\n")
    assert run("--update", "--file", path).returncode == 0
    assert Path(path).read_text() == before.replace("mixed_precision: 'no'", "mixed_precision: bf16")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "config asks questions, and standard input is no terminal: give --default, or --update."),
        (["--default", "--file", "/dev/null/x.yaml"], "the folder /dev/null can't be made: File exists."),
        (["--for-accelerate", "/proc/x.yaml"], "/proc/x.yaml can't be written: No such file or directory."),
    ],
)
def test_what_cannot_be_written_is_one_sentence(arguments: list[str], said: str) -> None:
    answer = run(*arguments)
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", f"cputrain: {said}\n")


def test_for_accelerate_writes_what_it_accepts(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(SIXTEEN)
    answer = run("--file", str(tmp_path / "ours.yaml"), "--for-accelerate", str(tmp_path / "theirs.yaml"))
    assert answer.returncode == 0
    assert (tmp_path / "theirs.yaml").read_text() == SIXTEEN.replace("ipex_config:\n  ipex: true\n", "")
    assert (tmp_path / "ours.yaml").read_text() == SIXTEEN
