"""Sparse tensors, DTensor and the profiler. Each case runs on all ranks of the default group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp


def _sparse(rank, dtype=torch.float32):
    """Rank r has r entries, in places that others have too, one of them twice; rank 0 has none."""
    places = torch.tensor([[(rank + i) % 5 for i in range(rank)], [i % 2 for i in range(rank)]], dtype=torch.int64)
    values = torch.arange(3 * rank, dtype=dtype).reshape(rank, 3) + rank
    return torch.sparse_coo_tensor(places.reshape(2, rank), values, (5, 2, 3), check_invariants=True)


def case_sparse_all_reduce(rank, size):
    for dtype in (torch.float32, torch.float64, torch.int64):
        for op in (ReduceOp.SUM, ReduceOp.AVG) if dtype.is_floating_point else (ReduceOp.SUM,):
            tensor = _sparse(rank, dtype)
            dist.all_reduce(tensor, op=op)
            expected = sum(_sparse(r, dtype).to_dense() for r in range(size))
            expected = expected / size if op == ReduceOp.AVG else expected
            assert tensor.is_sparse and tensor.is_coalesced()
            torch.testing.assert_close(tensor.to_dense(), expected)
    with pytest.raises(ValueError, match="can't compute the max of sparse tensors"):
        dist.all_reduce(_sparse(rank), op=ReduceOp.MAX)


def case_ddp_with_sparse_gradients(rank, size):
    def gradient(sparse):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(20, 4, sparse=sparse))
        model(torch.tensor([rank, 3, 7])).square().sum().backward()
        return model.module.weight.grad

    found = gradient(sparse=True)
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), gradient(sparse=False))


def case_profiler_events(rank, size):
    gathered = [torch.empty(2, 3) for _ in range(size)]
    with torch.profiler.profile(record_shapes=True) as profiled:
        dist.all_reduce(torch.ones(10))
        work = dist.broadcast(torch.ones(7), 0, async_op=True)
        work.wait()
        dist.all_gather(gathered, torch.ones(2, 3))
        dist.barrier()
    found = {event.name: event for event in profiled.events() if event.name.startswith("ccl:")}
    shapes = {"ccl:all_reduce": [[10]], "ccl:broadcast": [[7]], "ccl:all_gather": [[2, 3]], "ccl:barrier": []}
    assert {name: event.input_shapes for name, event in found.items()} == shapes
    assert all(event.is_async and event.count == 1 and event.cpu_time > 0 for event in found.values())


def case_dtensor_moves_shards_by_all_to_all(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(8 * 7 * 3.0).reshape(8, 7, 3)  # rows and columns that 3 ranks can't share equally
    tensor = distribute_tensor(whole, init_device_mesh("cpu", (size,)), [Shard(0)])
    with torch.profiler.profile() as profiled:
        moved = tensor.redistribute(placements=[Shard(1)])
    assert torch.equal(moved.to_local(), whole.chunk(size, 1)[rank])
    names = [event.name for event in profiled.events()]
    assert "ccl:all_to_all" in names and "ccl:all_gather" not in names, names
