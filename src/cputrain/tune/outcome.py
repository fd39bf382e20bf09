"""What a search found: a table, the configuration with that table in its comments, and the command to train by it."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence

from cputrain.launch import config_file
from cputrain.launch.config import Config
from cputrain.secrets_in_clear import shown_words
from cputrain.tune.candidates import Candidate
from cputrain.tune.search import Verdict
from cputrain.tune.session import Plan
from cputrain.tune.trial import Training, with_batch
from cputrain.tune.tried import Tried

TRAINERS_OPTION = "--per_device_train_batch_size"


def table(plan: Plan, verdict: Verdict, tried: Tried) -> list[str]:
    """The fastest first; then what failed and what wasn't tried."""
    rows = [("candidate", "runs", "s a step", "")]
    for number in sorted(verdict.slower, key=lambda one: (one != verdict.winner, verdict.slower[one])):
        candidate = plan.candidates[number]
        times = tried.times_of(candidate)
        rows.append((candidate.words, str(len(times)), f"{statistics.median(times):.4g}", _what(number, verdict)))
    for number, candidate in enumerate(plan.candidates):
        if number not in verdict.slower:
            problem = tried.problem_of(candidate).splitlines()
            rows.append(
                (candidate.words, "", "", f"failed: {problem[-1]}" if problem else "not tried: the budget is spent")
            )
    rows += [(candidate.words, "", "", f"not tried: {why}") for candidate, why in plan.left_out]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]


def _what(number: int, verdict: Verdict) -> str:
    if number == verdict.winner:
        return "the winner"
    if number in verdict.equal:
        return "equal"
    by = verdict.slower[number]
    return f"{abs(by):.0%} {'slower' if by > 0 else 'faster in one round, not in all'}"


def text(base: Config, winner: Candidate, lines: Sequence[str], why: str, command: str) -> str:
    """The file that `cputrain launch` reads."""
    head = [
        f"Written by cputrain tune: {why}.",
        "Train by it:",
        f"  {command}",
        "What was tried:",
        *(f"  {one}" for one in lines),
    ]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in "\n".join(head).splitlines())
    return comments + config_file.to_text(winner.config(base).to_mapping())


def command(training: Training, winner: Candidate, plan: Plan, file: str) -> str:
    """With each rank's part of the batch."""
    words = training.sharing_batch(winner.ranks)
    if plan.batch is not None and winner.ranks > 1:
        words = _trainers(training.words, winner.ranks, plan.batch)
    return shlex.join(["cputrain", "launch", "--config_file", file, *shown_words(words)])


def _trainers(words: tuple[str, ...], ranks: int, batch: int) -> tuple[str, ...]:
    try:
        return with_batch(words, TRAINERS_OPTION, ranks)
    except ValueError:  # the script's default, or a word that it says itself
        return (*words, TRAINERS_OPTION, str(batch // ranks))
