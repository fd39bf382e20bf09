"""Which rank failed first: one that names no other rank as the cause, or the one that the others name."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping

from cputrain.blame import Blame
from cputrain.launch import processes
from cputrain.launch.peers import Failure


def is_open(codes: Mapping[int, int | None], blames: Mapping[int, Blame]) -> bool:
    """Whether the cause may still show: every rank that failed blames one that hasn't ended, or is elsewhere.

    `codes` are the exit codes of this machine's ranks, None while they run; `blames` are those of the failed ones.
    """
    failed = {rank for rank, code in codes.items() if code}
    culprits = {blame.culprit for rank, blame in blames.items() if rank in failed}
    return failed <= set(blames) and any(codes.get(culprit) is None for culprit in culprits)


def judge(codes: Mapping[int, int | None], blames: Mapping[int, Blame], host: str) -> Failure:
    """At least one rank has failed."""
    failed = {rank: code for rank, code in codes.items() if code}
    by_themselves = [rank for rank in failed if rank not in blames]
    if by_themselves:
        rank = by_themselves[0]
        return Failure(f"rank {rank} on {host} {_ending(failed[rank])}", processes.exit_code(failed[rank]) or 1)
    culprit = Counter(blames[rank].culprit for rank in failed).most_common(1)[0][0]
    witness = next(rank for rank in failed if blames[rank].culprit == culprit)
    words = blames[witness].sentence.rstrip(".")
    if words.startswith("CollectivesDiffer"):  # each blames the other: the sentence says what both called
        return Failure(f"rank {witness} on {host} failed: {words}", 1)
    return Failure(f"rank {culprit} is the cause, as rank {witness} on {host} found: {words}", 1)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
