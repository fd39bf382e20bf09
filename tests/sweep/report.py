"""What a sweep has found, as text."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from tests.sweep.cases import Case
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


def _kind_of_failure(record: Record) -> tuple[str, ...]:
    """Failures that look alike share a group: the text without numbers and names, and the setting."""
    text = re.sub(r"[-+]?\d[\d.e+-]*", "#", record["text"])
    if record["what"] == "results" and record["verdict"] == "wrong":
        text = re.sub(r"(gradient|output) .*", r"\1 …", re.sub(r"# of # tensors: ", "", text))
        text = "results differ"
    if record["what"] == "dropout" and record["verdict"] == "wrong":
        text = "dropouts lost" if "lost {(" in record["text"] else "dropouts added"
    if record["what"] == "restore":
        text = re.sub(r"\S*\|", "…|", text)
    return record["verdict"], record["what"], text


def failures(records: list[Record]) -> str:
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record["verdict"] in BAD:
            groups[_kind_of_failure(record)].append(record)
    parts = [summary(records), ""]
    for key, members in sorted(groups.items(), key=lambda item: -len({r["model"] for r in item[1]})):
        types = _by_type(members)
        parts.append(f"== {' / '.join(key)}: {len(members)} cases of {len(types)} model types")
        for model, mine in sorted(types.items()):
            settings = Counter(f"{r['dtype']}/{r['padding']}/{r['side']}" for r in mine)
            kinds = sorted({r["kind"] for r in mine})
            parts.append(f"  {model}: {', '.join(kinds)}")
            parts.append(f"      settings: {', '.join(f'{name}×{n}' for name, n in sorted(settings.items()))}")
            parts.append(f"      {mine[0]['text']}")
            parts.append(f"      {case_of(mine[0]).command()}")
        parts.append("")
    return "\n".join(parts)
