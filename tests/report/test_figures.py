"""The figures of a report are those of the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from cputrain.record.read import read
from cputrain.report import figures
from tests.report.runs import head, make, steps, write


def test_a_summary_adds_up_ranks_and_leaves_the_first_line_out(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [head(rank, 2), steps(1, 9.0), *(steps(i, 0.5) for i in range(2, 12))])
    found = figures.summary(read(tmp_path))
    assert (found.steps, found.total, found.seconds) == (11, 50, 14.0)
    assert found.step_seconds == pytest.approx(0.5) and found.tokens_per_second == pytest.approx(2 * 100 / 0.5)
    assert found.real_share == pytest.approx(0.4) and found.peak_share == pytest.approx(20 / 0.5 / 200)
    assert found.memory == 1e9 and found.communication == pytest.approx(0.02) and "still running" in found.how


def test_series_are_as_short_as_a_picture_needs(tmp_path: Path) -> None:
    run = read(make(tmp_path, number=2001))
    for made in (figures.loss(run), figures.speed(run), figures.peak_share(run), figures.memory(run.first)):
        assert 200 < len(made) <= figures.POINTS
    assert figures.loss(run)[-1][0] == 2001 and figures.speed(run)[5][1] == pytest.approx(200)


def test_phases_add_up_to_a_step_without_what_runs_beside(tmp_path: Path) -> None:
    found = figures.phases(read(make(tmp_path)).first)
    assert found["communication"] == pytest.approx(0.02)
    assert sum(found.values()) - found["communication"] == pytest.approx(0.5)


def test_the_command_runs_it_again_with_as_many_ranks(tmp_path: Path) -> None:
    assert figures.again(read(make(tmp_path))) == "cd /home/me && cputrain run 'my script.py' --x 1"
    make(tmp_path, ranks=2)
    assert figures.again(read(tmp_path)) == "cd /home/me && cputrain launch -n 2 'my script.py' --x 1"


def test_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    runs = [read(make(tmp_path / name, seconds=seconds)) for name, seconds in (("a", 1.0), ("b", 0.25))]
    assert figures.times_faster(runs) == [1.0, pytest.approx(4.0)]


@pytest.mark.parametrize(("seconds", "text"), [(0.51, "0.51 s"), (75, "1:15 min"), (3723, "1:02:03 h")])
def test_durations(seconds: float, text: str) -> None:
    assert figures.duration(seconds) == text
