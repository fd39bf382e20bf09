"""Every operation of torch.distributed, against plain computation. Each case runs on all ranks of the default group.

The data of every rank is made from its number, so that each rank can compute what all of them together should give.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ReduceOp

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NUMBERS = [*INTEGERS, *FLOATS, *COMPLEX]
ALL = [torch.bool, *NUMBERS, *FLOAT8]
# Nothing, one element, around the width of a vector, and around the chunks of 256 KB.
SIZES = [0, 1, 7, 63, 65, 1000]
LARGE = [300_001]


def data(dtype: torch.dtype, size: int | tuple[int, ...], rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    small = torch.randint(1, 4, size if isinstance(size, tuple) else (size,), generator=generator)
    if dtype is torch.bool:
        return small > 2
    if dtype in COMPLEX:
        other = torch.randint(1, 4, small.shape, generator=generator)
        return torch.complex(small.double(), other.double()).to(dtype)
    return small.to(dtype)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(found.dtype.itemsize)
    if found.dtype.is_complex:
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
        assert torch.equal(found, expected)
    else:
        assert torch.equal(found.contiguous().view(view), expected.contiguous().view(view)), (found, expected)


def reduced(operation, parts: list[Tensor]) -> Tensor:
    """The reduction of all ranks' parts. The data is small numbers, so wide arithmetic is exact."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        functions = {ReduceOp.SUM: torch.logical_or, ReduceOp.MAX: torch.logical_or}
        functions |= {ReduceOp.PRODUCT: torch.logical_and, ReduceOp.MIN: torch.logical_and}
        functions |= BITS
        return functools.reduce(functions[operation], parts)
    if dtype.is_complex:
        return torch.view_as_complex(reduced(operation, [torch.view_as_real(part) for part in parts]))
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    if operation is ReduceOp.AVG:
        total = torch.stack([part.to(wide) for part in parts]).sum(0)
        mean = total / len(parts) if wide is not torch.int64 else total // len(parts)
        return mean.to(torch.float32).to(dtype) if dtype.itemsize == 2 and dtype.is_floating_point else mean.to(dtype)
    functions = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        **BITS,
    }
    return functools.reduce(functions[operation], [part.to(wide) for part in parts]).to(dtype)


BITS = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
ORDER = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]


def reductions_of(dtype: torch.dtype) -> list:
    if dtype is torch.bool:
        return [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *BITS]
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVG]  # torch itself refuses the others
    return ORDER if dtype.is_floating_point else [*ORDER, *BITS]


# --- Reductions --------------------------------------------------------------------------------------------------


def case_all_reduce_of_every_dtype(rank, size):
    for dtype in [torch.bool, *NUMBERS]:
        for operation in reductions_of(dtype):
            parts = [data(dtype, 65, r) for r in range(size)]
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, operation)
            same(tensor, reduced(operation, parts))


def case_all_reduce_of_every_size(rank, size):
    for dtype in [torch.float32, torch.bfloat16, torch.uint8]:
        for length in [*SIZES, *LARGE, 1_048_583 if dtype is torch.float32 else 131_073]:
            parts = [data(dtype, length, r) for r in range(size)]
            tensor = parts[rank].clone()
            dist.all_reduce(tensor)
            same(tensor, reduced(ReduceOp.SUM, parts))


def case_pages_of_zeros(rank, size):
    """Pages (4 KB) of zeros aren't passed on: zero on all ranks, on some, but for an element or its sign, cut short."""
    for dtype in [torch.float32, torch.bfloat16, torch.int8, torch.complex128]:
        page = 4096 // dtype.itemsize
        for operation in reductions_of(dtype):
            parts = [data(dtype, 70 * page + 5, r, seed=7) for r in range(size)]
            for r, part in enumerate(parts):
                part[2 * page : 60 * page] = 0
                part[(5 + r) * page : (6 + r) * page] = 3
                part[20 * page - 1] = part[64 * page] = 2
                part[64 * page + 1 :] = 0
            parts[0][30 * page : 33 * page] = 1
            if dtype.is_floating_point:
                parts[-1][40 * page : 41 * page] = -0.0
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, operation)
            expected = reduced(operation, parts)
            assert torch.equal(tensor, expected), (dtype, operation)
            dist.reduce(parts[rank], 0, operation)
            assert rank or torch.equal(parts[0], expected), (dtype, operation)


