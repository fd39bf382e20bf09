"""Gradients of two batches for each step, as Accelerate does it.

cputrain run examples/by_feature/gradient_accumulation.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from task import make_batches, make_model

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = make_batches()
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

for epoch in range(4):
    total = 0.0
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(batches):.4f}")
