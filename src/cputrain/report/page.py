"""One HTML page without scripts: its content-security policy allows its own style sheet, and nothing else.

Records come from anywhere, so every word of them goes through `html.escape`, or through Vega's own SVG, as text.
Charts are drawn twice, for a phone and for a desktop; the style sheet shows one, in the reader's light or dark theme.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from cputrain import __version__
from cputrain.record.read import Run
from cputrain.report import charts, figures

_WIDTHS = {"narrow": 320, "wide": 660}
_MOST_EVENTS = 200

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5b6675;--faint:#d5dae1;--ground:#f6f7f9;--card:#fff;--mark:#0369a1}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf0;--soft:#a3adba;--faint:#3a4350;--ground:#12161c;--card:#1b212a;
--mark:#56b9f2}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1440px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:1.5rem;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1rem;margin:0 0 8px}
p.lead{color:var(--soft);margin:0 0 20px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:0 0 16px}
.tile,section{background:var(--card);border:1px solid var(--faint);border-radius:10px}
.tile{padding:10px 14px}
.tile b{display:block;font-size:1.3rem;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}
.grid{display:grid;grid-template-columns:minmax(0,1fr);gap:16px;align-items:start}
section{padding:16px;min-width:0;overflow-x:auto}
svg{display:block;max-width:100%;height:auto;overflow:visible}
.wide{display:none}
table{border-collapse:collapse;width:100%;font-size:.9rem}
td,th{text-align:left;vertical-align:top;padding:5px 10px 5px 0;border-bottom:1px solid var(--faint);
overflow-wrap:anywhere}
th{color:var(--soft);font-weight:500;min-width:7em;overflow-wrap:break-word}
td.n{font-variant-numeric:tabular-nums}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font-size:.85rem}
summary{cursor:pointer;font-weight:600}
details>*:not(summary){margin-top:10px}
footer{color:var(--soft);font-size:.85rem;margin-top:20px}
@media(min-width:760px){.narrow{display:none}.wide{display:block}}
@media(min-width:1180px){.grid{display:block;columns:2;column-gap:16px}.grid>*{break-inside:avoid;margin-bottom:16px}
.whole{column-span:all}}
@media print{section,.tile{break-inside:avoid}}
"""


def page(runs: Sequence[Run]) -> str:
    names = charts.labels(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    drawn = {kind: charts.charts(runs, width) for kind, width in _WIDTHS.items()}
    parts = [_card(name, _pictures(name, drawn)) for name in drawn["wide"]]
    head = _tiles(runs[0]) if len(runs) == 1 else ""
    body = [
        *([_card("The runs", _comparison(runs, names), whole=True)] if len(runs) > 1 else []),
        *parts,
        *[
            _card("Run it again", _again(run), name if len(runs) > 1 else "")
            for run, name in zip(runs, names, strict=True)
        ],
        *[
            _card("Metrics", _metrics(run), name if len(runs) > 1 else "")
            for run, name in zip(runs, names, strict=True)
        ],
        *[
            _card("Facts", _table(figures.facts(run)), name if len(runs) > 1 else "")
            for run, name in zip(runs, names, strict=True)
        ],
        *[_details(run, name if len(runs) > 1 else "") for run, name in zip(runs, names, strict=True)],
    ]
    return _document(title, _lead(runs), head, "".join(part for part in body if part))


def _document(title: str, lead: str, head: str, body: str) -> str:
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f'<body><main><h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>{head}'
        f'<div class="grid">{body}</div><footer>Written by cputrain {__version__}; this page loads nothing and runs no '
        "script.</footer></main></body></html>\n"
    )


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        faster = figures.times_faster(runs)[1:]
        words = [f"{ratio:.2f} times the first run's speed" for ratio in faster if ratio]
        return "; ".join(words) or "their speeds can't be compared"
    return ", ".join(text for _, text in figures.facts(runs[0])[:4]) + f"; {figures.summary(runs[0]).how}"


def _tiles(run: Run) -> str:
    made = [
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for name, value in figures.tiles(figures.summary(run))
    ]
    return f'<div class="tiles">{"".join(made)}</div>'


def _card(title: str, inner: str, of: str = "", whole: bool = False) -> str:
    if not inner:
        return ""
    heading = html.escape(f"{title}: {of}" if of else title)
    return f"<section{' class=whole' if whole else ''}><h2>{heading}</h2>{inner}</section>"


def _pictures(name: str, drawn: dict[str, dict[str, Any]]) -> str:
    return "".join(
        f'<div class="{kind}">{_svg(drawn[kind][name], name)}</div>' for kind in _WIDTHS if name in drawn[kind]
    )


def _svg(chart: Any, title: str) -> str:
    """In the page's colours. Vega marks its groups with roles; a reader of screens gets the chart's title."""
    text = charts.svg(chart).replace(charts.INK, "var(--ink)").replace(charts.FAINT, "var(--faint)")
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', text, count=1)


def _comparison(runs: Sequence[Run], names: list[str]) -> str:
    found = [dict(figures.tiles(figures.summary(run))) for run in runs]
    rows = [(name, [one.get(name, "") for one in found]) for name in dict.fromkeys(key for one in found for key in one)]
    ratios = [f"{ratio:.2f}" if ratio else "" for ratio in figures.times_faster(runs)]
    rows.append(("times the first run's speed", ratios))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["", *names])
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td class=n>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    made = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{made}</table>" if made else ""


def _again(run: Run) -> str:
    command = figures.again(run)
    hidden = "<p>Secrets are not recorded: put your own in place of ***.</p>" if "***" in command else ""
    return f"<pre>{html.escape(command)}</pre>{hidden}"


def _metrics(run: Run) -> str:
    return _table((name, f"{value:.5g}") for name, value in figures.last_metrics(run))


def _details(run: Run, of: str) -> str:
    head = run.first.head
    blocks = [("What happened", _events(run)), ("What cputrain replaced", _explained(head.get("explain")))]
    for name in ("arguments", "environment"):
        values = head.get(name)
        rows = values.items() if isinstance(values, dict) else ()
        blocks.append(
            (name.capitalize(), _table((str(key), json.dumps(value)[:2000]) for key, value in list(rows)[:500]))
        )
    suffix = f": {of}" if of else ""
    return "".join(
        f"<section><details><summary>{html.escape(title + suffix)}</summary>{inner}</details></section>"
        for title, inner in blocks
        if inner
    )


def _events(run: Run) -> str:
    rows = []
    for rank in run.ranks:
        for event in rank.events[:_MOST_EVENTS]:
            rows.append(
                (event["clock"], f"{event['clock']:,.1f} s, rank {rank.rank}", str(event.get("text", ""))[:2000])
            )
    return _table((when, text) for _, when, text in sorted(rows)[:_MOST_EVENTS])


def _explained(explain: Any) -> str:
    found = explain if isinstance(explain, dict) else {}
    rows = [row for name in ("facts", "modules") if isinstance(found.get(name), list) for row in found[name][:200]]
    whole = [row for row in rows if isinstance(row, list) and len(row) == 3]
    return _table((f"{row[0]} {row[1]}"[:300], str(row[2])[:1000]) for row in whole)
