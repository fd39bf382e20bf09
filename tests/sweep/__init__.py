"""A net over everything that transformers can build: stock against cputrain, model type by model type.

    python -m tests.sweep --all --quick          five cases of each class
    python -m tests.sweep --all                  every case (`make soak`)
    python -m tests.sweep --model detr xlm       every case of these types
    python -m tests.sweep --model xlm --class XLMModel --dtype fp32 --padding keep --side right --what dropout

The last form is what a failure prints to be repeated. The exit code is 1 if anything is wrong.

One case is one class in one setting. A shrunken configuration (shrink.py) makes a model, its weights are drawn anew so
that nothing hides behind zeros and ones (weights.py), and inputs follow from its forward's signature (inputs.py). Then

- "results": every output and every parameter's gradient must be stock's, in training with all dropout rates 0 and in
  evaluation (measure.py, cases.py). The loss is a random combination of all outputs at real positions. With
  `padding="keep"` padded positions count too. An error counts unless noise as small as rounding moves stock as far;
  where noise alone moves a result by its own size (routing, top-k), the case is "unsteady": nothing can be said.
- "dropout": as many dropouts, of the same rates and sizes, as in stock (dropouts.py).
- "restore": `optimize` and `restore` change no attribute of any module, and no random generator (restoring.py).

Workers are processes of their own (runner.py), so that a segmentation fault is known by its case. What can't be built
or run as stock is listed with its reason. `SIXTY` (sixty.py) is what `make test` runs.
"""

from __future__ import annotations
