"""One case: one class of one model type in one setting; and the comparison of stock with ours in it."""

from __future__ import annotations

import copy
import itertools
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import cputrain
from cputrain.blocks import head, leaves
from tests.sweep import choices, classes, dropouts, explaining, measure, restoring, shrink, weights
from tests.sweep import inputs as inputs_of
from tests.sweep.inputs import Inputs
from tests.sweep.measure import Result

TOLERANCE = {"fp32": 1e-4, "int16": 2e-2}
# How much weights are disturbed to see how steady the stock model is: a few times a product's error, which in int16 is
# 0.7e-4 at 64 features and 1.7e-4 at 384.
NOISE = {"fp32": 1e-6, "int16": 3e-4}
TRIALS = 4  # of such noise: a token that stands between two experts goes to the other only now and then
STEADY = 10  # an error counts if it is larger than this many times what the noise does
UNSTEADY = 0.3  # where noise alone changes a tensor by this much, nothing can be said


@dataclass(frozen=True)
class Case:
    model: str
    kind: str  # the class
    seed: int = 0
    square: bool = False
    dtype: str = "fp32"
    padding: str = "drop"
    side: str = "right"
    what: str = "results"  # or "dropout", "restore", "explain"

    def command(self) -> str:
        words = ["python -m tests.sweep", f"--model {self.model} --class {self.kind} --seed {self.seed}"]
        words += [f"--dtype {self.dtype} --padding {self.padding} --side {self.side} --what {self.what}"]
        return " ".join(words + ["--square"] * self.square)


@dataclass
class Verdict:
    """`kind`: same, wrong, crash, unsteady, not built."""

    kind: str
    text: str = ""

    def record(self, case: Case) -> dict[str, Any]:
        return asdict(case) | {"verdict": self.kind, "text": self.text}


class NotBuilt(Exception):
    """The stock model can't be made or run here; the message says why."""


def lower_thresholds() -> None:
    """Models of the sweep are so small that single layers would run as stock."""
    leaves.WORTHWHILE = leaves.WORTHWHILE_PRODUCT = leaves.FEWEST_FEATURES = 1
    head.FEWEST_BYTES = head.FEWEST_FEATURES = 1


def cases_of(model: str, kind: str, seed: int) -> list[Case]:
    """Every setting of one class: all results, then dropout and restore."""
    found = []
    for dtype, padding, side in itertools.product(("fp32", "int16"), ("drop", "keep"), inputs_of.SIDES):
        square = (padding == "keep") != (side == "left")
        found.append(Case(model, kind, seed, square, dtype, padding, side))
    found += [Case(model, kind, seed, False, "fp32", padding, side, "dropout") for padding, side in _WITH_DROPOUT]
    return [*found, Case(model, kind, seed, what="restore")]


_WITH_DROPOUT = (("drop", "none"), ("keep", "right"), ("drop", "right"))


@dataclass
class Pristine:
    """A stock model with random weights that has never run, and inputs that it takes."""

    model: nn.Module
    inputs: Inputs


def build(case: Case, dropout: bool = False) -> nn.Module:
    measure.seed_everything(case.seed)
    try:
        size = shrink.SMALL.square() if case.square else shrink.SMALL
        config = shrink.shrunken(case.model, size, dropout=dropout)
        model = classes.load(case.model, case.kind)(config)
    except Exception as error:
        raise NotBuilt(_told(error)) from error
    if sum(p.numel() for p in model.parameters()) > 40e6:
        raise NotBuilt("still larger than 40 million parameters")
    weights.randomise(model, case.seed)
    weights.switch_dropout_off(model, layers_only=dropout)
    return model


def pristine(case: Case, dropout: bool = False) -> Pristine:
    model = build(case, dropout)
    errors = []
    recipes = inputs_of.recipes(model)
    for recipe in _accepted.get((case.model, case.kind), recipes):
        try:
            candidate = inputs_of.Maker(model, case.side, case.seed).make(recipe)
            measure.run(copy.deepcopy(model), candidate, training=False, seed=case.seed)
        except Exception as error:  # noqa: BLE001
            errors.append(f"{'+'.join(kind for kind, _ in recipe)}: {_told(error)}")
            continue
        _accepted[(case.model, case.kind)] = [recipe, *recipes]
        return Pristine(model, candidate)
    raise NotBuilt(
        "; ".join(error[:200] for error in errors[:4]) or f"no inputs known for {type(model).__name__}'s forward"
    )


