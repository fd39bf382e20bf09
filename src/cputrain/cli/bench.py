"""`cputrain bench`: this CPU against stock PyTorch on standard jobs, in three minutes."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

from cputrain import __version__, hardware, log
from cputrain.cli import env
from cputrain.cli.app import command, new_app, option

if TYPE_CHECKING:
    from cputrain.trials.comparison import Result

app = new_app()
EXAMPLES = """
    cputrain bench
    cputrain bench --budget 60 --job minilm
    cputrain bench --json > this-cpu.json
"""
_DTYPES = ("auto", "fp32", "int16", "bf16")


@command(app, EXAMPLES)
def bench(
    budget: Annotated[float, option("Seconds that it may take, about.", "--budget", metavar="SECONDS")] = 180.0,
    jobs: Annotated[
        list[str] | None, option("minilm or llama-135m; may be repeated. Without it both.", "--job", metavar="NAME")
    ] = None,
    dtype: Annotated[str, option(f"Number format: {', '.join(_DTYPES)}.", "--dtype")] = "auto",
    as_json: Annotated[bool, option("Print JSON, for programs.", "--json")] = False,
) -> None:
    """Compare training steps with cputrain to stock PyTorch's on this CPU, and print a line to share.

    Stock, a second stock and cputrain take turns, each in a process of its own, so that all see the same machine. The
    second stock is the control: what its ratio differs from 1 is noise. The models have random weights.
    """
    from cputrain.trials import comparison

    known = comparison.JOBS
    if not 0 < budget < 86_400:
        raise ValueError(f"--budget is {budget:g}; give the seconds that it may take, as 180.")
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}.")
    wrong = [job for job in jobs or [] if job not in known]
    if wrong:
        raise ValueError(f"--job is {wrong[0]!r}; choose one of {', '.join(known)}.")
    from rich.console import Console

    with Console(stderr=True).status("three processes start …") as status:
        found = comparison.compare(jobs or known, dtype, budget, lambda line: status.update(line))
    if as_json:
        print(json.dumps(_as_json(found), indent=1))
    else:
        _show(found)


def _machine() -> dict[str, object]:
    machine = hardware.this_machine()
    return {
        "cpu": machine.model.value,
        "cores": machine.usable_cores.value,
        "isa": hardware.best_isa()[0],
        "cputrain": __version__,
        "torch": env.version("torch"),
        "transformers": env.version("transformers"),
    }


def _as_json(found: list[Result]) -> dict[str, object]:
    return {"line": line(found), "machine": _machine(), "jobs": [dataclasses.asdict(one) for one in found]}


def line(found: list[Result]) -> str:
    """What is shared: ratios, and all that they depend on."""
    machine = _machine()
    ratios = ", ".join(f"{one.job} {one.sequences}×{one.length} {one.times_faster:.1f} times" for one in found)
    off = max(abs(one.control - 1) for one in found)
    formats = "/".join(dict.fromkeys(one.dtype for one in found))
    return (
        f"cputrain {machine['cputrain']} on {machine['cpu']}, {machine['cores']} cores, {machine['isa']}, {formats}: "
        f"{ratios} the speed of stock PyTorch {machine['torch']} (stock against itself within {off:.0%})"
    )


def _show(found: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("job")
    for title in ("tokens", "stock", "cputrain", "faster", "control", "memory", "rounds"):
        table.add_column(title, justify="right")
    for one in found:
        table.add_row(
            one.job,
            f"{one.sequences}×{one.length}",
            f"{one.stock_seconds:.3g} s",
            f"{one.seconds:.3g} s",
            f"[bold green]{one.times_faster:.2f}[/]",
            f"{one.control:.2f}",
            f"{one.memory / one.stock_memory:.2f}",
            f"{one.rounds}",
        )
    Console(highlight=False).print(table)
    print(log.printable(f"\n{line(found)}"))
