"""Stock against cputrain over every model type of transformers; tests/sweep/__init__.py says how.

python -m tests.sweep --all                     every setting of every class (what `make soak` runs)
python -m tests.sweep --all --quick             three settings of each class
python -m tests.sweep --model bert gpt2         every setting of these types
python -m tests.sweep --model bert --class BertModel --dtype int16 --padding drop --side left --seed 3
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

from tests.sweep import classes, report
from tests.sweep.cases import Case, cases_of
from tests.sweep.runner import Record, run_all


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all model types")
    parser.add_argument("--quick", action="store_true", help="three settings of each class, chosen by its name")
    parser.add_argument("--model", nargs="+", default=[], help="model types, as transformers' CONFIG_MAPPING has them")
    parser.add_argument("--class", dest="kind", help="one class of the model type; all unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["fp32", "int16"])
    parser.add_argument("--padding", choices=["drop", "keep"])
    parser.add_argument("--side", choices=["none", "right", "left"])
    parser.add_argument("--what", choices=["results", "dropout", "restore"])
    parser.add_argument("--square", action="store_true", default=None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every verdict there, one JSON object per line")
    parser.add_argument("--failures", type=Path, help="write the report of failures there too")
    return parser.parse_args()


def _quick(cases: list[Case]) -> list[Case]:
    """Three of the results and one of the dropouts, others for each class, and the restoring."""
    number = sum(map(ord, cases[0].kind + cases[0].model))
    results = [case for case in cases if case.what == "results"]
    drops = [case for case in cases if case.what == "dropout"]
    chosen = [results[(number + step) % len(results)] for step in (0, 4, 8)]
    return [*chosen, drops[number % len(drops)], cases[-1]]


def chosen_cases(arguments: argparse.Namespace) -> list[list[Case]]:
    groups = []
    for model in classes.model_types() if arguments.all else arguments.model:
        for kind in [arguments.kind] if arguments.kind else classes.classes_of(model):
            cases = cases_of(model, kind, arguments.seed)
            for name in ("dtype", "padding", "side", "what"):
                wanted = getattr(arguments, name)
                cases = [case for case in cases if wanted is None or getattr(case, name) == wanted]
            if arguments.square is not None:
                cases = [Case(**{**vars(case), "square": True}) for case in cases]
            groups.append(_quick(cases) if arguments.quick else cases)
    return [group for group in groups if group]


def main() -> int:
    arguments = parse_arguments()
    if not arguments.all and not arguments.model:
        raise SystemExit("nothing to do: give --all or --model TYPE …; --help has examples")
    groups = chosen_cases(arguments)
    total, begin = sum(map(len, groups)), time.monotonic()
    records: list[Record] = []
    lock = threading.Lock()
    sink = arguments.json.open("w") if arguments.json else None

    def seen(record: Record) -> None:
        with lock:
            records.append(record)
            if sink is not None:
                print(json.dumps(record), file=sink, flush=True)
            if (
                record["verdict"] in ("wrong", "crash")
                or total <= 50
                or (arguments.model and record["verdict"] != "same")
            ):
                print(report.line(record), flush=True)
            if len(records) % 500 == 0:
                print(f"… {len(records)} cases in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
                if arguments.failures:
                    arguments.failures.write_text(report.failures(records))

    run_all(groups, arguments.workers, seen)
    print(report.summary(records))
    if arguments.failures:
        arguments.failures.write_text(report.failures(records))
    return 1 if any(record["verdict"] in ("wrong", "crash") for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
