"""A few steps of the demo's training, as one process or as ranks that share each of its batches. A script of ranks:

    cputrain run tests/distributed/demo_training.py STEPS

Prints a line of each rank (who it is and which way its data takes), and of rank 0 the losses of the global batches.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cputrain
import cputrain.distributed  # the backend ccl

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

from squad_data import collate, load_examples, make_feature
from tokenizers import Tokenizer
from training_side import BATCH, BETAS, DATA, LEARNING_RATE, PADDED_LENGTH, make_model


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The demo's model and optimizer, without dropout, in fp32."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    model = make_model(tokenizer.get_vocab_size()).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    return cputrain.optimize(model, optimizer, dtype="fp32")


def batches(steps: int) -> list[list]:
    """The same on every rank."""
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    examples = random.Random(0).sample(load_examples(DATA / "train.json.gz"), steps * BATCH)
    features = [make_feature(tokenizer, example, PADDED_LENGTH) for example in examples]
    return [features[first : first + BATCH] for first in range(0, len(features), BATCH)]


def train(steps: int, rank: int, size: int) -> list[float]:
    model, optimizer = prepared()
    wrapped = DistributedDataParallel(model) if size > 1 else model
    losses = []
    for features in batches(steps):
        outputs = wrapped(**collate(features[rank::size], PADDED_LENGTH))
        outputs.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.detach().double())
    found = torch.stack(losses)
    if size > 1:
        dist.all_reduce(found, dist.ReduceOp.AVG)
    return found.tolist()


def main() -> None:
    steps = int(sys.argv[1])
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        dist.init_process_group("ccl")
        transport = dist.group.WORLD.transport
        place = {"rank": rank, "host": socket.gethostname(), "transport": transport.name}
        place["machines"] = getattr(transport, "_machines", None)  # ranks that share memory, as they found out
        sys.stdout.write(f"PLACE {json.dumps(place)}\n")  # in one piece: mpirun mixes what isn't
    losses = train(steps, rank, size)
    if rank == 0:
        sys.stdout.write(f"LOSSES {json.dumps(losses)}\n")
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
