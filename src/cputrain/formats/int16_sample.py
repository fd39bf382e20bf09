"""A sample of an int16 product: which vectors are multiplied again, and how far int16 is off on them.

Two kinds of vectors are taken from each side. Some stand at places that move on from look to look, so that every vector
is seen in time. The others are those that int16 is hardest on: values of a block share a scale, so a block with a large
value keeps little of its small ones. These are the vectors with the largest values, and those whose largest value
stands out most from the rest of its block.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from cputrain.formats import int16_matmul as matmul

SPREAD, OUTLIERS = 16, 4  # vectors at moving places; those with the largest values, and as many that stand out most
SAMPLE = SPREAD + 2 * OUTLIERS  # of each side, at most
# bf16 has 8 significant bits: a result that is closer than half a unit of the last is as good as bf16's.
TOLERATED = 2.0**-9

Side = Literal["left", "right"]
# Multiples of these, modulo 1, spread most evenly over 0 … 1 however many there are (the golden and the silver ratio).
# They differ, so that the places of the two sides don't move together.
_STEP = {"left": (math.sqrt(5) - 1) / 2, "right": math.sqrt(2) - 1}


def sampled_rows(x: Tensor, look: int, side: Side) -> Tensor:
    """The rows of x that the look of this number multiplies."""
    return x[_places(x, 1, look, side)]


def sampled_columns(x: Tensor, look: int, side: Side) -> Tensor:
    """The columns of x that the look of this number multiplies, as rows."""
    return x[:, _places(x, 0, look, side)].t().contiguous()


def _places(x: Tensor, depth_dim: int, look: int, side: Side) -> Tensor:
    count = x.shape[1 - depth_dim]
    if count <= SPREAD:
        return torch.arange(count)
    return torch.cat((_spread(count, look, side), _outliers(x, depth_dim))).unique()


def _spread(count: int, look: int, side: Side) -> Tensor:
    """Places in 0 … count - 1, far apart, others in every look; no random generator is used."""
    points = torch.arange(look * SPREAD, (look + 1) * SPREAD, dtype=torch.float64) * _STEP[side]
    return (points % 1.0 * count).long()


def _outliers(x: Tensor, depth_dim: int) -> Tensor:
    """The vectors with the largest values, and those with a value that stands out most from the mean of its block."""
    largest, standing_out = [], []
    for block in x.split(matmul.block_depth(x.shape[depth_dim]), dim=depth_dim):
        # vector_norm reads the block as it is; `block.abs()` would copy a whole weight matrix.
        peak, total, values = (torch.linalg.vector_norm(block, order, dim=depth_dim) for order in (math.inf, 1, 0))
        largest.append(peak)
        standing_out.append(peak * values / total)  # zeros lose nothing, and don't count for the mean
    most = min(OUTLIERS, x.shape[1 - depth_dim])
    measures = (torch.stack(found).nan_to_num(0.0, 0.0).amax(0) for found in (largest, standing_out))
    return torch.cat([measure.topk(most).indices for measure in measures])


def sampled_error(left: Tensor, right: Tensor) -> tuple[float, float]:
    """(error of the vector whose products int16 spoils most, relative to their size; the most that is tolerated).

    Each vector is judged by its own products with all vectors of the other side: beside one with huge results, others
    would count for nothing. The size of a sum of products is its root mean square under random signs: a sum that is
    small because its terms happen to cancel is off by as much in bf16. Where a sum is hardly more than one product,
    bf16 is off by more than `TOLERATED`, because it rounds both factors; then its own error is the limit.
    """
    left, right = (side[side.isfinite().all(dim=1)].double() for side in (left, right))
    exact, usual = left @ right.t(), (left.square() @ right.square().t()).sqrt()
    size = torch.maximum(usual, exact.abs())
    fp32 = torch.finfo(torch.float32)
    counts = (usual > fp32.tiny) & (usual < fp32.max)  # what fp32 can't hold is no fault of int16
    int16 = (matmul.linear_forward(left.float(), right.float()) - exact).where(counts, 0.0)
    bf16 = (left.bfloat16().double() @ right.bfloat16().double().t() - exact).where(counts, 0.0)
    of_left = _worst(int16, bf16, size, right.norm(dim=1))
    of_right = _worst(int16.t(), bf16.t(), size.t(), left.norm(dim=1))
    return max(of_left, of_right, key=lambda found: found[0] / found[1])


def _worst(int16: Tensor, bf16: Tensor, size: Tensor, norms: Tensor) -> tuple[float, float]:
    """Of the rows; all columns count alike, whatever the norms of the vectors that they belong to."""
    if not size.numel():
        return 0.0, TOLERATED
    ours, theirs, whole = ((x / norms).nan_to_num(0.0).norm(dim=1) for x in (int16, bf16, size))
    errors, limits = (ours / whole).nan_to_num(0.0), (theirs / whole).nan_to_num(0.0).clamp_min(TOLERATED)
    worst = (errors / limits).argmax()
    return errors[worst].item(), limits[worst].item()
