"""int16 products: bit for bit the plain twin's, no overflow, fp32's way with zeros and infinities, any size."""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from cputrain import native
from cputrain.formats import int16_matmul as matmul
from cputrain.formats.int16_matmul import by_columns, by_rows, pack, plain, product, quantise
from cputrain.ops.activation import KINDS, bias_activation

VNNI_NEVER, VNNI_IF_KNOWN, VNNI_ALWAYS = range(3)  # Int16Vnni of csrc/api.h
PANELS = {"portable": {"left": 4, "right": 8}, "avx2": {"left": 4, "right": 16}, "avx512": {"left": 8, "right": 32}}


def kernel_scales(operand: matmul.Operand) -> Tensor:
    """(vectors, blocks): the end of packed memory."""
    panel = PANELS[native.kernels().isa][operand.role]
    padded = math.ceil(operand.vectors / panel) * panel
    blocks = math.ceil(operand.depth / matmul.block_depth(operand.depth))
    floats = operand.memory[-4 * padded * blocks :].view(torch.float32)
    return floats.view(blocks, padded)[:, : operand.vectors].t()


def assert_twin(left: matmul.Operand, right: matmul.Operand, out: Tensor, a: Tensor, b: Tensor, **ends) -> None:
    """Equal to the twin's product of the rows of a and b, to the last bit."""
    scales = kernel_scales(left), kernel_scales(right)
    assert torch.equal(out, plain(a, b, scales=scales, **ends))
    for found, vectors in zip(scales, (a, b), strict=True):
        torch.testing.assert_close(found, quantise(vectors)[1], rtol=2e-6, atol=0)


def assert_sums(sums: Tensor, x: Tensor) -> None:
    """Column sums, with at most twice the error that torch's own have."""
    exact = x.double().sum(0)
    assert (sums - exact).norm() <= 2 * (x.sum(0) - exact).norm() + 1e-7 * x.abs().sum(0).norm()


def check_layer(tokens: int, inputs: int, outputs: int) -> None:
    """The three products of a linear layer, with their fused ends, against the twin and against float64."""
    x, w, dy = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    bias, bias_grad = torch.randn(outputs), torch.empty(outputs)
    dx, dw = torch.randn(tokens, inputs), torch.randn(outputs, inputs)

    left, right = by_rows(x, "left"), by_rows(w, "right")
    assert_twin(left, right, product(left, right, bias=bias), x, w, bias=bias)

    left, right, start = by_rows(dy, "left"), by_columns(w, "right"), dx.clone()
    product(left, right, out=dx, accumulate=True)
    assert_twin(left, right, dx, dy, w.t(), start=start)

    left, right, start = by_columns(dy, "left", sums=bias_grad), by_columns(x, "right"), dw.clone()
    product(left, right, out=dw, accumulate=True)
    assert_twin(left, right, dw, dy.t(), x.t(), start=start)
    assert_sums(bias_grad, dy)


@pytest.mark.parametrize("first", range(1, 71, 10))
def test_sizes_up_to_70(isa, first):
    draw = random.Random(first)
    for size in range(first, first + 10):
        a, b = draw.randint(1, 70), draw.randint(1, 70)
        for shape in ((size, a, b), (a, size, b), (a, b, size)):
            check_layer(*shape)


@pytest.mark.parametrize("shape", [(1000, 513, 97), (97, 1537, 193), (511, 384, 386), (3, 5000, 2), (1025, 33, 31)])
def test_large_sizes(isa, threads, shape):
    check_layer(*shape)


