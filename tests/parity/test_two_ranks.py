"""DDP over gloo with two processes: each rank has half of the batch, and the gradients are those of the whole one."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import cputrain
from tests.model_zoo import tiny

RANKS = 2


def _half(batch, rank):
    return {name: value[rank::RANKS] for name, value in batch.items()}


def _train(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        model, batch = tiny("bert", padding="right")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cputrain.optimize(model, optimizer, dtype="fp32")
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(**_half(batch, rank)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def _expected():
    """The same training in one process: the mean of both halves' losses."""
    model, batch = tiny("bert", padding="right")
    model = cputrain.optimize(copy.deepcopy(model), dtype="fp32")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        (sum(model(**_half(batch, rank)).loss for rank in range(RANKS)) / RANKS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def test_two_ranks_train_as_one(tmp_path):
    mp.spawn(_train, args=(str(tmp_path),), nprocs=RANKS)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for name, value in _expected().items():
        assert torch.equal(found[0][name], found[1][name]), name
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-6)
