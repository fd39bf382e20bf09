"""Records are read whatever stands in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cputrain.record.read import read


def write(folder: Path, *entries: object, rank: int = 0) -> Path:
    file = folder / "_cputrain" / f"run-{rank}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(entry) if not isinstance(entry, str) else entry}\n" for entry in entries))
    return file


def steps(step: int, t: float, **more: object) -> dict:
    return {"kind": "steps", "step": step, "t": t, "n": 1, "s": 0.5, **more}


def test_ranks_are_found_from_the_output_folder_its_own_folder_and_a_file(tmp_path: Path) -> None:
    for rank in (1, 0):
        file = write(tmp_path, {"kind": "run", "rank": rank}, steps(1, 0.5), rank=rank)
    assert [rank.rank for rank in read(tmp_path).ranks] == [0, 1] == [rank.rank for rank in read(file.parent).ranks]
    assert [rank.rank for rank in read(file).ranks] == [0]
    assert read(tmp_path).name == tmp_path.name


def test_steps_that_were_done_again_count_once_and_time_goes_on(tmp_path: Path) -> None:
    start = {"kind": "run"}
    write(tmp_path, start, steps(1, 1), steps(2, 2), steps(3, 3), start, steps(3, 1), steps(4, 2))
    [rank] = read(tmp_path).ranks
    assert [(one["step"], one["clock"]) for one in rank.steps] == [(1, 1), (2, 2), (3, 4), (4, 5)]
    assert len(rank.starts) == 2


def test_broken_and_strange_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    strange = ['{"kind":"steps","step":1,"s":NaN}', '{"kind":"steps","step":1e999,"s":1}', "nonsense", '{"kind":"ste']
    odd = steps(7, 1, loss="<script>", phases=[1], real=True, lr=1e300)
    write(tmp_path, {"kind": "run"}, *strange, odd)
    [rank] = read(tmp_path).ranks
    assert rank.broken == len(strange)
    assert rank.steps == [{"step": 7.0, "t": 1.0, "s": 0.5, "n": 1, "phases": {}, "clock": 1.0}]


@pytest.mark.parametrize("text", ["", "\n\n", "no record\n", '{"kind":"event"}\n'])
def test_a_file_without_a_run_is_a_sentence(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ValueError, match="holds no record that can be read"):
        read(tmp_path)


def test_a_folder_without_a_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no record of a run"):
        read(tmp_path)
    with pytest.raises(ValueError, match="there is no "):
        read(tmp_path / "missing")
