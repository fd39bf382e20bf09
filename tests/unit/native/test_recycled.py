"""Memory is used again only when no tensor lies in it, whatever way the tensor is held."""

from __future__ import annotations

import os

import pytest
import torch

from cputrain.native import recycled

SHAPE = (1024, 512)


@pytest.fixture(autouse=True)
def nothing_kept():
    recycled.clear()
    yield
    recycled.clear()


def test_memory_that_was_dropped_comes_back_as_zeros():
    first = recycled.zeros(*SHAPE)
    place = first.data_ptr()
    first.fill_(float("nan"))
    del first
    again = recycled.zeros(*SHAPE)
    assert again.data_ptr() == place
    assert again.shape == SHAPE and again.count_nonzero() == 0 and again.dtype == torch.float32


@pytest.mark.parametrize(
    "held",
    [lambda x: x, lambda x: x[3:, 1], lambda x: x.detach(), lambda x: x.untyped_storage(), lambda x: x.numpy()],
    ids=["tensor", "view", "detached", "storage", "array"],
)
def test_memory_in_which_something_lies_is_left_alone(held):
    first = recycled.zeros(*SHAPE)
    place = first.data_ptr()
    kept = held(first)
    del first
    assert recycled.zeros(*SHAPE).data_ptr() != place
    del kept
    assert recycled.zeros(*SHAPE).data_ptr() == place


def test_autograd_takes_the_tensor_as_it_is():
    class Ones(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.sum()

        @staticmethod
        def backward(ctx, grad):
            return recycled.zeros(*SHAPE).add_(1)

    weight, places = torch.nn.Parameter(torch.zeros(SHAPE)), []
    for _ in range(3):
        Ones.apply(weight).backward()
        assert weight.grad._base is None and weight.grad.eq(1).all()
        places.append(weight.grad.data_ptr())
        weight.grad = None
    assert len(set(places)) == 1
    Ones.apply(weight).backward()
    Ones.apply(weight).backward()  # accumulated: two tensors at a time
    assert weight.grad.eq(2).all()


def test_small_and_huge_tensors_are_ordinary_ones():
    for shape in ((3, 5), (0, 7)):
        assert recycled.zeros(*shape).shape == shape
    assert recycled._blocks == []
    held = [recycled.zeros(*SHAPE) for _ in range(recycled.MOST_KEPT // (4 * SHAPE[0] * SHAPE[1]) + 3)]
    assert sum(map(len, recycled._blocks)) <= recycled.MOST_KEPT
    assert len({tensor.data_ptr() for tensor in held}) == len(held)


def test_a_tensor_outlives_its_block():
    tensor = recycled.zeros(*SHAPE)
    recycled.clear()
    assert tensor.add_(1).sum() == tensor.numel()


def test_blocks_of_different_sizes_go_with_the_least_recently_used():
    sizes = [rows << 20 for rows in range(16, 40)]
    for size in sizes:
        recycled.zeros(size // 4096, 1024)
    kept = [len(block) for block in recycled._blocks]
    assert sum(kept) <= recycled.MOST_KEPT and kept == sizes[-len(kept) :]


def test_a_forked_process_has_its_own():
    tensor = recycled.zeros(*SHAPE)
    child = os.fork()
    if child == 0:
        memoryview(tensor.numpy()).cast("B")[:4] = b"\x01\x02\x03\x04"
        os._exit(0)
    os.waitpid(child, 0)
    assert tensor.count_nonzero() == 0
