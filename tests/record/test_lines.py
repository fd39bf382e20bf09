"""The record's file: whole lines, thinned when it is too large, and an end without harm on a full disk."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from cputrain import log
from cputrain.record import lines
from cputrain.record.lines import Lines, parsed, thinned


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(step: int, **more: float) -> dict:
    return {"kind": "steps", "t": step / 2, "step": step, "n": 1, "s": 0.5, "loss": float(step), **more}


def test_a_run_that_goes_on_is_appended_and_another_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "out" / "run-0.jsonl"
    for goes_on, held in ((False, 1), (True, 2), (False, 1)):
        file = Lines(path, goes_on)
        file.write(steps(1))
        file.close()
        assert len(entries(path)) == held
    assert len(entries(path.with_suffix(".previous.jsonl"))) == 2


def test_a_line_that_was_cut_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "run-0.jsonl"
    path.write_bytes(b'{"kind":"steps","st')
    file = Lines(path, goes_on=True)
    file.write(steps(2))
    assert [parsed(line) for line in path.read_bytes().splitlines()] == [None, steps(2)]


def test_a_loss_that_is_no_number_is_written_as_null(tmp_path: Path) -> None:
    Lines(tmp_path / "a", False).write({"kind": "steps", "loss": float("nan"), "phases": {"data": float("inf")}})
    assert entries(tmp_path / "a") == [{"kind": "steps", "loss": None, "phases": {"data": None}}]


def test_the_older_half_is_thinned_and_nothing_is_lost_of_its_sums() -> None:
    made = [{"kind": "run"}, *(steps(i, real=10, phases={"data": 0.1}) for i in range(1, 10)), {"kind": "event"}]
    kept = thinned([dict(one) for one in made])
    assert kept[0] == {"kind": "run"} and kept[-1] == {"kind": "event"} and len(kept) < len(made)
    both = kept[1]
    assert (both["n"], both["s"], both["step"], both["loss"], both["real"]) == (2, 1.0, 2, 1.5, 20)
    assert both["phases"]["data"] == pytest.approx(0.2)
    assert sum(one.get("n", 0) for one in kept) == 9 and sum(one.get("real", 0) for one in kept) == 90


def test_a_file_never_grows_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "run-0.jsonl"
    file = Lines(path, goes_on=False, most=20_000)
    file.write({"kind": "run", "rank": 0})
    for step in range(1, 3000):
        file.write(steps(step))
        assert path.stat().st_size <= 20_000
    held = entries(path)
    assert held[0]["kind"] == "run" and held[-1]["step"] == 2999 and sum(one.get("n", 0) for one in held) == 2999


def test_thinning_events_alone_keeps_the_runs_head() -> None:
    kept = thinned([{"kind": "run"}, *({"kind": "event", "t": i} for i in range(99))])
    assert kept[0] == {"kind": "run"} and len(kept) < 100 and kept[-1]["t"] == 98


def test_a_full_disk_ends_the_record_with_one_sentence(tmp_path: Path, caplog) -> None:
    """The kernel's own refusal, by a limit on the size of files."""
    log.say_once.cache_clear()
    child = os.fork()
    if child == 0:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        file = Lines(tmp_path / "run-0.jsonl", goes_on=False)
        for step in range(20):
            file.write(steps(step))
        file.close()
        os._exit(0 if file._file is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "run-0.jsonl").stat().st_size <= 300


def test_a_folder_that_cannot_be_made_is_one_sentence_too(tmp_path: Path, caplog) -> None:
    log.say_once.cache_clear()
    (tmp_path / "file").write_text("")
    Lines(tmp_path / "file" / "run-0.jsonl", goes_on=False).write(steps(1))
    assert [m for m in caplog.messages if "can't be written" in m and "the training goes on" in m] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("line", [b"", b"3", b"[]", b'{"kind":3}', b"\xff\xfe", b"[" * 100_000, b'{"kind":"a"'])
def test_what_is_no_entry_is_none(line: bytes) -> None:
    assert parsed(line) is None


def test_the_limit_is_fifty_megabytes() -> None:
    assert lines.MOST_BYTES == 50 * 2**20
