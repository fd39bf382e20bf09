"""The charts of runs as Altair objects: the page shows them, and a notebook shows them as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cputrain.record.read import Run
from cputrain.record.recorder import BESIDE, PHASES
from cputrain.report import figures

if TYPE_CHECKING:
    import altair

# Told apart by people who don't see red and green alike (Okabe and Ito), and on white and black grounds.
COLORS = ("#0284c7", "#e0700c", "#0f9d6c", "#c2409a", "#b08900", "#6d5bd0", "#d03a3a", "#5f7482")
OF_PHASES = dict(zip((*PHASES, figures.OTHER), COLORS, strict=False))
# Stand for the page's colours of text and lines, which depend on its theme.
INK, FAINT = "#0a0b0c", "#d1d2d3"
_MOST_RUNS = len(COLORS)


def need_altair() -> Any:
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError:
        raise ValueError(
            'charts need Altair and vl-convert: pip install "cputrain[report]", or write --text, which needs neither.'
        ) from None
    return altair


def charts(runs: Sequence[Run], width: int = 640) -> dict[str, altair.Chart]:
    """By title; one that would be empty is left out."""
    alt = need_altair()
    names = labels(runs)
    found = {
        "Loss": _lines(alt, runs, names, figures.loss, "step", "loss", zero=False),
        "Speed": _lines(alt, runs, names, figures.speed, "step", _speed_name(runs)),
        "Share of the CPU's measured peak": _lines(
            alt, runs, names, figures.peak_share, "step", "share of peak", format="~%"
        ),
        "Where the time goes": _phases(alt, runs, names),
        "Memory": _memory(alt, runs, names),
    }
    return {title: _sized(chart, width) for title, chart in found.items() if chart is not None}


def labels(runs: Sequence[Run]) -> list[str]:
    """A name of its own for each run."""
    names = [run.name[:40] for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, 1)]


def _speed_name(runs: Sequence[Run]) -> str:
    return "real tokens a second" if all(map(figures.has_tokens, runs)) else "steps a second"


def _lines(
    alt: Any, runs: Sequence[Run], names: list[str], of: Any, x: str, y: str, zero: bool = True, format: str = "~s"
) -> Any:
    rows = [
        {"x": place, "y": value, "run": name}
        for run, name in zip(runs[:_MOST_RUNS], names, strict=False)
        for place, value in of(run)
    ]
    return _line_chart(alt, rows, names, x, y, zero, "" if y == "loss" else format)


def _line_chart(alt: Any, rows: list[dict[str, Any]], names: list[str], x: str, y: str, zero: bool, format: str) -> Any:
    if not rows:
        return None
    axis = alt.Axis(format=format) if format else alt.Axis()
    lone = len({row["x"] for row in rows}) == 1
    mark = alt.Chart(alt.Data(values=rows))
    return (mark.mark_point(filled=True, size=60) if lone else mark.mark_line(strokeWidth=1.8)).encode(
        x=alt.X("x:Q", title=x, scale=alt.Scale(nice=False), axis=alt.Axis(grid=False, tickCount=5)),
        y=alt.Y("y:Q", title=y, scale=alt.Scale(zero=zero), axis=axis),
        color=_color(alt, names),
    )


def _color(alt: Any, names: list[str]) -> Any:
    shown = names[:_MOST_RUNS]
    legend = alt.Legend(title=None, orient="top", columns=2, labelLimit=260) if len(shown) > 1 else None
    return alt.Color("run:N", scale=alt.Scale(domain=shown, range=list(COLORS[: len(shown)])), legend=legend)


def _phases(alt: Any, runs: Sequence[Run], names: list[str]) -> Any:
    """One bar for each rank: they should be alike, and where one waits the others' backward is longer."""
    rows, order = [], []
    for run, name in zip(runs[:_MOST_RUNS], names, strict=False):
        for rank in run.ranks[:64]:
            bar = (
                f"rank {rank.rank}" if len(runs) == 1 else name if len(run.ranks) == 1 else f"{name}, rank {rank.rank}"
            )
            order.append(bar)
            rows += [
                {"bar": bar, "phase": phase, "seconds": seconds, "place": place}
                for place, (phase, seconds) in enumerate(figures.phases(rank).items())
                if phase != BESIDE
            ]
    if not rows:
        return None
    shown = [phase for phase in OF_PHASES if any(row["phase"] == phase for row in rows)]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.8})
        .encode(
            x=alt.X("sum(seconds):Q", title="seconds a step", axis=alt.Axis(tickCount=5)),
            y=alt.Y("bar:N", title=None, sort=order, axis=alt.Axis(labelLimit=120)),
            color=alt.Color(
                "phase:N",
                scale=alt.Scale(domain=shown, range=[OF_PHASES[phase] for phase in shown]),
                legend=alt.Legend(title=None, orient="top", columns=3),
            ),
            order=alt.Order("place:Q"),
        )
    )


def _memory(alt: Any, runs: Sequence[Run], names: list[str]) -> Any:
    """Of each run's rank 0 where several runs are compared; of all ranks of a single one."""
    if len(runs) > 1:
        pairs = [(name, run.first) for name, run in zip(names, runs, strict=False)]
    else:
        pairs = [(f"rank {rank.rank}", rank) for rank in runs[0].ranks[:_MOST_RUNS]]
    rows = [{"x": x, "y": y, "run": name} for name, rank in pairs for x, y in figures.memory(rank)]
    return _line_chart(alt, rows, [name for name, _ in pairs], "minutes", "GB", True, "")


def _sized(chart: Any, width: int) -> Any:
    # What the axis and its labels need stands beside the chart's own width.
    sized = chart.properties(width=max(160, width - 70), **({} if "bar" in str(chart.mark) else {"height": 200}))
    axis = {"labelColor": INK, "titleColor": INK, "gridColor": FAINT, "domainColor": FAINT, "tickColor": FAINT}
    font = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    return (
        sized.configure(background="transparent", font="system-ui, sans-serif", padding=4)
        .configure_axis(**axis, **font)
        .configure_legend(labelColor=INK, titleColor=INK, labelFontSize=12)
        .configure_view(stroke=None)
    )


def svg(chart: Any) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart.to_json(), allowed_base_urls=[])


def png(runs: Sequence[Run]) -> bytes:
    """All charts in one picture, on white."""
    alt = need_altair()
    import vl_convert

    parts = [
        chart.properties(title=title).to_dict() | {"config": {}} for title, chart in charts(runs, width=760).items()
    ]
    for part in parts:
        part.pop("config"), part.pop("$schema", None)
    whole = {"$schema": alt.SCHEMA_URL, "vconcat": parts, "background": "white", "padding": 16, "spacing": 26}
    whole["config"] = {"title": {"anchor": "start", "fontSize": 15}, "view": {"stroke": None}}
    whole["config"]["font"] = "sans-serif"
    whole["resolve"] = {"scale": {"color": "independent"}}
    return vl_convert.vegalite_to_png(whole, scale=2, allowed_base_urls=[])
