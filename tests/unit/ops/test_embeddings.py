"""Embeddings: rows of three tables, LayerNorm and dropout; gradients of the tables, padding rows and bad ids."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_as_accurate

from cputrain.ops import embeddings as module
from cputrain.ops.dropout import factors
from cputrain.ops.embeddings import embed, embedding_grad, plain

KEY = 0x9ABCDEF012345678
NAMES = ["out", "grad_word", "grad_position", "grad_type", "grad_weight", "grad_bias"]


def _case(tokens, cols, with_position=True, with_type=True, words=29):
    """Few words for many tokens, so that most rows of the table are used several times."""
    ids = [torch.randint(n, (tokens,)) for n in (words, 2, 11)]
    tables = [torch.randn(words, cols), torch.randn(11, cols), torch.randn(2, cols)]
    tables[1] = tables[1] if with_position else None
    tables[2] = tables[2] if with_type else None
    return ids, [*tables, torch.randn(cols), torch.randn(cols)]


def _run(function, tensors, grad, dtype):
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    out = function(leaves)
    out.backward(grad.to(dtype))
    return [out.detach()] + [None if leaf is None else leaf.grad for leaf in leaves]


def _check(ids, tensors, p, padding, grad):
    mask = factors(KEY, p, *grad.shape) if p else None
    ours = _run(lambda t: embed(*ids, *t, 1e-12, p, padding), tensors, grad, torch.float32)
    single, double = (
        _run(
            lambda t, dtype=dtype: plain(*ids, *t, 1e-12, padding, None if mask is None else mask.to(dtype)),
            tensors,
            grad,
            dtype,
        )
        for dtype in (torch.float32, torch.float64)
    )
    assert_as_accurate(ours, single, double, NAMES)


@pytest.mark.parametrize("tokens", [1, 7, 200, 0])
@pytest.mark.parametrize("cols", [8, 63, 65, 384])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_equals_plain_twin(isa, tokens, cols, p, monkeypatch):
    monkeypatch.setattr(module, "draw_key", lambda: KEY)
    ids, tensors = _case(tokens, cols)
    _check(ids, tensors, p, (0, None, None), torch.randn(tokens, cols))


@pytest.mark.parametrize("with_position", [True, False])
@pytest.mark.parametrize("with_type", [True, False])
@pytest.mark.parametrize("padding", [(None, None, None), (3, 1, 0), (-1, -2, None)])
def test_missing_tables_and_padding_rows(isa, with_position, with_type, padding):
    ids, tensors = _case(90, 40, with_position, with_type)
    _check(ids, tensors, 0.0, padding, torch.randn(90, 40))


def test_no_type_ids_means_type_zero(isa):
    ids, tensors = _case(9, 16)
    zeros = torch.zeros_like(ids[1])
    assert torch.equal(
        embed(ids[0], None, ids[2], *tensors, 1e-5, 0.0), embed(ids[0], zeros, ids[2], *tensors, 1e-5, 0.0)
    )


@pytest.mark.parametrize("cols", [30, 200, 768])
def test_same_bits_with_any_number_of_threads(isa, threads, cols):
    """30 columns make the threads divide the rows, 200 both, 768 the columns."""
    ids, tensors = _case(1111, cols)
    grad = torch.randn(1111, cols)

    def everything():
        torch.manual_seed(6)
        return _run(lambda t: embed(*ids, *t, 1e-5, 0.1), tensors, grad, torch.float32)

    ours = everything()
    torch.set_num_threads(1)
    for name, with_threads, alone in zip(NAMES, ours, everything(), strict=True):
        assert torch.equal(with_threads, alone), name


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_grad_is_stocks(isa, threads, dtype, padding_idx):
    ids, grad = torch.randint(50, (6, 70), dtype=dtype), torch.randn(6, 70, 100)
    exact = torch.zeros(50, 100, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.embedding(ids, exact, padding_idx).backward(grad.double())
    ours = embedding_grad(grad, ids, 50, padding_idx)
    torch.testing.assert_close(ours.double(), exact.grad, rtol=1e-5, atol=1e-5)
    if padding_idx is not None:
        assert not ours[padding_idx].any()


def test_int32_and_strided_ids(isa):
    ids, tensors = _case(24, 16)
    expected = embed(*ids, *tensors, 1e-5, 0.0)
    strided = [torch.stack([i, i], 1)[:, 0].view(4, 6) for i in ids]
    assert torch.equal(embed(*(i.to(torch.int32) for i in strided), *tensors, 1e-5, 0.0), expected)


def test_frozen_tables_get_no_gradient(isa):
    ids, tensors = _case(24, 16)
    for t in tensors[1:]:
        t.requires_grad_()
    embed(*ids, *tensors, 1e-5, 0.0).sum().backward()
    assert tensors[0].grad is None and all(t.grad is not None for t in tensors[1:])


@pytest.mark.parametrize("bad", [-1, 29, 2**40])
def test_ids_outside_the_table(isa, bad):
    ids, tensors = _case(24, 16)
    ids[0][7] = bad
    with pytest.raises(IndexError, match=rf"input_ids has {bad} at 7, but its table has 29 rows"):
        embed(*ids, *tensors, 1e-5, 0.0)
    ids[0][7] = 0
    ids[2][23] = 11
    with pytest.raises(IndexError, match="position_ids has 11 at 23"):
        embed(*ids, *tensors, 1e-5, 0.0)


def test_bad_shapes_are_named():
    ids, tensors = _case(24, 16)
    with pytest.raises(
        ValueError, match=r"token_type_ids must be 24 contiguous elements of torch.int64 .* of shape \(5,\)"
    ):
        embed(ids[0], ids[1][:5], ids[2], *tensors, 1e-5, 0.0)
    tensors[1] = torch.randn(11, 15)
    with pytest.raises(ValueError, match=r"the table of position_ids must have the shape \(11, 16\), found \(11, 15\)"):
        embed(*ids, *tensors, 1e-5, 0.0)
