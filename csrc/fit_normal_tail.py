"""Finds the coefficients in csrc/kernels/normal.h:  python csrc/fit_normal_tail.py  (needs numpy and scipy).

Each fit minimises the greatest error by Lawson's iteration (least squares, with weights that grow where the error is
large). Coefficients are rounded to float32 one after the other, highest power first, and the rest fitted again each
time, so that they make up for the rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import erf, erfcx

Terms = dict[str, np.ndarray]


def minimax(terms: Terms, target: np.ndarray, error: Callable, weight: Callable, fixed: dict[str, float]):
    """The least greatest error found, and the coefficients of `terms` that give it; `fixed` ones stay as they are."""
    free = [name for name in terms if name not in fixed]
    rest = target - sum(value * terms[name] for name, value in fixed.items())
    importance, best = np.ones_like(target), (np.inf, dict(fixed))
    for _ in range(300 if free else 1):
        scale = np.sqrt(importance) * weight(best[1])
        size = {name: np.abs(terms[name] * scale).max() for name in free}
        matrix = (
            np.stack([terms[name] * scale / size[name] for name in free], 1) if free else np.empty((len(target), 0))
        )
        solution = np.linalg.lstsq(matrix, rest * scale, rcond=None)[0]
        found = fixed | {name: value / size[name] for name, value in zip(free, solution, strict=True)}
        errors = np.abs(error(found))
        if errors.max() < best[0]:
            best = (errors.max(), found)
        importance = importance * (errors + 1e-3 * errors.max())
        importance /= importance.sum()
    return best


def rounded(title: str, terms: Terms, target: np.ndarray, error: Callable, weight: Callable, fixed: dict[str, float]):
    _, found = minimax(terms, target, error, weight, fixed)
    for name in terms:
        if name not in fixed:
            fixed = fixed | {name: float(np.float32(found[name]))}
            greatest, found = minimax(terms, target, error, weight, fixed)
    print(f"{title}: greatest error 2^{np.log2(greatest):.1f}")
    for name in terms:
        print(f"  {name} {np.float32(found[name])!r}")


def powers(name: str, x: np.ndarray, degree: int) -> Terms:
    return {f"{name}{i}": x**i for i in range(degree, -1, -1)}


def nodes(low: float, high: float, count: int = 3000) -> np.ndarray:
    return (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(count) + 0.5) / count)


def polynomial(title: str, name: str, x: np.ndarray, y: np.ndarray, degree: int, fixed: dict[str, float]) -> None:
    terms = powers(name, x, degree)

    def error(found):
        return (sum(found[n] * t for n, t in terms.items()) - y) / y

    rounded(title, terms, y, error, lambda found: 1 / y, fixed)


def quotient(title: str, x: np.ndarray, y: np.ndarray, degrees: tuple[int, int]) -> None:
    """p(x) / q(x) with q(0) = 1, from p - y·(q - 1) = y."""
    p, q = powers("p", x, degrees[0]), powers("q", x, degrees[1])

    def bottom(found):
        return sum(found[n] * t for n, t in q.items()) if "q1" in found else np.ones_like(x)

    def error(found):
        return sum(found[n] * t for n, t in p.items()) / bottom(found) / y - 1

    terms = p | {n: -y * t for n, t in q.items()}
    order = sorted(terms, key=lambda n: (-int(n[1:]), n))
    rounded(title, {n: terms[n] for n in order}, 0 * y, error, lambda found: 1 / (y * bottom(found)), {"q0": 1.0})


if __name__ == "__main__":
    r = nodes(-0.7, 0.7)
    polynomial("(e^(-r/2) - 1) / r, |r| <= ln 2", "e", r, np.expm1(-r / 2) / r, 5, {"e0": -0.5})
    square = nodes(1e-9, 1.0)
    x = np.sqrt(square)
    polynomial("(P(X < x) - 1/2) / x in x², |x| <= 1", "c", square, erf(x / np.sqrt(2)) / 2 / x, 4, {})
    t = 1 / nodes(1 / 13.2, 1 / 0.999)
    quotient("e^(t²/2) P(X > t), 1 <= t <= 13.2", t, erfcx(t / np.sqrt(2)) / 2, (3, 4))
