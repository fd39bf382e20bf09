"""A report for a terminal, without any package: figures, and curves of block characters."""

from __future__ import annotations

from collections.abc import Sequence

from cputrain.record.read import Run
from cputrain.record.recorder import BESIDE
from cputrain.report import figures
from cputrain.report.figures import Point

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR = 40


def text(runs: Sequence[Run], width: int = 60) -> str:
    parts = [_run(run, width) for run in runs]
    if len(runs) > 1:
        ratios = figures.times_faster(runs)
        lines = [
            f"  {run.name}  {f'{ratio:.2f}' if ratio else 'unknown'}" for run, ratio in zip(runs, ratios, strict=True)
        ]
        parts.append("\n".join(["times the first run's speed", *lines]))
    return _printable("\n\n".join(parts))


def _run(run: Run, width: int) -> str:
    rows = [*figures.tiles(figures.summary(run)), *figures.facts(run)]
    rows += [(name, f"{value:.5g}") for name, value in figures.last_metrics(run)]
    longest = max(len(name) for name, _ in rows)
    lines = [run.name, *(f"  {name:<{longest}}  {value}" for name, value in rows), ""]
    speed = "tokens a second" if figures.has_tokens(run) else "steps a second"
    for name, points in (("loss", figures.loss(run)), (speed, figures.speed(run))):
        if points:
            lines.append(f"  {name:<{longest}}  {curve(points, width)}  {points[0][1]:.4g} to {points[-1][1]:.4g}")
    for rank in run.ranks[:16]:
        lines += ["", f"  where rank {rank.rank}'s time goes, seconds a step", *_phases(figures.phases(rank), longest)]
    return "\n".join([*lines, "", f"  run it again: {figures.again(run)}"])


def curve(points: Sequence[Point], width: int) -> str:
    step = max(1, -(-len(points) // width))
    groups = [points[place : place + step] for place in range(0, len(points), step)]
    values = [sum(value for _, value in group) / len(group) for group in groups]
    least, most = min(values), max(values)
    return "".join(_BLOCKS[round((value - least) / (most - least) * 7) if most > least else 3] for value in values)


def _phases(phases: dict[str, float], longest: int) -> list[str]:
    most = max(phases.values(), default=0.0)
    beside = {BESIDE: "beside the backward"}
    bars = {name: "█" * round(_BAR * seconds / most) for name, seconds in phases.items()}
    return [
        f"  {name:<{longest}}  {bars[name]:<{_BAR}} {seconds:.3g} {beside.get(name, '')}".rstrip()
        for name, seconds in phases.items()
    ]


def _printable(text: str) -> str:
    """A record's words could move a terminal's cursor: what isn't printable is shown as its code."""
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)
