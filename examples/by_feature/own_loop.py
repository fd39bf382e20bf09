"""A training loop of one's own: `cputrain.optimize` is all that is added.

python examples/by_feature/own_loop.py
"""

from __future__ import annotations

import torch
from task import make_batches, make_model

import cputrain

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = make_batches()
model, optimizer = cputrain.optimize(model, optimizer)

for epoch in range(4):
    total = 0.0
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(batches):.4f}")
