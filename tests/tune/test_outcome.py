"""What the user gets: a table, a file that `launch` reads, and the command with each rank's part of the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from cputrain.launch import config_file
from cputrain.launch.config import Config
from cputrain.tune import outcome
from cputrain.tune.candidates import Candidate
from cputrain.tune.search import Verdict
from cputrain.tune.session import Plan, Session
from cputrain.tune.trial import Measured, Training, with_batch
from cputrain.tune.tried import Tried

ONE, TWO, BOUND = Candidate(1, 2), Candidate(2, 1), Candidate(1, 2, binds_threads=True, differs=1)
PLAN = Plan([ONE, TWO, BOUND], [(Candidate(4, 1), "4 ranks can't share a batch of 6 evenly")], 10, 6, 2)
MARK = {"training": "a"}


def tried(folder: Path) -> Tried:
    found = Tried(folder / "tried.jsonl", MARK)
    for candidate, seconds in ((ONE, 1.0), (TWO, 0.5), (ONE, 1.2), (TWO, 0.7)):
        found.note(candidate, seconds, "")
    found.note(BOUND, None, "exit code 1\nout of memory")
    return found


def test_a_table_a_file_and_a_command(tmp_path: Path) -> None:
    verdict = Verdict(1, "one is clearly the fastest", {0: 0.83, 1: 0.0}, [], {0: 1})
    lines = outcome.table(PLAN, verdict, tried(tmp_path))
    assert [line.split("  ")[0] for line in lines] == [
        "candidate",
        "2 ranks × 1 thread",
        "1 rank × 2 threads",
        "1 rank × 2 threads, threads bound",
        "4 ranks × 1 thread",
    ]
    assert "the winner" in lines[1] and " 0.6 " in lines[1] and lines[2].endswith("83% slower")
    assert lines[3].endswith("failed: out of memory") and lines[4].endswith("can't share a batch of 6 evenly")
    training = Training(("train.py", "--per_device_train_batch_size=6", "--hub_token", "secret"))
    command = outcome.command(training, TWO, PLAN, "my file.yaml")
    assert command.endswith("'my file.yaml' train.py --per_device_train_batch_size=3 --hub_token '***'")
    base = Config(mixed_precision="bf16", env=("A=1",))
    text = outcome.text(base, TWO, lines, verdict.why, command)
    assert all(f"#   {line}" in text for line in lines) and "secret" not in text
    (tmp_path / "best.yaml").write_text(text)
    assert config_file.read(tmp_path / "best.yaml") == TWO.config(base)


def test_an_argument_with_a_new_line_stays_a_comment(tmp_path: Path) -> None:
    command = outcome.command(Training(("t.py", "a\nhostfile: evil\r\u2028engine: mpi")), ONE, PLAN, "f")
    (tmp_path / "best.yaml").write_text(outcome.text(Config(), ONE, [], "why", command))
    assert config_file.read(tmp_path / "best.yaml") == ONE.config(Config())


def test_a_batch_that_the_command_does_not_name_is_added() -> None:
    assert outcome.command(Training(("t.py",)), TWO, PLAN, "f").endswith("t.py --per_device_train_batch_size 3")
    assert outcome.command(Training(("t.py",)), ONE, PLAN, "f").endswith("f t.py")


def test_an_options_value_is_shared() -> None:
    assert with_batch(("t.py", "-b", "8", "--x"), "-b", 4) == ("t.py", "-b", "2", "--x")
    assert with_batch(("t.py", "--batch=8"), "--batch", 2) == ("t.py", "--batch=4")
    for words in (("t.py", "-b", "6"), ("t.py", "-b"), ("t.py", "-b", "x"), ("t.py",)):
        with pytest.raises(ValueError, match=r"can't share that evenly|have no -b"):
            with_batch(words, "-b", 4)


def test_what_was_tried_is_read_again_in_its_order(tmp_path: Path) -> None:
    before = tried(tmp_path)
    before.note_facts({"steps": 10, "took": 5.0})
    with (tmp_path / "tried.jsonl").open("a") as file:
        file.write('{"kind": "trial", "candidate": 3}\n[]\n{"kind": "tri')  # cut off, or made up
    after = Tried(tmp_path / "tried.jsonl", MARK)
    assert after.goes_on and after.facts == before.facts
    assert [after.next_of(TWO) for _ in range(3)] == [[0.5], [0.7], []]
    assert after.next_of(BOUND) == [None] and after.problem_of(BOUND).endswith("out of memory")
    other = Tried(tmp_path / "tried.jsonl", {"training": "b"})
    assert not other.goes_on and other.next_of(ONE) == [] and not other.facts


def test_the_budget_decides_how_many_are_tried_and_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes, two seconds a step: four steps that count are ten seconds, and 21 such trials make a first round."""
    asked: list[int] = []

    def run(training: Training, config: Config, steps: int, most: float) -> Measured:
        asked.append(steps)
        return Measured(2.0, 20.0, "", {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2})

    monkeypatch.setattr("cputrain.tune.trial.run", run)
    many = [Candidate(ranks, 1) for ranks in (1, 2, 3, 4, 5, *range(6, 200, 6))]
    session = Session(Training(("t.py",)), Config(), tried(tmp_path), 600.0, print, print)
    made = session.plan(many)
    assert (made.steps, made.batch, made.accumulation) == (6, 12, 2) and asked == [5]
    assert [one.ranks for one in made.candidates] == [1, 2, 3, 4, 6, 12]
    why = {one.ranks: reason for one, reason in made.left_out}
    assert why[5] == "5 ranks can't share a batch of 12 evenly"
    short = Session(Training(("t.py",)), Config(), session.tried, 100.0, print, print)
    assert len(short.plan(many).candidates) == 3 and asked == [5], "what an earlier session found counts"


def test_without_a_known_batch_only_one_rank_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cputrain.tune.trial.run", lambda *_, **__: Measured(2.0, 20.0, "", None))
    made = Session(Training(("t.py",)), Config(), tried(tmp_path), 600.0, print, print).plan([ONE, TWO, BOUND])
    assert made.candidates == [ONE, BOUND] and "--batch-option names" in made.left_out[0][1]
    training = Training(("t.py", "-b", "8"), batch_option="-b")
    made = Session(training, Config(), Tried(tmp_path / "b", MARK), 600.0, print, print).plan([ONE, TWO, BOUND])
    assert made.candidates == [ONE, TWO, BOUND]
