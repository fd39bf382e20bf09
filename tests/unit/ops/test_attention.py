"""Attention: the plain twin in float64, stock's own error as the measure, masks that depend on the key alone."""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cputrain.ops import attention as module
from cputrain.ops.attention import Sequences, attention, plain

KEY = 0x9ABCDEF012345678


@pytest.fixture(autouse=True)
def fixed_key(monkeypatch):
    monkeypatch.setattr(module, "draw_key", lambda: KEY)


def random_inputs(sequences, heads, kv_heads, size):
    shapes = [(sequences.total, heads, size)] + [(sequences.total, kv_heads, size)] * 2
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def with_gradients(function, inputs, grad):
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def in_double(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


def check(ours, stock, exact):
    """Each tensor's error is at most twice stock's in fp32, plus 3e-7 of all of them: some gradients are exactly 0."""
    floor = 3e-7 * sum(x.norm().item() for x in exact)
    for mine, theirs, truth in zip(ours, stock, exact, strict=True):
        error, allowed = ((x.double() - truth).norm().item() for x in (mine, theirs))
        assert error <= 2 * allowed + floor


def compare(sequences, heads, kv_heads, size, *, p=0.0, inputs=None, bias=None, sinks=None, **options):
    """attention() and its gradients against plain() in float64, which in fp32 gives stock's error."""
    inputs = inputs or random_inputs(sequences, heads, kv_heads, size)
    extra = {name: x for name, x in (("bias", bias), ("sinks", sinks)) if x is not None}
    grad = torch.randn(sequences.total, heads, size)
    options |= {"scale": options.get("scale", size**-0.5), "p": p}

    def ours(q, k, v, *more):
        return attention(q, k, v, sequences, **dict(zip(extra, more, strict=True)), **options)

    def twin(q, k, v, *more):
        return plain(q, k, v, sequences, key=KEY, **dict(zip(extra, more, strict=True)), **options)

    inputs = [*inputs, *extra.values()]

    check(
        with_gradients(ours, inputs, grad),
        with_gradients(twin, inputs, grad),
        with_gradients(twin, in_double(inputs), grad.double()),
    )


@pytest.mark.parametrize("size", [8, 9, 20, 32, 40, 63, 64, 65, 96, 128, 200, 256])
def test_head_sizes(isa, size):
    compare(Sequences.from_lengths([65, 3]), 2, 2, size, p=0.1)


@pytest.mark.parametrize("lengths", [[1], [7], [63, 1, 65], [384], [47, 48, 49], [191, 192], [0, 5, 0], [0], [193, 2]])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(isa, lengths, causal):
    compare(Sequences.from_lengths(lengths), 2, 2, 16, causal=causal, p=0.2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_threads(isa, threads, causal, p):
    compare(Sequences.from_lengths([130, 20, 300, 64]), 3, 3, 32, causal=causal, p=p)


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 1), (5, 5)])
def test_grouped_heads(isa, heads, kv_heads):
    compare(Sequences.from_lengths([100, 33]), heads, kv_heads, 24, causal=True, p=0.1)


