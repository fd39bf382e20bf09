"""The figures of a run, from its record: sums and means, and series that are short enough for a picture."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cputrain.record.lines import Entry
from cputrain.record.read import Rank, Run, number
from cputrain.record.recorder import BESIDE, PHASES

POINTS = 300  # of a series: what the page's width can show
OTHER = "other"
Point = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """None: the record doesn't say."""

    steps: int
    total: int | None
    seconds: float
    step_seconds: float | None  # the median's neighbourhood is left to the charts: this is the mean without the first
    loss: float | None
    tokens_per_second: float | None  # real ones, of all ranks
    real_share: float | None
    peak_share: float | None
    memory: float | None  # bytes, of the rank that has most
    communication: float | None  # seconds a step
    how: str


def summary(run: Run) -> Summary:
    first, steps = run.first, _settled(run.first.steps)
    seconds, number_of_steps = total(steps, "s"), total(steps, "n")
    real = sum(total(_settled(rank.steps), "real") for rank in run.ranks)
    padded = sum(total(_settled(rank.steps), "padded") for rank in run.ranks)
    last = first.steps[-1] if first.steps else {}
    ends = [end for rank in run.ranks if (end := rank.end) is not None]
    memory = [number(end.get("peak")) for end in ends] + [
        entry.get("rss") for rank in run.ranks for entry in rank.steps
    ]
    beside = sum(entry["phases"].get(BESIDE, 0.0) for entry in steps)
    return Summary(
        steps=int(last.get("step", 0)),
        total=_whole(first.head.get("total")),
        seconds=total(first.steps, "s"),
        step_seconds=seconds / number_of_steps if number_of_steps else None,
        loss=_mean_loss(first.steps[-max(1, len(first.steps) // 20) :]),
        tokens_per_second=real / seconds if seconds and real else None,
        real_share=real / padded if padded else None,
        peak_share=_share(first.head, total(steps, "gflop"), seconds),
        memory=max((one for one in memory if one), default=None),
        communication=beside / number_of_steps if beside and number_of_steps else None,
        how=str(ends[0].get("how", "ended"))[:200] if ends else "still running, or stopped without a word",
    )


def _settled(steps: Sequence[Entry]) -> Sequence[Entry]:
    """Without the first line, in which memory was new, if others remain."""
    return steps[1:] if len(steps) > 2 else steps


def total(steps: Iterable[Entry], name: str) -> float:
    return sum(entry.get(name, 0.0) for entry in steps)


def _share(head: Entry, gflop: float, seconds: float) -> float | None:
    peak = number(head.get("peak_gflops"))
    return gflop / seconds / peak if peak and peak > 0 and gflop and seconds else None


def _mean_loss(steps: Sequence[Entry]) -> float | None:
    known = [(entry["loss"], entry["n"]) for entry in steps if "loss" in entry]
    return sum(loss * n for loss, n in known) / sum(n for _, n in known) if known else None


def _whole(value: Any) -> int | None:
    found = number(value)
    return int(found) if found and found > 0 else None


# --- Series -------------------------------------------------------------------------------------------------------

Value = Callable[[Sequence[Entry]], "float | None"]


def series(steps: Sequence[Entry], value: Value, points: int = POINTS) -> list[Point]:
    """At most so many points, each over neighbouring lines; the place of each is the last step that it holds."""
    width = max(1, -(-len(steps) // points))
    groups = [steps[place : place + width] for place in range(0, len(steps), width)]
    return [(group[-1]["step"], found) for group in groups if (found := value(group)) is not None]


def loss(run: Run) -> list[Point]:
    """The mean of the ranks, where they have the same steps."""
    of_ranks = [series(rank.steps, _mean_loss) for rank in run.ranks]
    first = of_ranks[0]
    if any(len(one) != len(first) for one in of_ranks):
        return first
    return [(points[0][0], sum(value for _, value in points) / len(points)) for points in zip(*of_ranks, strict=True)]


def speed(run: Run) -> list[Point]:
    """Real tokens a second of all ranks; steps a second where tokens aren't known."""
    name = "real" if has_tokens(run) else "n"
    ranks = len(run.ranks) if name == "real" else 1
    return series(
        run.first.steps, lambda group: ranks * total(group, name) / seconds if (seconds := total(group, "s")) else None
    )


def has_tokens(run: Run) -> bool:
    return total(run.first.steps, "real") > 0


def peak_share(run: Run) -> list[Point]:
    head = run.first.head
    return series(run.first.steps, lambda group: _share(head, total(group, "gflop"), total(group, "s")))


def memory(rank: Rank) -> list[Point]:
    """Minutes since the start, GB."""
    made = series(rank.steps, lambda group: max((entry.get("rss", 0.0) for entry in group), default=0.0) / 1e9 or None)
    minutes = dict(
        zip((entry["step"] for entry in rank.steps), (entry["clock"] / 60 for entry in rank.steps), strict=True)
    )
    return [(minutes[step], value) for step, value in made]


def phases(rank: Rank) -> dict[str, float]:
    """Seconds a step of each phase; what none of them is, is other. Communication runs beside them."""
    steps = _settled(rank.steps)
    number_of_steps = total(steps, "n") or 1
    found = {name: sum(entry["phases"].get(name, 0.0) for entry in steps) / number_of_steps for name in PHASES}
    left = total(steps, "s") / number_of_steps - sum(value for name, value in found.items() if name != BESIDE)
    return {name: value for name, value in {**found, OTHER: max(0.0, left)}.items() if value}


# --- Words --------------------------------------------------------------------------------------------------------


def again(run: Run) -> str:
    """The command that runs it again."""
    head = run.first.head
    words = head.get("command")
    if not isinstance(words, list) or not words:
        return "unknown: the record has no command"
    folder = head.get("folder")
    start = f"cd {shlex.quote(folder)} && " if isinstance(folder, str) and folder else ""
    size = _whole(head.get("size")) or 1
    words = [str(word) for word in words]
    if size > 1 and words[:2] == ["cputrain", "run"]:
        words = ["cputrain", "launch", "-n", str(size), *words[2:]]
    return start + shlex.join(words)


def facts(run: Run) -> list[tuple[str, str]]:
    """Model, machine and versions, as far as the record has them."""
    head = run.first.head
    model, machine, versions = (_mapping(head.get(name)) for name in ("model", "machine", "versions"))
    size = _whole(head.get("size")) or len(run.ranks)
    threads = _whole(head.get("threads"))
    parameters, trained = _whole(model.get("parameters")), _whole(model.get("trained"))
    of_model = [str(model.get(name)) for name in ("class", "name") if model.get(name)]
    of_model += [f"{_count(parameters)} parameters"] if parameters else []
    of_model += [f"{_count(trained)} trained"] if trained and trained != parameters else []
    peak = number(head.get("peak_gflops"))
    rows = [
        ("model", ", ".join(of_model)),
        ("number format", str(head.get("dtype", ""))),
        ("ranks", f"{size} × {threads} threads" if threads else str(size)),
        ("CPU", f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores" if machine else ""),
        ("measured peak", f"{peak:,.0f} GFLOP/s a rank" if peak else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("starts", f"{len(run.first.starts)}: it was started anew" if len(run.first.starts) > 1 else ""),
        (
            "broken lines",
            f"{sum(rank.broken for rank in run.ranks)} left out" if any(r.broken for r in run.ranks) else "",
        ),
    ]
    return [(name, text[:500]) for name, text in rows if text]


def _count(number_of: int) -> str:
    return f"{number_of / 1e6:,.1f} M" if number_of >= 100_000 else f"{number_of:,}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def last_metrics(run: Run) -> list[tuple[str, float]]:
    """The last of each, as an evaluation reported it."""
    found: dict[str, float] = {}
    for entry in run.first.metrics:
        for name, value in _mapping(entry.get("values")).items():
            known = number(value)
            if known is not None:
                found[str(name)[:200]] = known
    hidden = ("_runtime", "_per_second", "epoch", "_samples")
    return [(name, value) for name, value in found.items() if not name.endswith(hidden)][:50]


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min" if minutes else f"{seconds:.3g} s"
    )


def tiles(found: Summary) -> list[tuple[str, str]]:
    """What stands at the top: a name and a value each."""
    of = f" of {found.total:,}" if found.total and found.total != found.steps else ""
    rows = [
        ("steps", f"{found.steps:,}{of}"),
        ("time in steps", duration(found.seconds)),
        ("seconds a step", f"{found.step_seconds:.3g}" if found.step_seconds else None),
        ("last loss", f"{found.loss:.4g}" if found.loss is not None else None),
        ("real tokens a second", f"{found.tokens_per_second:,.0f}" if found.tokens_per_second else None),
        ("of the CPU's peak", percent(found.peak_share)),
        ("real tokens among all", percent(found.real_share)),
        (
            "seconds of communication a step, beside the rest",
            f"{found.communication:.2g}" if found.communication else None,
        ),
        ("peak memory of a rank", f"{found.memory / 1e9:.2f} GB" if found.memory else None),
    ]
    return [(name, value) for name, value in rows if value is not None]


def percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def times_faster(runs: Sequence[Run]) -> list[float | None]:
    """Each run's speed over the first's: by real tokens, or by steps where tokens aren't known."""
    by_tokens = all(map(has_tokens, runs))
    found = [summary(run) for run in runs]
    speeds = [
        one.tokens_per_second if by_tokens else (1 / one.step_seconds if one.step_seconds else None) for one in found
    ]
    return [speed / speeds[0] if speed and speeds[0] else None for speed in speeds]