def test_threads_give_identical_results(isa, threads):  # `threads` restores their number
    x, w, dy = torch.randn(611, 700), torch.randn(333, 700), torch.randn(611, 333)
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        sums = torch.empty(333)
        results.append(
            [
                matmul.linear_forward(x, w),
                matmul.linear_input_grad(dy, w),
                matmul.linear_weight_grad(dy, x, bias_grad=sums),
                sums,
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_parts_taken_over_add_their_blocks_in_order(isa, threads):
    """With few parts and many blocks, threads that are done take turns with others' parts nearly every time."""
    torch.set_num_threads(1)
    x, dy = torch.randn(20_000, 17), torch.randn(20_000, 70)
    expected = matmul.linear_weight_grad(dy, x)
    torch.set_num_threads(threads + 1)
    for _ in range(30):
        assert torch.equal(matmul.linear_weight_grad(dy, x), expected)


def test_fewer_threads_than_were_promised():
    """Nobody waits for the share of a thread that OpenMP didn't start."""
    script = (
        "import torch; from cputrain.formats.int16_matmul import linear_weight_grad\n"
        "x, dy = torch.randn(5_000, 100), torch.randn(5_000, 200)\n"
        "torch.set_num_threads(1); expected = linear_weight_grad(dy, x)\n"
        "torch.set_num_threads(4); assert torch.equal(linear_weight_grad(dy, x), expected)"
    )
    for limit in ("1", "3"):
        environment = os.environ | {"OMP_THREAD_LIMIT": limit}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)


@functools.cache
def runs_vnni(isa: str) -> bool:
    """Tried in a process of its own: a virtual machine may have AVX_VNNI and not say so."""
    script = (
        "import torch; from cputrain import native; from cputrain.formats import int16_matmul as matmul\n"
        f"native.kernels().int16_use_vnni({VNNI_ALWAYS}); matmul.linear_forward(torch.ones(12, 9), torch.ones(1, 9))"
    )
    code = subprocess.run([sys.executable, "-c", script], env=os.environ | {"CPUTRAIN_ISA": isa}).returncode
    assert code in (0, -signal.SIGILL)
    return code == 0


@pytest.mark.parametrize("wanted", [VNNI_NEVER, VNNI_ALWAYS])
def test_with_and_without_vnni(isa, threads, wanted):
    if wanted == VNNI_ALWAYS and not runs_vnni(isa):
        pytest.skip(f"this CPU has no vpdpwssd for {isa}")
    native.kernels().int16_use_vnni(wanted)
    try:
        for tokens, inputs, outputs in [
            (1, 1, 1),
            (11, 7, 12),
            (13, 65, 17),
            (24, 63, 31),
            (150, 520, 37),
            (37, 1100, 500),
        ]:
            check_layer(tokens, inputs, outputs)
    finally:
        native.kernels().int16_use_vnni(VNNI_IF_KNOWN)


def test_packed_in_one_go_kept_and_used_twice(isa, threads):
    x, w, dy = torch.randn(700, 390), torch.randn(130, 390), torch.randn(700, 130)
    sums = torch.empty(390)
    rows, columns = pack(x, rows="left", columns="right", sums=sums)
    for _ in range(2):
        assert torch.equal(product(rows, by_rows(w, "right")), matmul.linear_forward(x, w))
        assert torch.equal(product(by_columns(dy, "left"), columns), matmul.linear_weight_grad(dy, x))
    assert_sums(sums, x)


def test_bf16_sources(isa):
    """Read as they are: the same as their values in float32."""
    x, w, dy = torch.randn(77, 600).bfloat16(), torch.randn(90, 600).bfloat16(), torch.randn(77, 90).bfloat16()
    sums, expected = torch.empty(90), torch.empty(90)
    assert torch.equal(matmul.linear_forward(x, w), matmul.linear_forward(x.float(), w.float()))
    assert torch.equal(matmul.linear_input_grad(dy, w), matmul.linear_input_grad(dy.float(), w.float()))
    ours = matmul.linear_weight_grad(dy, x, bias_grad=sums)
    assert torch.equal(ours, matmul.linear_weight_grad(dy.float(), x.float(), bias_grad=expected))
    assert torch.equal(sums, expected)
    rows, _ = pack(x, rows="left", columns="right")
    assert torch.equal(product(rows, by_rows(w, "right")), matmul.linear_forward(x, w))


@pytest.mark.parametrize("kind", KINDS)
def test_activated_rows_are_packed_as_if_they_had_been_written(isa, threads, kind):
    for rows, depth in ((1, 1), (7, 63), (33, 65), (130, 1025), (0, 5)):
        h, w = torch.randn(rows, depth + 3)[:, :depth], torch.randn(9, depth)
        for bias in (torch.randn(depth), torch.randn(2 * depth)[::2], None):
            activation = bias_activation(h.contiguous(), bias, kind)
            ours = product(matmul.pack_activated(h, bias, KINDS[kind]), by_rows(w, "right"))
            assert torch.equal(ours, matmul.linear_forward(activation, w))


def test_strided_sources_and_results(isa):
    wide, w = torch.randn(70, 300), torch.randn(40, 90)
    x = wide[:, 100:190]
    expected = matmul.linear_forward(x.contiguous(), w)
    assert torch.equal(matmul.linear_forward(x, w), expected)
    assert torch.equal(matmul.linear_forward(x, w.t().contiguous().t()), expected)  # columns contiguous: copied
    out = torch.full((70, 60), 7.0)
    product(by_rows(x, "left"), by_rows(w, "right"), out=out[:, 10:50])
    assert torch.equal(out[:, 10:50], expected)
    assert (out[:, :10] == 7).all() and (out[:, 50:] == 7).all()


def hard_vectors() -> Tensor:
    """Rows that come as near to an overflow of 32 bits as any can, and rows whose scale the largest value decides."""
    constant, alternating = torch.ones(512), torch.ones(512)
    alternating[::2] = -1
    spike, two = torch.zeros(512), torch.zeros(512)
    spike[17], two[[3, 400]] = 1, 1
    return torch.stack([constant, -constant, alternating, spike, two, torch.rand(512) + 3, torch.randn(512) ** 9])


def test_sums_can_not_overflow(isa):
    a = hard_vectors()
    values, _ = quantise(a)
    assert values.norm(dim=1).max() > 46200
    assert values.norm(dim=1).max() ** 2 < 2**31
    assert values.abs().max() == 32767
    for left, right, b in (
        (by_rows(a, "left"), by_rows(a, "right"), a),
        (by_rows(a, "left"), by_rows(-a, "right"), -a),
    ):
        out = product(left, right)
        assert_twin(left, right, out, a, b)
        bound = 2e-4 * a.norm(dim=1)[:, None] * b.norm(dim=1)[None, :]
        assert ((out - a.double() @ b.double().t()).abs() <= bound).all()


def realistic(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and dy of a layer as they occur: outlying features, a GELU's skewed output, tokens of unequal gradient."""
    x, w, dy = torch.randn(900, 768), torch.randn(384, 768) * 0.03, torch.randn(900, 384) * 1e-5
    if kind == "outliers":
        x[:, [5, 300]] *= 40
    if kind == "gelu":
        x = torch.nn.functional.gelu(2 * x)
    return x, w, dy * (3 * torch.randn(900, 1)).exp()


@pytest.mark.parametrize("kind", ["plain", "outliers", "gelu"])
def test_error_is_at_most_a_quarter_of_bf16s(isa, kind):
    x, w, dy = realistic(kind)
    for ours, a, b in (
        (matmul.linear_forward(x, w), x, w.t()),
        (matmul.linear_input_grad(dy, w), dy, w),
        (matmul.linear_weight_grad(dy, x), dy.t(), x),
    ):
        exact = a.double() @ b.double()
        bf16 = a.bfloat16().double() @ b.bfloat16().double()
        assert (ours - exact).norm() <= (bf16 - exact).norm() / 4


def test_rows_of_very_different_magnitude(isa):
    """Each row keeps its own precision, from denormals to the end of the range."""
    x, w = torch.randn(12, 200), torch.randn(9, 200)
    magnitudes = 10.0 ** torch.tensor([-41, -37, -30, -20, -16, -14, 0, 10, 16.5, 20, 30, 36], dtype=torch.float64)
    scaled = (x.double() * magnitudes[:, None]).float()
    assert scaled.isfinite().all()
    for out in (
        matmul.linear_forward(scaled, w),
        matmul.linear_weight_grad(scaled.t().contiguous(), w.t().contiguous()),
    ):
        exact = scaled.double() @ w.double().t()
        error = (out - exact).norm(dim=1) / exact.norm(dim=1)
        assert (error[1:] < 5e-4).all()
        assert error[0] < 5e-3  # a denormal row: its results have some 14 bits themselves
    # Huge times tiny is ordinary.
    out = matmul.linear_forward((x * 1e30), (w * 1e-30))
    exact = x.double() @ w.double().t()
    assert (out - exact).norm() / exact.norm() < 5e-4


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_not_finite_where_fp32_is_not_finite(isa, bad):
    x, w, dy = torch.randn(40, 600), torch.randn(50, 600), torch.randn(40, 50)
    x[3, 599], w[7, 10], dy[11, 13] = bad, bad, bad
    x[5] = 0
    for ours, a, b in (
        (matmul.linear_forward(x, w), x, w.t()),
        (matmul.linear_input_grad(dy, w), dy, w),
        (matmul.linear_weight_grad(dy, x), dy.t(), x),
    ):
        fp32 = a @ b
        assert torch.equal(ours.isfinite(), fp32.isfinite())
        assert not ours.isfinite().all()
        ok = fp32.isfinite()
        exact = a.double() @ b.double()
        assert (ours[ok] - exact[ok]).norm() / exact[ok].norm() < 5e-4


def test_zeros(isa):
    x, w = torch.zeros(9, 100), torch.randn(20, 100)
    x[4] = torch.randn(100)
    out = matmul.linear_forward(x, w)
    assert (out[[0, 1, 2, 3, 5, 6, 7, 8]] == 0).all()
    assert (out[4] != 0).all()


def test_empty(isa):
    bias = torch.randn(3)
    assert torch.equal(matmul.linear_forward(torch.empty(5, 0), torch.empty(3, 0), bias), bias.expand(5, 3))
    assert matmul.linear_forward(torch.empty(0, 4), torch.randn(3, 4)).shape == (0, 3)
    sums = torch.full((3,), 9.0)
    grad = matmul.linear_weight_grad(torch.empty(0, 3), torch.empty(0, 4), bias_grad=sums)
    assert torch.equal(grad, torch.zeros(3, 4)) and torch.equal(sums, torch.zeros(3))


def test_says_what_is_wrong():
    x, w = torch.randn(4, 5), torch.randn(3, 6)
    with pytest.raises(ValueError, match="depth 5 and right of depth 6"):
        matmul.linear_forward(x, w)
    with pytest.raises(ValueError, match="float32"):
        by_rows(x.double(), "left")
    with pytest.raises(ValueError, match="needs an `out`"):
        product(by_rows(x, "left"), by_rows(x, "right"), accumulate=True)
    with pytest.raises(ValueError, match="two dimensions"):
        pack(torch.randn(2, 3, 4), rows="left")
    with pytest.raises(ValueError, match="two dimensions"):
        by_rows(torch.randn(2, 3, 4), "left")
    with pytest.raises(ValueError, match="sums need columns"):
        pack(x, rows="left", sums=torch.empty(5))
    with pytest.raises(ValueError, match="contiguous"):
        product(by_rows(x, "left"), by_rows(x, "right"), out=torch.empty(4, 4).t())