def case_all_ranks_get_the_same_bits(rank, size):
    tensor = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(tensor)
    others = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(others, tensor)
    for other in others:
        same(other, tensor)


def case_half_precision_is_summed_in_fp32(rank, size):
    for dtype in [torch.bfloat16, torch.float16]:
        # One large and many small: summed in 16 bits, the small ones would vanish one after another.
        tensor = torch.full((70,), 2048.0 if rank == 0 else 1.0, dtype=dtype)
        dist.all_reduce(tensor)
        same(tensor, torch.full((70,), 2048.0 + size - 1).to(dtype))


def case_nan_wins_minimum_and_maximum(rank, size):
    for operation in [ReduceOp.MIN, ReduceOp.MAX]:
        tensor = torch.full((9,), float("nan") if rank == size - 1 else 1.0)
        dist.all_reduce(tensor, operation)
        assert tensor.isnan().all()


def case_all_reduce_of_what_is_not_contiguous(rank, size):
    whole = torch.zeros(6, 10)
    view = whole[:, ::2]
    view.fill_(rank + 1.0)
    dist.all_reduce(view)
    total = size * (size + 1) / 2
    assert (whole[:, ::2] == total).all() and (whole[:, 1::2] == 0).all()
    scalar = torch.tensor(2.0, requires_grad=True)
    dist.all_reduce(scalar.data)
    assert scalar.item() == 2 * size


def case_reduce(rank, size):
    for root in range(size):
        parts = [data(torch.float32, 1000, r, root) for r in range(size)]
        tensor = parts[rank].clone()
        dist.reduce(tensor, root)
        same(tensor, reduced(ReduceOp.SUM, parts) if rank == root else parts[rank])


