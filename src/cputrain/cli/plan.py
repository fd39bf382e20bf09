"""`cputrain plan MODEL | SCRIPT ARGS…`: memory, time and cost of a training, before it runs."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cputrain.cli.app import Command, command, new_app, setting, with_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cputrain.plan.answer import Question
    from cputrain.plan.measure import Ranks

app = new_app()
EXAMPLES = """
    cputrain plan bert-base --batch 12 --seq 384
    cputrain plan qwen3-0.6b --lora --nodes 1,2,4,8 --network 10G --price 1.20
    cputrain plan ./my-model --memory 16G --json
    cputrain plan run_qa.py --model_name_or_path bert-base-uncased --do_train \\
      --output_dir out
    cputrain plan minilm --save-profile server.json
    cputrain plan minilm --profile server.json --batch 32
"""
_DTYPES = ("auto", "fp32", "int16", "bf16", "stock")
_TASKS = ("question-answering", "classification", "masked-lm", "causal-lm", "seq2seq")


class _Plan(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """All that follows a script is the script's own."""
        ctx.allow_interspersed_args = not any(word.endswith(".py") for word in args)
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class Options:
    batch: int | None = setting("Sequences of a step on each rank.", "--batch", "-b")
    seq: int | None = setting("Tokens of a sequence.", "--seq", "-s")
    real: float = setting("Share of tokens that are no padding.", "--real", default=1.0, metavar="SHARE")
    task: str | None = setting(f"{', '.join(_TASKS)}.", "--task")
    lora: bool = setting("Train LoRA adapters.", "--lora", default=False)
    qlora: bool = setting("Train LoRA adapters on 4-bit weights.", "--qlora", default=False)
    rank: int = setting("Rank of adapters.", "--lora-rank", default=16)
    checkpointing: bool = setting("Gradient checkpointing.", "--checkpointing", default=False)
    dtype: str = setting(f"Number format: {', '.join(_DTYPES)}.", "--dtype", default="auto")
    samples: int | None = setting("Sequences that are to be trained; of a script, its data's epoch.", "--samples")
    ranks: int = setting("Processes on this machine.", "--ranks", "-n", default=1)
    memory: str | None = setting(
        "Of the machine that will train, if it isn't this one, as 16G.", "--memory", metavar="SIZE"
    )
    nodes: str = setting("Numbers of machines.", "--nodes", default="1,2,4,8,16", metavar="N,N…")
    network: str = setting("Bits a second between machines.", "--network", default="10G", metavar="RATE")
    price: float | None = setting("Of a machine for an hour.", "--price")
    run: list[Path] | None = setting("Output folder of an earlier run to compare with.", "--run", metavar="FOLDER")
    profile: Path | None = setting("Measurements of another machine, from --save-profile.", "--profile", metavar="FILE")
    save_profile: Path | None = setting("Keep what is measured.", "--save-profile", metavar="FILE")
    alternatives: bool = setting(
        "Try LoRA, checkpointing and other formats, too.", "--alternatives/--no-alternatives", default=True
    )
    as_json: bool = setting("Print JSON, for programs.", "--json", default=False)


@command(app, EXAMPLES, cls=_Plan)
@with_fields
def plan(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL | SCRIPT [ARGUMENTS]",
            help="A known name (minilm, bert-base, gpt2, llama-135m, qwen3-0.6b, llama-8b …), a model type of "
            "transformers, a folder with config.json, or a script on Trainer with its arguments.",
        ),
    ],
    options: Options,
) -> None:
    """Say what a training needs, before it runs: memory by part, seconds a step, the largest batch, cost.

    A few real steps are taken, with random weights and a few layers of the real width where the whole would take long;
    from two depths and two batch sizes the rest follows. A script runs up to train(), its data preparation included: no
    step of it is trained, and its output folder isn't touched. Alternatives are tried for a second or two each.
    """
    _check(options)
    sizes = bytes_of(options.memory, "--memory") if options.memory else None
    from cputrain.plan import measure

    with tempfile.TemporaryDirectory(prefix="cputrain-plan-") as folder, measure.workers(options.ranks) as pair:
        is_script = what[0].endswith(".py") or Path(what[0]).is_file()
        question = (
            _of_script(what, options, Path(folder), sizes) if is_script else _of_model(what, options, pair, sizes)
        )
        _answer(question, pair, options.as_json)