@pytest.mark.parametrize("window", [0, 1, 31, 32, 47, 100, 192, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(isa, window, causal):
    sequences = Sequences.from_lengths([260, 1, 33])
    compare(sequences, 2, 1, 16, window=window, causal=causal, p=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_window_of_one_sequence(isa, threads, causal):
    """Fewer heads than threads: each part lays out only what its window reaches."""
    compare(Sequences.from_lengths([700]), 1, 1, 8, window=50, causal=causal, p=0.1)


def test_window_with_a_bias(isa):
    bias = torch.randn(2, 2, 200, 200, requires_grad=True)
    compare(Sequences.from_lengths([200, 90]), 2, 2, 16, window=40, causal=True, bias=bias)


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_cap_before_the_bias(isa, threads, cap):
    bias = torch.randn(2, 200, 200, requires_grad=True)
    compare(Sequences.from_lengths([200, 90]), 2, 2, 16, cap=cap, causal=True, bias=bias, p=0.1, scale=1.0)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(isa, threads, window):
    sinks = torch.tensor([-3.0, 0.0, 2.0, 30.0], requires_grad=True)
    compare(Sequences.from_lengths([200, 90]), 4, 2, 16, sinks=sinks, causal=True, window=window, p=0.1)


def test_a_query_with_nothing_but_a_sink(isa):
    bias = torch.zeros(40, 40)
    bias[3] = -torch.inf
    sinks = torch.zeros(2, requires_grad=True)
    compare(Sequences.from_lengths([40]), 2, 2, 16, sinks=sinks, bias=bias.requires_grad_())


@pytest.mark.parametrize("wrong", [{"window": -1}, {"cap": -1.0}, {"sinks": torch.zeros(3)}])
def test_wrong_options(wrong):
    inputs = random_inputs(Sequences.from_lengths([4]), 2, 2, 8)
    with pytest.raises(ValueError, match=f"attention.*{next(iter(wrong))}"):
        attention(*inputs, Sequences.from_lengths([4]), scale=1.0, **wrong)


def test_no_sequences(isa):
    inputs = random_inputs(Sequences.from_lengths([]), 2, 2, 8)
    results = with_gradients(
        lambda *x: attention(*x, Sequences.from_lengths([]), scale=1.0, p=0.1), inputs, torch.zeros(0, 2, 8)
    )
    assert all(x.shape == (0, 2, 8) for x in results)
    sequences = Sequences(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64), 5)
    q = torch.ones(5, 2, 8, requires_grad=True)
    out, grad = with_gradients(lambda q: attention(q, q, q, sequences, scale=1.0), [q], torch.ones(5, 2, 8))
    assert out.eq(0).all() and grad.eq(0).all()


def test_stock_operator(isa):
    """The error of F.scaled_dot_product_attention itself, without dropout: its masks are its own."""
    inputs = random_inputs(Sequences.dense(3, 384), 4, 4, 32)
    grad = torch.randn(3 * 384, 4, 32)

    def stock(q, k, v):
        q, k, v = (x.view(3, 384, 4, 32).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(grad.shape)

    ours = with_gradients(lambda *x: attention(*x, Sequences.dense(3, 384), scale=32**-0.5), inputs, grad)
    check(ours, with_gradients(stock, inputs, grad), with_gradients(stock, in_double(inputs), grad.double()))


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_bias_and_its_gradient(isa, threads, shape, causal):
    bias = torch.randn(*shape, 110, 120, requires_grad=True)
    compare(Sequences.from_lengths([50, 110, 97]), 4, 2, 16, causal=causal, p=0.1, bias=bias)


@pytest.mark.parametrize("shape", [(100, 100), (4, 100, 100), (2, 1, 1, 100), (2, 4, 100, 1)])
def test_bias_of_fewer_dimensions(isa, shape):
    compare(Sequences.from_lengths([50, 100]), 4, 4, 16, bias=torch.randn(shape, requires_grad=True))


def test_bias_of_other_strides(isa):
    bias = torch.randn(100, 100, 4, requires_grad=True).permute(2, 0, 1)
    compare(Sequences.from_lengths([50, 100]), 4, 4, 16, bias=bias)


def test_bias_that_masks(isa):
    sequences = Sequences.from_lengths([40, 130])
    bias = torch.zeros(2, 1, 130, 130).masked_fill(torch.rand(2, 1, 130, 130) < 0.5, -torch.inf)
    bias[0, :, :, :5] = -torch.inf
    bias[1, :, :, :100] = -torch.inf  # the whole first tile of keys
    bias[1, :, 7] = -torch.inf  # all keys of a query
    compare(sequences, 2, 2, 32, p=0.1, bias=bias.requires_grad_())
    inputs = random_inputs(sequences, 2, 2, 32)
    out, dq, dk, dv = with_gradients(
        lambda *x: attention(*x, sequences, scale=1.0, bias=bias.detach()), inputs, torch.randn(170, 2, 32)
    )
    assert out[47].eq(0).all() and dq[47].eq(0).all()
    assert dk.isfinite().all() and dv.isfinite().all()


def test_padding_is_zero(isa, threads):
    sequences = Sequences(torch.tensor([3, 60]), torch.tensor([40, 70]), 140)
    inputs = random_inputs(sequences, 2, 1, 32)
    compare(sequences, 2, 1, 32, p=0.1, inputs=inputs)
    results = with_gradients(lambda *x: attention(*x, sequences, scale=1.0), inputs, torch.randn(140, 2, 32))
    outside = torch.ones(140, dtype=torch.bool)
    outside[3:43] = outside[60:130] = False
    for x in results:
        assert x[outside].eq(0).all() and x[~outside].ne(0).any()


def test_output_from_bf16_is_that_of_the_rounded_inputs(isa, threads):
    settings = module.Settings(Sequences(torch.tensor([0, 80]), torch.tensor([77, 130]), 215), 0.3, True, 0.1, 7)
    for size in (1, 8, 20, 33, 64):
        inputs = [torch.randn(215, heads, 2 * size)[..., :size].bfloat16() for heads in (4, 2, 2)]
        ours = module.attention_forward(*inputs, settings)
        expected = module.attention_forward(*(x.float() for x in inputs), settings)
        for a, b in zip(ours, expected, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)


def test_gradients_from_bf16_are_those_of_the_rounded_inputs(isa, threads):
    """The backward reads what was kept as bf16 as it would read the same numbers as floats."""
    settings = module.Settings(Sequences.from_lengths([77, 130, 5, 1]), 0.3, True, 0.1, 7)
    for size in (8, 20, 33, 64):
        q, grad = torch.randn(213, 4, size), torch.randn(213, 4, size)
        k, v = torch.randn(213, 2, size), torch.randn(213, 2, size)
        out, lse = module.attention_forward(q, k, v, settings)
        results = []
        for kept in ([x.bfloat16() for x in (q, k, v)], [x.bfloat16().float() for x in (q, k, v)]):
            grads = [torch.empty(x.shape) for x in (q, k, v)]
            module.attention_backward(grad, *kept, out, lse, settings, grads)
            results.append(grads)
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_strides(isa):
    """(heads, tokens, size), a slice, a transposed last dimension: as contiguous tensors, bit for bit."""
    sequences = Sequences.from_lengths([60, 41])
    wide = torch.randn(101, 3, 50)
    strided = [
        torch.randn(3, 101, 32).transpose(0, 1),
        wide[:, :, 7:39],
        torch.randn(32, 101, 3).permute(1, 2, 0),
    ]
    grad = torch.randn(101, 32, 3).transpose(1, 2)
    results = [
        with_gradients(
            lambda *x: attention(*x, sequences, scale=0.2, p=0.1), [x.requires_grad_() for x in inputs], grad
        )
        for inputs in (strided, [x.detach().contiguous() for x in strided])
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_bit_identical_for_any_number_of_threads(isa):
    sequences = Sequences.from_lengths([200, 3, 50])
    inputs = random_inputs(sequences, 3, 3, 32)
    bias = torch.randn(1, 1, 200, 200, requires_grad=True)
    grad = torch.randn(253, 3, 32)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        function = lambda q, k, v, bias: attention(q, k, v, sequences, scale=0.2, p=0.1, bias=bias)  # noqa: E731
        results.append(with_gradients(function, [*inputs, bias], grad))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_fewer_heads_than_threads(isa, causal):
    """One head's queries and keys are dealt out to the threads: the same numbers, bit for bit."""
    sequences = Sequences.from_lengths([401])
    inputs = random_inputs(sequences, 2, 1, 32)
    grad = torch.randn(401, 2, 32)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 8, 40):
        torch.set_num_threads(threads)
        function = lambda *x: attention(*x, sequences, scale=0.2, causal=causal, p=0.1)  # noqa: E731
        results.append(with_gradients(function, inputs, grad))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_sequences_do_not_see_each_other(isa):
    q, k, v = (x.detach() for x in random_inputs(Sequences.from_lengths([50, 70]), 2, 2, 16))
    together = attention(q, k, v, Sequences.from_lengths([50, 70]), scale=0.25)
    alone = attention(q[50:], k[50:], v[50:], Sequences.from_lengths([70]), scale=0.25)
    assert torch.equal(together[50:], alone)


def test_large_scores(isa):
    """No overflow: scores of a few thousand, of which one key wins."""
    q, k, v = random_inputs(sequences := Sequences.from_lengths([120]), 1, 1, 32)
    out = attention(q * 100, k * 100, v, sequences, scale=1.0)
    truth = plain(q.double() * 100, k.double() * 100, v.double(), sequences, scale=1.0)
    torch.testing.assert_close(out.double(), truth, rtol=1e-2, atol=1e-2)


def test_nan_is_not_hidden(isa):
    sequences = Sequences.from_lengths([120, 30])
    q, k, v = (x.detach() for x in random_inputs(sequences, 2, 2, 32))
    q[5, 0, 3] = torch.nan
    out = attention(q, k, v, sequences, scale=1.0)
    assert out[5, 0].isnan().all() and out.isnan().sum() == 32


def test_dropout_rate_and_all_dropped():
    sequences = Sequences.dense(2, 256)
    q = torch.zeros(512, 4, 8)
    v = torch.ones(512, 4, 8)
    mean = attention(q, q, v, sequences, scale=1.0, p=0.3).mean().item()
    assert abs(mean - 1) < 5 * (0.3 / 0.7 / (512 * 4 * 256)) ** 0.5
    assert attention(q, q, v, sequences, scale=1.0, p=1.0).eq(0).all()


def test_structures_mirror_the_header():
    header = (Path(__file__).parents[3] / "csrc" / "api.h").read_text()
    types = {"float": ctypes.c_float, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64}
    for name, structure in [
        ("HeadTensor", module._HeadTensor),
        ("BiasTensor", module._BiasTensor),
        ("AttentionProblem", module._Problem),
        ("AttentionGradients", module._Gradients),
    ]:
        body = re.sub(r"//.*", "", re.search(rf"struct {name} {{(.*?)}};", header, re.S).group(1))
        fields = []
        for declaration in body.split(";"):
            if words := declaration.replace("const ", "").strip():
                kind, names = re.match(r"(\w+)\W+(.*)", words, re.S).groups()
                pointer = "*" in declaration
                expected = ctypes.c_void_p if pointer else types.get(kind) or getattr(module, f"_{kind}")
                fields += [(n.strip(" *"), expected) for n in names.split(",")]
        assert fields == [tuple(f) for f in structure._fields_]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q.double(), k, v), "needs q as float32"),
        (lambda q, k, v: (q, k[:-1], v), "needs k as float32"),
        (lambda q, k, v: (q, k[:, :3], v[:, :3]), "divides"),
        (lambda q, k, v: (q, k, v[:, :, :7]), "of one shape"),
    ],
)
def test_bad_input(change, message):
    inputs = random_inputs(sequences := Sequences.from_lengths([9]), 4, 4, 8)
    with pytest.raises(ValueError, match=message):
        attention(*change(*inputs), sequences, scale=1.0)


