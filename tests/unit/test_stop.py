"""Signals as requests: whose handlers they pass, and what a rank does whose peer has failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cputrain import blame, settings, stop


@pytest.fixture(autouse=True)
def stock_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in stop._SIGNALS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", stop._SIGNALS)
def test_a_request_is_noted_once_the_training_has_begun(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with stop.listening():
        assert not stop.agreed() and not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested() == signal.Signals(number).name and stop.agreed()
        with pytest.raises(SystemExit) as end:
            stop.end()
    assert end.value.code == 143
    assert signal.getsignal(number) is before and not stop.requested()
    assert capfd.readouterr().err.count("saves its state") == 1


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    with pytest.raises(SystemExit) as end, stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == 143


def test_a_second_ctrl_c_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), stop.listening():
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested()
        os.kill(os.getpid(), signal.SIGINT)


def test_a_scripts_own_handler_stays() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested()
    assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_handler_that_came_later_stays() -> None:
    with stop.listening():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_another_thread_listens_without_handlers() -> None:
    found: list[object] = []

    def train() -> None:
        with stop.listening():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


ENDED = """
import os, signal, sys
from cputrain import stop
with stop.listening():
    stop.agreed()
    {before}
    os.kill(os.getpid(), signal.SIGTERM)
    print("on", flush=True)
"""


def ended(before: str = "", **environ: str) -> tuple[int, str]:
    code = ENDED.format(before=before)
    answer = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True)
    return answer.returncode, answer.stdout


def test_a_rank_that_is_ended_because_of_a_peer_dies_as_it_would(tmp_path: Path) -> None:
    folder = {settings.BLAME_FOLDER: str(tmp_path)}
    assert ended(**folder) == (0, "on\n")
    blame.note_failure(str(tmp_path))
    assert ended(**folder) == (-signal.SIGTERM, "")
    blame.forget_all(str(tmp_path))
    assert ended(**folder) == (0, "on\n")


def test_a_forked_child_dies_of_sigterm_and_leaves_ctrl_c_to_its_parent() -> None:
    child = "child = os.fork()\n    if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)"
    assert ended(child) == (256 - signal.SIGTERM, "")
    sent = "\n    os.kill(os.getpid(), signal.SIGINT)\n    os._exit(7)"
    assert ended(child + sent)[0] == 7


def test_ranks_that_cannot_agree_write_nothing() -> None:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as end, stop.listening():
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        patched.setenv(settings.WORLD_SIZE, "2")
        stop.agreed()
    assert end.value.code == 143
