"""From logits to answers, and from answers to exact match and F1, as SQuAD's official script computes them."""

from __future__ import annotations

import re
import string
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import mean

import numpy as np
from squad import Example, Windows


@dataclass(frozen=True)
class Search:
    """How answers are looked for."""

    n_best: int = 20
    longest: int = 30  # tokens
    may_be_unanswerable: bool = False
    null_threshold: float = 0.0


def n_best_answers(
    examples: list[Example], windows: Windows, start_logits: np.ndarray, end_logits: np.ndarray, search: Search
) -> dict[str, list[dict]]:
    """For each question its best spans over all its windows: text, score and probability, best first."""
    rows_of = defaultdict(list)
    for row, number in enumerate(windows.example_of):
        rows_of[number].append(row)
    found = {}
    for number, example in enumerate(examples):
        spans = [
            span
            for row in rows_of[number]
            for span in _spans(windows.offsets[row], start_logits[row], end_logits[row], search)
        ]
        spans = sorted(spans, reverse=True)[: search.n_best]
        candidates = [(score, example.context[first:last]) for score, first, last in spans]
        if search.may_be_unanswerable:
            nothing = min(float(start_logits[row][0] + end_logits[row][0]) for row in rows_of[number])
            candidates = _with_nothing(candidates, nothing, search.null_threshold)
        found[example.id] = _with_probabilities(candidates or [(0.0, "")])
    return found


def _spans(offsets: np.ndarray, start: np.ndarray, end: np.ndarray, search: Search) -> list[tuple[float, int, int]]:
    """(score, first character, last character) of this window's best spans inside the context."""
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    starts = inside[np.argsort(start[inside])[-search.n_best :]]
    ends = inside[np.argsort(end[inside])[-search.n_best :]]
    length = ends[None, :] - starts[:, None] + 1
    scores = start[starts][:, None] + end[ends][None, :]
    return [
        (float(scores[i, j]), int(offsets[starts[i], 0]), int(offsets[ends[j], 1]))
        for i, j in np.argwhere((length > 0) & (length <= search.longest))
    ]


def _with_nothing(candidates: list[tuple[float, str]], nothing: float, threshold: float) -> list[tuple[float, str]]:
    """ "No answer" comes first if it beats the best span by more than the threshold, and last otherwise."""
    best = candidates[0][0] if candidates else -np.inf
    empty = (nothing, "")
    return [empty, *candidates] if nothing - best > threshold else [*candidates, empty]


def _with_probabilities(candidates: list[tuple[float, str]]) -> list[dict]:
    scores = np.array([score for score, _ in candidates])
    weights = np.exp(scores - scores.max())
    return [
        {"text": text, "score": score, "probability": float(weight)}
        for (score, text), weight in zip(candidates, weights / weights.sum(), strict=True)
    ]


# --- As SQuAD's official script does it --------------------------------------------------------------------------


def score(examples: list[Example], predictions: dict[str, str]) -> dict[str, float]:
    """Exact match and F1 in percent, each question by its most favourable truth."""
    exact, f1 = [], []
    for example in examples:
        truths = [text for text, _ in example.answers] or [""]
        prediction = predictions[example.id]
        exact.append(max(float(normalised(prediction) == normalised(truth)) for truth in truths))
        f1.append(max(f1_score(prediction, truth) for truth in truths))
    return {"exact_match": 100 * mean(exact), "f1": 100 * mean(f1)}


def normalised(text: str) -> str:
    """Without case, punctuation, articles and needless blanks, removed in this order."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1_score(prediction: str, truth: str) -> float:
    predicted, expected = normalised(prediction).split(), normalised(truth).split()
    if not predicted or not expected:  # of "no answer": right or wrong
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))
