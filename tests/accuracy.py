"""How close a kernel must be: to float64, against the stock operator's own float32 error."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def assert_as_accurate(
    ours: Sequence[Tensor | None],
    stock: Sequence[Tensor | None],
    exact: Sequence[Tensor | None],
    names: Sequence[str],
    floor: float = 2e-7,
) -> None:
    """Each of ours is within twice stock's greatest error from the exact (float64) value, plus `floor` of its scale."""
    for our, theirs, truth, name in zip(ours, stock, exact, names, strict=True):
        if truth is None:
            assert our is None and theirs is None, name
            continue
        assert our is not None and theirs is not None and our.shape == truth.shape, name
        if truth.numel() == 0:
            continue
        error = (our.double() - truth).abs().max().item()
        limit = 2 * (theirs.double() - truth).abs().max().item() + floor * truth.abs().max().item()
        assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g}"
