"""What a sweep has found, as text."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from tests.sweep.cases import TOLERANCE, Case
from tests.sweep.inputs import SIDES
from tests.sweep.runner import Record

BAD = ("wrong", "crash")


def case_of(record: Record) -> Case:
    return Case(**{name: value for name, value in record.items() if name not in ("verdict", "text")})


def line(record: Record) -> str:
    setting = f"{record['dtype']} {record['padding']} {record['side']}{' square' * record['square']} {record['what']}"
    return f"{record['verdict']:9} {record['model']} {record['kind']} {setting}: {record['text']}".rstrip(": ")


def _by_type(records: list[Record]) -> dict[str, list[Record]]:
    grouped = defaultdict(list)
    for record in records:
        grouped[record["model"]].append(record)
    return grouped


def state_of_type(records: list[Record]) -> str:
    """The worst verdict of a model type; it was compared if one class of it was."""
    verdicts = {record["verdict"] for record in records}
    return next(kind for kind in ("crash", "wrong", "unsteady", "same", "not built") if kind in verdicts)


def summary(records: list[Record]) -> str:
    types = Counter(map(state_of_type, _by_type(records).values()))
    cases = Counter(record["verdict"] for record in records)
    compared = sum(types.values()) - types["not built"]
    rows = [
        f"{kind:10} {types[kind]:6} {cases[kind]:7}" for kind in ("same", "unsteady", "wrong", "crash", "not built")
    ]
    return "\n".join([f"{'verdict':10} {'types':>6} {'cases':>7}", *rows, f"{compared} model types compared"])


def _kind_of_failure(record: Record, settings: set[str]) -> tuple[str, ...]:
    """Failures that look alike share a group; `settings` are all in which results of this model type are wrong."""
    text = re.sub(r"\d[\d.e+-]*", "#", record["text"])
    if record["verdict"] == "wrong" and record["what"] == "results":
        text = next((name for name, members in _SETTINGS.items() if settings <= members), "in several settings")
    if record["verdict"] == "wrong" and record["what"] == "dropout":
        text = "lost" if "lost {(" in record["text"] else "added"
    if record["what"] == "restore":
        text = re.sub(r"\S*\|", "…|", text)
    return record["verdict"], record["what"], text


def _setting(record: Record) -> str:
    return f"{record['dtype']}/{record['padding']}/{record['side']}"


_ALL = {f"{dtype}/{padding}/{side}" for dtype in TOLERANCE for padding in ("drop", "keep") for side in SIDES}
_SETTINGS = {
    "only where padding on the left is dropped": {name for name in _ALL if name.endswith("drop/left")},
    "only where padding is dropped": {name for name in _ALL if "/drop/" in name and not name.endswith("none")},
    "only in int16": {name for name in _ALL if name.startswith("int16")},
    "only where padding is kept": {name for name in _ALL if "/keep/" in name},
}


def failures(records: list[Record]) -> str:
    bad = [record for record in records if record["verdict"] in BAD]
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for mine in _by_type(bad).values():
        settings = {_setting(record) for record in mine if record["what"] == "results"}
        for record in mine:
            groups[_kind_of_failure(record, settings)].append(record)
    parts = [summary(records), ""]
    for key, members in sorted(groups.items(), key=lambda item: (len(_by_type(item[1])), item[0])):
        types = _by_type(members)
        parts.append(f"== {' / '.join(key)}: {len(members)} cases of {len(types)} model types")
        for model, mine in sorted(types.items()):
            settings = Counter(map(_setting, mine))
            parts.append(f"  {model}: {', '.join(sorted({record['kind'] for record in mine}))}")
            parts.append(f"      settings: {', '.join(f'{name} × {n}' for name, n in sorted(settings.items()))}")
            parts.append(f"      {mine[0]['text']}")
            parts.append(f"      {case_of(mine[0]).command()}")
        parts.append("")
    return "\n".join(parts)
