"""Losses and weights of 50 seeded steps, bit for bit: a change that only moves code must not change them.

    git worktree add /tmp/before HEAD~1     # with a build of its own: make -C /tmp/before build
    /tmp/before/.venv/bin/python benchmarks/same_results.py --write /tmp/before.json
    python benchmarks/same_results.py --compare /tmp/before.json

MiniLM in every number format, GPT-2 and T5 at a small size, on one rank and (MiniLM) on two, with dropout and padding.
Only the same machine, instruction set, torch and number of threads give the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

THREADS = 2
# What is asked for, and whether this CPU counts as one that is fast at bf16.
FORMATS = {"fp32": ("fp32", True), "int16": ("int16", True), "bf16": ("bf16", True), "bf16 saved": ("bf16", False)}


def minilm() -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return BertForQuestionAnswering(BertConfig(vocab_size=1000, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=128, n_layer=3, n_head=4))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=1000, d_model=128, d_ff=256, d_kv=32, num_heads=4, num_layers=2, decoder_start_token_id=0)
    )


def batch(model: Callable, draw: torch.Generator) -> dict[str, Tensor]:
    """Four texts of 20 to 80 tokens, padded to the longest."""
    lengths = torch.randint(20, 81, (4,), generator=draw)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(1, 1000, mask.shape, generator=draw)
    given = {"input_ids": ids, "attention_mask": mask}
    if model is minilm:
        places = torch.randint(0, 20, (2, 4), generator=draw)
        return {**given, "start_positions": places[0], "end_positions": places[1]}
    return {**given, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model_of: Callable, name: str, steps: int, rank: int = 0, ranks: int = 1) -> dict[str, object]:
    import cputrain
    from cputrain.formats import speed

    dtype, fast_at_bf16 = FORMATS[name]
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = model_of().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mock.patch.object(speed, "bf16_pays", lambda: fast_at_bf16):
        cputrain.optimize(model, optimizer, dtype=dtype)
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    draw = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = wrapped(**batch(model_of, draw)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {"losses": losses, "weights": digest.hexdigest()}


def _rank(rank: int, folder: str, name: str, steps: int) -> None:
    import cputrain.distributed  # noqa: F401

    dist.init_process_group("ccl", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found = trained(minilm, name, steps, rank, 2)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def on_two_ranks(name: str, steps: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, name, steps), nprocs=2)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def results(steps: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for model in (minilm, gpt2, t5):
        for name in FORMATS:
            found[f"{model.__name__}, {name}"] = trained(model, name, steps)
            print(f"{model.__name__}, {name}", file=sys.stderr)
    for name in ("fp32", "int16"):
        found[f"minilm, {name}, two ranks"] = on_two_ranks(name, steps)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path)
    what.add_argument("--compare", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    found = results(arguments.steps)
    if arguments.write:
        arguments.write.write_text(json.dumps(found, indent=1))
        return 0
    before = json.loads(arguments.compare.read_text())
    differ = [name for name in found if found[name] != before.get(name)]
    print("\n".join(f"{name}: differs" for name in differ) or f"all {len(found)} are the same, bit for bit")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