def case_reduce_scatter(rank, size):
    for dtype in [torch.float32, torch.bfloat16, torch.int16]:
        for length in [*SIZES, 300_001 // size]:
            parts = [[data(dtype, length, r, to) for to in range(size)] for r in range(size)]
            expected = reduced(ReduceOp.SUM, [parts[r][rank] for r in range(size)])
            output = torch.empty(length, dtype=dtype)
            dist.reduce_scatter(output, parts[rank])
            same(output, expected)
            output.zero_()
            dist.reduce_scatter_tensor(output, torch.cat(parts[rank]))
            same(output, expected)


def case_what_cannot_be_reduced_is_refused(rank, size):
    for tensor, operation in [
        (torch.zeros(3).to(torch.float8_e5m2), ReduceOp.SUM),
        (torch.zeros(3), ReduceOp.BXOR),
        (torch.zeros(3, dtype=torch.complex64), ReduceOp.MAX),
    ]:
        try:
            dist.all_reduce(tensor, operation)
        except (ValueError, RuntimeError):
            continue
        raise AssertionError(f"{operation} of {tensor.dtype} was not refused")


# --- Moves -------------------------------------------------------------------------------------------------------


def case_broadcast(rank, size):
    for dtype in ALL:
        for root in range(size):
            tensor = data(dtype, 65, rank, root)
            dist.broadcast(tensor, root)
            same(tensor, data(dtype, 65, root, root))
    for length in [*SIZES, *LARGE]:
        tensor = data(torch.float32, length, rank)
        dist.broadcast(tensor, size - 1)
        same(tensor, data(torch.float32, length, size - 1))


def case_all_gather(rank, size):
    for dtype in ALL:
        for length in [7, 1000]:
            outputs = [torch.empty(length, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, data(dtype, length, rank))
            for r in range(size):
                same(outputs[r], data(dtype, length, r))
    for length in [*SIZES, *LARGE]:
        output = torch.empty(size * length)
        dist.all_gather_into_tensor(output, data(torch.float32, length, rank))
        same(output, torch.cat([data(torch.float32, length, r) for r in range(size)]))


def case_all_gather_of_uneven_tensors(rank, size):
    for step in [1, 60_000] * 10:  # MPI_Iallgatherv takes seconds at some of them, or hangs
        outputs = [torch.empty(r * step) for r in range(size)]
        dist.all_gather(outputs, data(torch.float32, rank * step, rank))
        for r in range(size):
            same(outputs[r], data(torch.float32, r * step, r))


def case_gather_and_scatter(rank, size):
    for dtype in [torch.int16, torch.float32]:
        for root in range(size):
            for length in [0, 7, 600_001 // size]:
                mine = data(dtype, length, rank, root)
                outputs = [torch.empty(length, dtype=dtype) for _ in range(size)] if rank == root else None
                dist.gather(mine, outputs, root)
                for r in range(size if rank == root else 0):
                    same(outputs[r], data(dtype, length, r, root))
                output = torch.empty(length, dtype=dtype)
                sources = [data(dtype, length, r, 100 + root) for r in range(size)] if rank == root else None
                dist.scatter(output, sources, root)
                same(output, data(dtype, length, rank, 100 + root))


def case_all_to_all(rank, size):
    for dtype in ALL:
        inputs = [data(dtype, 9, rank, to) for to in range(size)]
        outputs = [torch.empty(9, dtype=dtype) for _ in range(size)]
        dist.all_to_all(outputs, inputs)
        for r in range(size):
            same(outputs[r], data(dtype, 9, r, rank))


def case_all_to_all_of_uneven_parts(rank, size):
    def length(source, target):
        return (source * 3 + target * 50_000) % 150_001

    inputs = [data(torch.float32, length(rank, to), rank, to) for to in range(size)]
    outputs = [torch.empty(length(r, rank)) for r in range(size)]
    dist.all_to_all(outputs, inputs)
    for r in range(size):
        same(outputs[r], data(torch.float32, length(r, rank), r, rank))
    output = torch.empty(sum(t.numel() for t in outputs))
    dist.all_to_all_single(output, torch.cat(inputs), [t.numel() for t in outputs], [t.numel() for t in inputs])
    same(output, torch.cat(outputs))


def case_all_to_all_single_of_rows(rank, size):
    tensor = data(torch.float32, (size * 2, 3), rank)
    output = torch.empty_like(tensor)
    dist.all_to_all_single(output, tensor)
    same(output, torch.cat([data(torch.float32, (size * 2, 3), r)[2 * rank : 2 * rank + 2] for r in range(size)]))


def case_objects(rank, size):
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 1000})
    assert [item["rank"] for item in gathered] == list(range(size))
    shared = [rank, "root"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    assert shared == [0, "root"]
    collected = [None] * size if rank == size - 1 else None
    dist.gather_object(rank * 2, collected, size - 1)
    assert collected is None or collected == [2 * r for r in range(size)]
    received = [None]
    dist.scatter_object_list(received, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    assert received == [f"for {rank}"]


# --- Messages ----------------------------------------------------------------------------------------------------


def case_messages_around_a_ring(rank, size):
    if size == 1:
        return
    after, before = (rank + 1) % size, (rank - 1) % size
    for length in [*SIZES, *LARGE]:
        sent = dist.isend(data(torch.float32, length, rank), after)
        found = torch.empty(length)
        received = dist.irecv(found, before)
        sent.wait(), received.wait()
        same(found, data(torch.float32, length, before))


def case_messages_are_found_by_their_tags(rank, size):
    if size == 1:
        return
    if rank == 0:
        sent = [dist.isend(torch.full((5,), float(tag)), 1, tag=tag) for tag in [1, 2, 3]]
        assert all(work.wait() for work in sent)
    elif rank == 1:
        for tag in [3, 1, 2]:
            found = torch.empty(5)
            dist.recv(found, 0, tag=tag)
            assert (found == tag).all()
    dist.barrier()


def case_messages_from_anybody(rank, size):
    if rank:
        dist.send(torch.tensor([rank, rank * rank]), 0)
    else:
        seen = set()
        for _ in range(size - 1):
            found = torch.empty(2, dtype=torch.int64)
            sender = dist.recv(found)
            assert found.tolist() == [sender, sender * sender]
            seen.add(sender)
        assert seen == set(range(1, size))
    dist.barrier()


def case_messages_in_a_batch(rank, size):
    if size == 1:
        return
    found = torch.empty(100)
    batch = [
        dist.P2POp(dist.isend, torch.full((100,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, found, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(batch):
        request.wait()
    assert (found == (rank - 1) % size).all()


# --- Asynchronous, coalesced, functional -------------------------------------------------------------------------


def case_asynchronous_work_in_order(rank, size):
    tensors = [torch.full((1000,), float(i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.ones(3)
    dist.all_reduce(last)  # waits for its turn behind the others
    assert all(work.wait() for work in works) and all(work.is_completed() for work in works)
    assert [tensor[0].item() for tensor in tensors] == [i * size for i in range(20)]
    assert (last == size).all()


def case_futures(rank, size):
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.wait()[0] * 2)
    assert (doubled.wait() == 2 * size).all()
    assert work.get_future().done() and work.wait()


def case_coalesced(rank, size):
    tensors = [torch.full((5,), float(i)) for i in range(3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert [tensor[0].item() for tensor in tensors] == [i * size for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [tensor[0].item() for tensor in tensors] == [i * size * size for i in range(3)]
    outputs = [torch.empty(2 * size) for _ in range(2)]
    with dist._coalescing_manager():
        for i, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, torch.full((2,), float(rank + i)))
    for i, output in enumerate(outputs):
        same(output, torch.cat([torch.full((2,), float(r + i)) for r in range(size)]))


def case_functional(rank, size):
    world = dist.group.WORLD
    tensor = torch.full((2 * size,), float(rank))
    same(functional.all_reduce(tensor, "sum", world) + 0, torch.full((2 * size,), size * (size - 1) / 2))
    gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
    same(gather(tensor, 0, world) + 0, torch.cat([torch.full((2 * size,), float(r)) for r in range(size)]))
    scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)
    same(scatter(tensor, "sum", 0, world) + 0, torch.full((2,), size * (size - 1) / 2))
    same(functional.broadcast(tensor, size - 1, world) + 0, torch.full((2 * size,), size - 1.0))
    exchanged = functional.all_to_all_single(tensor, None, None, world) + 0
    same(exchanged, torch.cat([torch.full((2,), float(r)) for r in range(size)]))


# --- Groups ------------------------------------------------------------------------------------------------------


def case_overlapping_groups(rank, size):
    groups = [dist.new_group(list(range(start, size))) for start in range(size)]
    for start, group in enumerate(groups):
        tensor = torch.ones(100)
        if rank >= start:
            dist.all_reduce(tensor, group=group)
            assert (tensor == size - start).all()
            assert dist.get_rank(group) == rank - start
    works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for group in groups[: rank + 1]]
    assert all(work.wait() for work in works)
    dist.barrier()
    for group in groups[: rank + 1]:
        dist.destroy_process_group(group)


def case_barriers(rank, size):
    dist.barrier()
    dist.monitored_barrier()
    assert dist.barrier(async_op=True).wait()


def case_the_group_says_what_it_is(rank, size):
    assert dist.get_backend() == "ccl" and dist.get_world_size() == size and dist.get_rank() == rank
    assert dist.group.WORLD.group_name