def test_bad_bias_packing_and_lengths():
    inputs = random_inputs(sequences := Sequences.from_lengths([9]), 4, 4, 8)
    with pytest.raises(ValueError, match=r"must broadcast to \(1 sequences, 4 heads, 9 queries, 9 keys\)"):
        attention(*inputs, sequences, scale=1.0, bias=torch.zeros(8, 8))
    with pytest.raises(ValueError, match="3 · 5 heads"):
        module.split_packed(torch.zeros(9, 48), 5)
    with pytest.raises(ValueError, match="must lie behind one another"):
        Sequences.from_lengths([4, -3])


@pytest.mark.parametrize(
    "starts, lengths, message",
    [
        ([0, 3], [4, 2], "starts at 3, where 4 was"),
        ([0, 5], [4, 6], "within 10 tokens"),
        ([-1], [4], "starts at -1"),
        ([0, 1], [4], "as int64 vectors"),
    ],
)
def test_bad_sequences(starts, lengths, message):
    with pytest.raises(ValueError, match=message):
        Sequences(torch.tensor(starts), torch.tensor(lengths), 10)
    with pytest.raises(ValueError, match="as int64 vectors"):
        Sequences(torch.tensor([0], dtype=torch.int32), torch.tensor([4], dtype=torch.int32), 10)


def test_two_python_threads_at_once(isa):
    """Each has working memory of its own."""
    sequences = Sequences.from_lengths([150, 90])
    inputs = [[x.detach() for x in random_inputs(sequences, 2, 2, 32)] for _ in range(8)]

    def run(x):
        return [attention(*x, sequences, scale=0.2) for _ in range(20)]

    alone = [attention(*x, sequences, scale=0.2) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for expected, results in zip(alone, pool.map(run, inputs), strict=True):
            assert all(torch.equal(expected, result) for result in results)