def _check(options: Options) -> None:
    for name in ("batch", "seq", "rank", "samples", "ranks"):
        value = getattr(options, name)
        if value is not None and value < 1:
            flag = "--lora-rank" if name == "rank" else f"--{name}"
            raise ValueError(f"{flag} is {value}; give a whole number of at least 1.")
    if options.price is not None and not 0 <= options.price < float("inf"):
        raise ValueError(f"--price is {options.price:g}; give what a machine costs for an hour, at least 0.")
    if not 0 < options.real <= 1:
        raise ValueError(f"--real is {options.real:g}; give a share above 0, and at most 1.")
    for flag, value, known in (("--dtype", options.dtype, _DTYPES), ("--task", options.task, _TASKS)):
        if value is not None and value not in known:
            raise ValueError(f"{flag} is {value!r}; choose one of {', '.join(known)}.")
    if options.profile is not None and options.save_profile is not None:
        raise ValueError("--profile reads what --save-profile writes: give one of them.")
    numbers(options.nodes)
    bytes_of(options.network, "--network")


def numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(re.fullmatch(r"\s*[1-9]\d{0,5}\s*", word) for word in words):
        raise ValueError(f"--nodes is {text!r}; give whole numbers with commas, as 1,2,4,8.")
    return sorted({int(word) for word in words})


def bytes_of(text: str, flag: str) -> float:
    """Of 16G, 512MiB or 1e9."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)(?:B|bit|bit/s|b)?", text.strip())
    if not found or float(found[1]) == 0:
        raise ValueError(f"{flag} is {text!r}; give a number with a unit, as 16G.")
    return float(found[1]) * (1024 if found[3] else 1000) ** " kMGT".index(found[2] or " ")


def _of_model(what: list[str], options: Options, pair: Sequence[Ranks], memory: float | None) -> Question:
    from cputrain.plan.answer import Question
    from cputrain.trials.jobs import Job

    if len(what) > 1:
        raise ValueError(f"plan takes one model, found {' '.join(what)}; arguments follow a script only.")
    found = pair[0].ask("resolve", model=what[0], task=options.task)
    sequences, length = found["usual"]
    length = options.seq or length
    if found["longest"] and length > found["longest"]:
        raise ValueError(f"--seq is {length}, but {what[0]} takes {found['longest']} tokens at most.")
    job = Job(
        name=what[0],
        config=found["config"],
        architecture=found["architecture"],
        layers=found["layers"],
        sequences=options.batch or sequences,
        length=length,
        dtype=options.dtype,
        real=options.real,
        lora=options.rank if options.lora or options.qlora else None,
        quantised=options.qlora,
        checkpointing=options.checkpointing,
    )
    return Question(
        job, found["parameters"], options.samples or 100_000, **_common(options, memory), runs=options.run or []
    )


def _of_script(what: list[str], options: Options, folder: Path, memory: float | None) -> Question:
    from cputrain.plan import script
    from cputrain.plan.answer import Question
    from cputrain.trials.jobs import from_answer

    given = [name for name in ("batch", "seq", "task") if getattr(options, name) is not None]
    given += [name for name in ("lora", "qlora", "checkpointing") if getattr(options, name)]
    if given:
        raise ValueError(f"--{given[0]} is for a MODEL: a script says itself how it trains.")
    if not Path(what[0]).is_file():
        raise ValueError(f"there is no script {what[0]}.")
    found = script.found_by(Path(what[0]), what[1:], folder)
    output = script.output_of(what[1:])
    runs = [*(options.run or []), *([output] if output and (output / "_cputrain").is_dir() else [])]
    return Question(
        from_answer(found["job"]),
        found["parameters"],
        options.samples or found["samples"] or 100_000,
        accumulation=found["accumulation"],
        unevenness=found["unevenness"],
        base=found["base"],
        runs=runs,
        script=what[0],
        **_common(options, memory),
    )


def _common(options: Options, memory: float | None) -> dict[str, Any]:
    return {
        "ranks": options.ranks,
        "memory": memory,
        "nodes": numbers(options.nodes),
        "network": bytes_of(options.network, "--network") / 8,
        "price": options.price,
        "alternatives": options.alternatives,
        "profile": options.profile,
        "save_profile": options.save_profile,
    }


def _answer(question: Question, pair: Sequence[Ranks], as_json: bool) -> None:
    from rich.console import Console

    from cputrain.plan import answer, text

    with Console(stderr=True).status("real steps with random weights …") as status:
        plan = answer.make(question, pair, lambda line: status.update(f"trial: {line}"))
    if as_json:
        print(json.dumps(text.to_json(plan), indent=1))
        return
    console = Console(highlight=False)
    for part in text.shown(plan):
        console.print(part)
    sys.stdout.flush()
