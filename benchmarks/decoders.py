"""Language models, one training step at a time: stock PyTorch against cputrain, in turns.

    python benchmarks/decoders.py --model llama-135m --report
    python benchmarks/decoders.py --model llama-135m --lengths chat --isa avx2
    python benchmarks/decoders.py --model llama-135m --lengths chat --train lora
    python benchmarks/decoders.py --model qwen3-0.6b --train lora --checkpointing
    python benchmarks/decoders.py --model qwen3-0.6b --train lora --load bf16 --against ours-fp32
    python benchmarks/decoders.py --model qwen3-0.6b --train qlora
    python benchmarks/decoders.py --model qwen3-0.6b --train lora --tokens 1x128 --accumulate 8
    python benchmarks/decoders.py --model llama-3.1-8b --train qlora --load bf16 --checkpointing --against nothing
    python benchmarks/decoders.py --model head-frozen head-half head-trained

The shapes are those of public configurations, the weights random. LoRA has rank 16 on all linear layers, with dropout
0.05; QLoRA the same on NF4 with nested scales, built layer by layer. `head-…` are a vocabulary head and its loss alone:
1,024 tokens × 1,024 → 151,936, frozen, frozen with half of the labels ignored, and trained. Memory is a process's peak
(VmHWM, which is ru_maxrss) after its steps, with what building the model took; for a head, what the steps add to
operands and gradients that were there before. `of products` is the speed as a part of what the step's matrix products
alone would reach in the same process: of each linear layer forward, again if it is recomputed, and the gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import interleaved
import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

HEADS = ("head-frozen", "head-half", "head-trained")
TOKENS, FEATURES, VOCABULARY = 1024, 1024, 151936
# What cputrain is compared with: whose side, and what else it does.
AGAINST: dict[str, tuple[str, dict[str, Any]] | None] = {
    "stock": ("stock", {}),
    "stock-lora": ("stock", {"train": "lora", "load": "fp32"}),
    "ours-fp32": ("ours", {"load": "fp32"}),
    "nothing": None,
}


def parse_arguments() -> argparse.Namespace:
    from decoder_models import MODELS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama-135m"], choices=[*MODELS, *HEADS])
    parser.add_argument("--train", choices=["full", "lora", "qlora"], default="full")
    parser.add_argument("--load", choices=["fp32", "bf16"], default="fp32", help="dtype of what isn't quantised")
    parser.add_argument("--lengths", choices=["full", "chat"], default="full", help="chat: 45%% of the tokens are real")
    parser.add_argument("--tokens", type=sizes, help="of a batch: 1x512 (default: the model's own)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches for each step of the optimizer")
    parser.add_argument("--against", choices=AGAINST, default="stock", help="default stock, with the same options")
    parser.add_argument("--dtype", default="auto", help="of cputrain")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=interleaved.usable_cores())
    parser.add_argument("--isa", choices=["native", "avx2"], default="native")
    parser.add_argument("--report", action="store_true", help="write benchmarks/results/decoders_….md")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    return parser.parse_args()


def sizes(text: str) -> tuple[int, int]:
    sequences, _, length = text.partition("x")
    if not (sequences.isdigit() and length.isdigit()):
        raise argparse.ArgumentTypeError(f"must be sequences x tokens, as in 1x512, found {text}")
    return int(sequences), int(length)


# ---- a side's process ----------------------------------------------------------------------------------------------

Step = Callable[[int], int]  # takes the number of a step, gives its real tokens


def model_step(settings: dict[str, Any], ours: bool) -> tuple[Step, Callable[[int], float]]:
    """A step, and the seconds that its products take alone for so many tokens."""
    import torch
    from decoder_models import MODELS, batch_of, made

    kind, _, tokens = MODELS[settings["model"]]
    sequences, length = settings["tokens"] or tokens
    model = made(*(settings[name] for name in ("model", "train", "load", "checkpointing")))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    if ours:
        import cputrain

        model, optimizer = cputrain.optimize(model, optimizer, dtype=settings["dtype"])
    vocabulary, parts, options = (
        model.config.vocab_size,
        settings["accumulate"],
        {} if kind == "Bert" else {"use_cache": False},
    )

    def step(number: int) -> int:
        torch.manual_seed(number)
        real = 0
        for _ in range(parts):
            batch = batch_of(vocabulary, sequences, length, settings["lengths"], kind == "Bert")
            (model(**batch, **options).loss / parts).backward()
            real += int(batch["attention_mask"].sum())
        optimizer.step()
        optimizer.zero_grad()
        return real

    return step, lambda tokens: products_seconds(model, tokens, settings["checkpointing"])


def products_seconds(model: Any, tokens: int, recomputed: bool) -> float:
    """Of all linear layers, in the format of this run; those of one shape are measured once."""
    from cputrain.api import decisions
    from cputrain.blocks import projection

    head, layers, times = model.get_output_embeddings(), {}, Counter()
    for name, part in model.named_modules():
        is_product = projection.is_linear(part) or projection.is_conv1d(part)
        if is_product and not projection.is_lora(part) and "lora_" not in name:
            key = type(part), *projection.features(part), part is head
            layers[key] = part
            times[key] += 1
    format = decisions(model)["choice"][1]
    forwards = {key: 1 + (recomputed and layer is not head) for key, layer in layers.items()}
    return sum(times[key] * layer_seconds(layer, tokens, format, forwards[key]) for key, layer in layers.items())


def layer_seconds(layer: Any, tokens: int, format: str, forwards: int) -> float:
    import torch

    from cputrain.blocks import projection
    from cputrain.formats import FORMATS, Dense

    trained, (out_features, in_features) = layer.weight.requires_grad, projection.features(layer)
    matrix = layer.weight.detach().t() if projection.is_conv1d(layer) else layer.weight.detach()
    weight = Dense(matrix) if trained else projection.without_adapter(layer).weight
    x, dy = torch.randn(tokens, in_features), torch.randn(tokens, out_features) * 1e-3
    found = []
    for _ in range(3):
        call, began = FORMATS[format]().start().beside(), time.perf_counter()  # which no guard looks at
        for _again in range(forwards):
            _, saved = call.forward(x, weight, None, save=trained)
        gradient = call.output_grad(dy, weight=trained)
        gradient.input(weight)
        if trained:
            gradient.matrix(in_features, saved)
        found.append(time.perf_counter() - began)
    return min(found)


def head_step(settings: dict[str, Any], ours: bool) -> tuple[Step, None]:
    import torch
    from torch.nn import functional as F

    name = settings["model"]
    x = torch.randn(TOKENS, FEATURES, requires_grad=True)
    w = torch.randn(VOCABULARY, FEATURES).mul_(0.02).requires_grad_(name == "head-trained")
    labels = torch.randint(VOCABULARY, (TOKENS,))
    if name == "head-half":
        labels[::2] = -100
    x.grad = torch.zeros_like(x)
    if ours:
        from cputrain import memory
        from cputrain.blocks.lazy_logits import LazyLogits, Source
        from cputrain.formats import FORMATS, choose

        memory.keep_freed_memory()
        format = FORMATS[choose.choose(settings["dtype"]).format]()

    def step(number: int) -> int:
        x.grad = w.grad = None
        logits = LazyLogits.of(Source(x, w, None, None, format)) if ours else F.linear(x, w)
        F.cross_entropy(logits, labels).backward()
        return TOKENS

    return step, None


def side(name: str, settings: dict[str, Any]) -> None:
    make = head_step if settings["model"] in HEADS else model_step
    take_step, products = make(settings, name == "ours")

    before = interleaved.peak_memory_mb() if settings["model"] in HEADS else 0.0

    def step(number: int) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = take_step(number)
        return {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": tokens}

    def alone(tokens: int) -> dict[str, Any]:
        return {"seconds": products(tokens) if products and name == "ours" else 0.0}

    def memory() -> dict[str, Any]:
        return {"mb": interleaved.peak_memory_mb() - before}

    interleaved.serve({"step": step, "memory": memory, "products": alone})


# ---- the comparison ------------------------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace, model: str) -> dict[str, str]:
    names = ("train", "load", "lengths", "tokens", "accumulate", "dtype", "checkpointing")
    settings = {name: getattr(arguments, name) for name in names} | {"model": model}
    other = AGAINST[arguments.against]
    wanted = [*([other] if other else []), ("ours", {})]
    with ExitStack() as stack:
        sides = [
            stack.enter_context(closing(
                interleaved.Side(name, __file__, settings | more, environment(arguments, name))
            ))
            for name, more in wanted
        ]  # fmt: skip
        list(interleaved.in_turns(sides, 1))  # what is allocated once
        answers = list(interleaved.in_turns(sides, arguments.steps))
        memory = [one.ask("memory")["mb"] for one in sides]
        tokens = statistics.mean(answer[-1]["tokens"] for answer in answers)
        products = (
            arguments.accumulate * sides[-1].ask("products", tokens=int(tokens / arguments.accumulate))["seconds"]
        )
    return row(arguments, model, answers, memory, tokens, products)


def environment(arguments: argparse.Namespace, name: str) -> dict[str, str]:
    return interleaved.environment(arguments.isa, arguments.threads, ours=name == "ours")


def row(
    arguments: argparse.Namespace, model: str, answers: list[Any], memory: list[float], tokens: float, products: float
) -> dict[str, str]:
    seconds, cpu = (
        [[answer[i][what] for answer in answers] for i in range(len(memory))] for what in ("seconds", "cpu")
    )
    ours = statistics.median(seconds[-1])
    found = {"model": model, "tokens": described_tokens(arguments, model)}
    if len(memory) > 1:
        found |= {
            f"{arguments.against} s": f"{statistics.median(seconds[0]):.2f}",
            "cputrain s": f"{ours:.2f}",
            "times faster": f"**{interleaved.median_ratio(*seconds):.2f}**",
            "by CPU time": f"{interleaved.median_ratio(*cpu):.2f}",
            f"{arguments.against} MB": f"{memory[0]:.0f}",
        }
    found |= {"cputrain MB": f"{memory[-1]:.0f}"}
    if len(memory) > 1:
        found |= {"memory": f"{memory[1] / memory[0]:.2f}"}
    found |= {"real tokens/s": f"{tokens / ours:.0f}"}
    return found | {"of products": f"{products / ours:.2f}" if products else "–"}


def described_tokens(arguments: argparse.Namespace, model: str) -> str:
    if model in HEADS:
        return "–"
    from decoder_models import MODELS

    sequences, length = arguments.tokens or MODELS[model][2]
    times = f" × {arguments.accumulate}" if arguments.accumulate > 1 else ""
    return f"{sequences}×{length}{times} {arguments.lengths}"


def main() -> None:
    arguments = parse_arguments()
    if arguments.side:
        side(arguments.side, json.loads(arguments.settings))
        return
    rows = []
    for model in arguments.model:
        rows.append(compare(arguments, model))
        print(machine.table(rows[-1:]), flush=True)
    if arguments.report:
        path = machine.report_path("_".join(name_of_report(arguments)))
        command = f"    python benchmarks/decoders.py {' '.join(sys.argv[1:])}\n"
        title = "# Language models: stock PyTorch against cputrain\n"
        path.write_text("\n".join((title, command, machine.table(rows), machine.facts_table(machine.description()))))
        print(f"written to {path}")


def name_of_report(arguments: argparse.Namespace) -> list[str]:
    """One for each row of a table, so that none overwrites another."""
    if set(arguments.model) <= set(HEADS):
        return ["decoders", "heads", *(["avx2"] if arguments.isa == "avx2" else [])]
    words = ["decoders", arguments.lengths]
    if arguments.train != "full":
        words += [arguments.train, *arguments.model]
    for name, usual in (("load", "fp32"), ("against", "stock"), ("isa", "native")):
        words += [getattr(arguments, name)] if getattr(arguments, name) != usual else []
    words += ["checkpointing"] if arguments.checkpointing else []
    return words + ([f"accumulate{arguments.accumulate}"] if arguments.accumulate > 1 else [])


if __name__ == "__main__":
    main()