# The recipe that each class took; it is tried first the next time.
_accepted: dict[tuple[str, str], list[inputs_of.Recipe]] = {}


def check(case: Case) -> Verdict:
    checks = {
        "results": check_results,
        "dropout": dropouts.check,
        "restore": restoring.check,
        "explain": explaining.check,
    }
    try:
        return checks[case.what](case, pristine(case, dropout=case.what == "dropout"))
    except NotBuilt as error:
        return Verdict("not built", str(error))


def optimised(case: Case, model: nn.Module) -> nn.Module:
    return cputrain.optimize(copy.deepcopy(model), dtype=case.dtype, padding=case.padding)


def check_results(case: Case, given: Pristine) -> Verdict:
    stock = copy.deepcopy(given.model)
    try:
        ours = optimised(case, given.model)
    except Exception:  # noqa: BLE001
        return Verdict("crash", f"in optimize: {_told_last()}")
    for training in (True, False):
        mode = "training" if training else "evaluation"
        try:
            with choices.Record() as chosen:
                theirs = measure.run(stock, given.inputs, training=training, seed=case.seed)
        except Exception as error:  # noqa: BLE001
            return Verdict("not built", f"in {mode}: {_told(error)}")
        try:
            mine = measure.run(ours, given.inputs, training=training, seed=case.seed)
        except Exception:  # noqa: BLE001
            return Verdict("crash", f"in {mode}: {_told_last()}")
        verdict = _judged(case, given, mine, theirs, training)
        if verdict.kind != "same" and chosen.made:
            with choices.Replay(chosen.made):
                mine = measure.run(ours, given.inputs, training=training, seed=case.seed)
            verdict = _judged(case, given, mine, theirs, training)
        if verdict.kind != "same":
            return Verdict(verdict.kind, f"in {mode}: {verdict.text}")
    return Verdict("same")


def _judged(case: Case, given: Pristine, mine: Result, theirs: Result, training: bool) -> Verdict:
    norm = case.dtype != "fp32"
    options: dict[str, Any] = {"all_positions": case.padding == "keep", "norm": norm}
    found = measure.differences(mine, theirs, given.inputs, **options)
    wrong = [difference for difference in found if not difference.error <= TOLERANCE[case.dtype]]
    if not wrong:
        return Verdict("same")
    moved = _moved_by_noise(case, given, theirs, training, options)
    sure = [d for d in wrong if not d.error <= STEADY * moved.get(d.where, 0.0)]
    if sure:
        return Verdict("wrong", f"{len(sure)} of {len(found)} tensors: {sure[0].where} {sure[0].text}")
    shaky = [d.where for d in wrong if moved[d.where] > UNSTEADY / STEADY]
    return Verdict("unsteady", f"noise alone moves {shaky[0]}") if shaky else Verdict("same")


def _moved_by_noise(case: Case, given: Pristine, theirs: Result, training: bool, options: dict) -> dict[str, float]:
    """By how much each tensor of the stock model changes if its weights are disturbed as little as rounding does.

    A model that draws random numbers in training (for its routing, say) draws others for fewer tokens.
    """
    moved: dict[str, float] = {}
    drops_tokens = case.padding == "drop" and case.side != "none"
    for number in range(TRIALS):
        model = copy.deepcopy(given.model)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                    parameter.mul_(1 + NOISE[case.dtype] * noise)
        draws = case.seed + number if drops_tokens else None
        disturbed = measure.run(model, given.inputs, training=training, seed=case.seed, draws=draws)
        for difference in measure.differences(disturbed, theirs, given.inputs, **options):
            moved[difference.where] = max(moved.get(difference.where, 0.0), difference.error)
    return moved


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(line.strip() for line in lines)}"[:300]


def _told_last() -> str:
    """The error that is being handled, with the place in cputrain or in the model where it arose."""
    lines = traceback.format_exc().strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    ours = [place for place in places if "cputrain/" in place]
    place = (ours or places)[-1].split("/")[-1].replace('"', "")
    return f"{lines[-1][:200]} ({place})"
