"""Writes docs/models.md: what `optimize` replaces in each model type of the installed transformers, and why not more.

python -m tests.sweep.models_page            (`make models`)
python -m tests.sweep.models_page --model bert gpt2 --output /dev/stdout
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import transformers

from tests.sweep import classes
from tests.sweep.cases import Case
from tests.sweep.runner import Record, run_all

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """# What is replaced in each model

`make models` writes this page: every model type of transformers {version} that can be built small without a further
package is optimised (fp32, padding dropped), runs one training step on a padded batch, and `cputrain.explain` tells
what ran. Model types with the same answer share a row. Besides that, in int16 and bf16 all larger linear layers
multiply in that precision. A type is shown by one class, its base model if it has one; heads add a linear layer or two.

"""

# The long sentences of `explain`, as the table has them.
_SHORT = {
    "embedding rows, LayerNorm and dropout in one pass": "embeddings",
    "feed-forward, residual and LayerNorm; activation recomputed": "feed-forward with residual and norm",
    "query, key, value as one product; tiled attention with dropout inside": "self-attention",
    "linear + dropout + residual + LayerNorm in one pass": "linear with residual and norm",
    "padding dropped between embeddings and head": "**padding dropped**",
    "real tokens only": "",
    "real tokens only, where it gets a row for each; 0 at padded positions": "",
    "dropout drawn in parallel": "dropout",
}
# Of more model types than this, a row names the first and counts the others.
_SHOWN = 40


def cases(models: list[str]) -> list[list[Case]]:
    found = []
    for model in models:
        kinds = classes.classes_of(model)
        if kinds:
            found.append([Case(model, kind, what="explain") for kind in kinds[:4]])
    return found


def first_answers(groups: list[list[Case]]) -> tuple[dict[str, dict], dict[str, str]]:
    """For each model type the answer of its first class that runs, or why none does."""
    answers: dict[str, dict] = {}
    reasons: dict[str, str] = {}

    def seen(record: Record) -> None:
        if record["verdict"] == "same":
            answers.setdefault(record["model"], json.loads(record["text"]))
        else:
            reasons.setdefault(record["model"], record["text"])

    firsts = [group[:1] for group in groups]
    run_all(firsts, 2, seen)
    run_all([group[1:] for group in groups if group[0].model not in answers and group[1:]], 2, seen)
    return answers, {model: reason for model, reason in reasons.items() if model not in answers}


def _cell(answer: dict) -> tuple[str, str]:
    replaced = [_SHORT.get(what, what) for what in answer["replaced"]]
    return ", ".join(dict.fromkeys(filter(None, replaced))) or "nothing", "; ".join(answer["stock"]) or "–"


def _names(models: list[str]) -> str:
    more = f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else ""
    return ", ".join(sorted(models)[:_SHOWN]) + more


def page(answers: dict[str, dict], reasons: dict[str, str]) -> str:
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for model, answer in answers.items():
        rows[_cell(answer)].append(model)
    lines = ["| model types | replaced | runs as stock, and why |", "|---|---|---|"]
    for (replaced, stock), models in sorted(rows.items(), key=lambda row: (-len(row[1]), row[1])):
        lines.append(f"| {_names(models)} | {replaced} | {stock.replace('|', '¦')} |")
    text = _HEAD.format(version=transformers.__version__) + "\n".join(lines) + "\n"
    if reasons:
        text += f"\n## Not shown\n\n{len(reasons)} types that the sweep can't build or run alone as stock:\n\n"
        text += "\n".join(_not_shown(reasons)) + "\n"
    return text


def _not_shown(reasons: dict[str, str]) -> list[str]:
    """Those that need a package by package, then the rest."""
    groups: dict[str, list[str]] = defaultdict(list)
    for model, reason in reasons.items():
        package = next((name for name in ("timm", "PIL", "detectron2", "natten", "torchaudio") if name in reason), None)
        groups[f"need {package}" if package else "need inputs or settings of their own"].append(model)
    return [f"- {what}: {', '.join(sorted(models))}" for what, models in sorted(groups.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", help="model types; all unless given")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    groups = cases(arguments.model or classes.model_types())
    arguments.output.write_text(page(*first_answers(groups)))


if __name__ == "__main__":
    main()
