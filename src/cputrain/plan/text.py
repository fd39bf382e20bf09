"""A plan as a person reads it, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from cputrain.plan import nodes
from cputrain.plan.answer import Plan, Recipe
from cputrain.plan.seen import Compared

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_BAR = 24


def to_json(plan: Plan) -> dict[str, Any]:
    question, job = plan.question, dataclasses.asdict(plan.question.job)
    measured = plan.measured
    return {
        "model": {**{name: job[name] for name in ("name", "architecture", "layers")}, "parameters": _parameters(plan)},
        "job": {name: value for name, value in job.items() if name not in ("config", "batch_file")},
        "ranks": question.ranks,
        "accumulation": question.accumulation,
        "limit": plan.limit,
        "limit_source": plan.limit_source,
        "fits": plan.asked.fits,
        "largest_batch": plan.asked.largest,
        "memory": dataclasses.asdict(plan.parts) if plan.parts else None,
        "step": {**dataclasses.asdict(plan.step), "seconds": plan.step.seconds} if plan.step else None,
        "samples": question.samples,
        "alternatives": [_of_recipe(one) for one in plan.alternatives],
        "nodes": [dataclasses.asdict(point) for point in plan.curve],
        "pays_up_to": nodes.last_that_pays(plan.curve) if plan.curve else None,
        "assumptions": list(nodes.ASSUMPTIONS),
        "runs": [dataclasses.asdict(one) for one in plan.seen],
        "measured": {
            "cpu": measured.cpu,
            "dtype": measured.dtype,
            "threads": measured.threads,
            "layers": measured.layers,
            "sequences": measured.sequences,
            "gflops": measured.gflops,
            "bytes_copied_per_second": measured.copied,
        }
        if measured
        else None,
        "notes": plan.notes,
    }


def _of_recipe(one: Recipe) -> dict[str, Any]:
    found = {"name": one.name, "recipe": one.job.recipe, "peak": one.peak, "fits": one.fits}
    return {**found, "seconds": one.seconds, "largest_batch": one.largest}


def _parameters(plan: Plan) -> int:
    found = plan.measured
    return round(found.at("parameters", found.job.layers, 1)) if found else plan.question.parameters


# --- The screen --------------------------------------------------------------------------------------------------


def shown(plan: Plan) -> Iterator[RenderableType]:
    job, found = plan.question.job, plan.measured
    recipe = job.recipe if found is None else job.but(dtype=found.dtype).recipe
    yield f"[bold]{escape(job.name)}[/]: {job.architecture}, {_count(_parameters(plan))} parameters"
    accumulated = f" × {plan.question.accumulation} accumulated" if plan.question.accumulation > 1 else ""
    yield f"{job.sequences} × {job.length} tokens{accumulated}, {recipe}"
    yield from _memory(plan)
    yield from _time(plan)
    if plan.question.script:
        script = escape(plan.question.script)
        yield f"[dim]{script} ran up to train(), its data preparation included; no step was trained.[/]"
    if plan.alternatives:
        yield from _alternatives(plan)
    if len(plan.curve) > 1:
        yield from _machines(plan)
    yield from _sources(plan)


def _memory(plan: Plan) -> Iterator[RenderableType]:
    parts, job = plan.parts, plan.question.job
    yield f"\n[bold]Memory[/]{' of each rank' if plan.question.ranks > 1 else ''}"
    if parts is not None:
        rows = [
            ("Python and libraries", parts.libraries),
            ("weights", parts.weights),
            (f"moments of {job.optimizer}", parts.moments),
            (f"activations, {job.layers} layers" if job.layers > 1 else "activations", parts.activations),
            ("embedding, head and loss", parts.head),
            ("gradients", parts.gradients),
            ("working memory, gaps", parts.rest),
        ]
        table = _columns("", "right", "")
        most = max(value for _, value in rows)
        for name, value in rows:
            if value:
                table.add_row(name, size(value), "█" * max(1, round(_BAR * value / most)))
        lead = "" if plan.measured else "at least "
        table.add_row("[bold]at most[/]" if plan.measured else "", f"[bold]{lead}{size(parts.peak)}[/]", _verdict(plan))
        yield table
    else:
        yield f"  {_verdict(plan)}"
    if plan.measured:
        yield f"  largest batch that fits: [bold]{plan.asked.largest:,}[/] × {job.length} tokens"


def _verdict(plan: Plan) -> str:
    limit = f"{size(plan.limit)} ({escape(plan.limit_source)})"
    if plan.measured is None:
        if plan.parts is not None and plan.parts.peak > plan.limit:
            return f"[red]doesn't fit[/] in {limit}"
        return "no trial had room in the memory that is free now"
    return f"[green]fits[/] in {limit}" if plan.asked.fits else f"[red]doesn't fit[/] in {limit}"


def _time(plan: Plan) -> Iterator[RenderableType]:
    step, question = plan.step, plan.question
    if step is None:
        return
    speed = plan.curve[0].sequences_per_second
    table = _columns("", "")
    phases = f"forward {seconds(step.forward)}, backward {seconds(step.backward)}, optimizer {seconds(step.optimizer)}"
    table.add_row("a step", f"[bold]{seconds(plan.curve[0].seconds)}[/]: {phases}")
    tokens = speed * question.job.length * question.job.real
    table.add_row("speed", f"{speed:,.3g} sequences a second, {tokens:,.0f} tokens")
    table.add_row(f"{question.samples:,} sequences", f"[bold]{hours(question.samples / speed / 3600)}[/]")
    yield "\n[bold]Time[/]"
    yield table


def _alternatives(plan: Plan) -> Iterator[RenderableType]:
    table = _columns("", "right", "right", "right", names=("", "memory", "a step", "largest batch"))
    for one in (plan.asked, *plan.alternatives):
        if one.peak is None or one.seconds is None:
            table.add_row(one.name, "no trial had room", "", "")
        else:
            colour = "green" if one.fits else "red"
            table.add_row(one.name, f"[{colour}]{size(one.peak)}[/]", seconds(one.seconds), f"{one.largest:,}")
    yield "\n[bold]What would change it[/]"
    yield table


def _machines(plan: Plan) -> Iterator[RenderableType]:
    question = plan.question
    priced = question.price is not None
    names = ("machines", "a step", "waiting", "sequences/s", "of ideal", "time", *(("cost",) if priced else ()))
    table = _columns(*["right"] * len(names), names=names)
    pays = nodes.last_that_pays(plan.curve)
    for point in plan.curve:
        cells = [f"{point.nodes:,}", seconds(point.seconds), seconds(point.exposed)]
        cells += [f"{point.sequences_per_second:,.4g}", f"{point.efficiency:.0%}", hours(point.epoch_hours)]
        cells += [f"{point.cost:,.2f}"] if point.cost is not None else []
        table.add_row(*cells, style="" if point.nodes <= pays else "dim")
    rate = question.network * 8 / 1e9
    yield f"\n[bold]More machines[/], {rate:g} Gbit/s, for {question.samples:,} sequences"
    yield table
    last = plan.curve[-1].nodes
    limit = (
        "each still pays" if pays == last else f"beyond {pays:,} it stops paying (less than {nodes.PAYS:.0%} of ideal)"
    )
    yield f"  {limit}. Assumed: {'; '.join(nodes.ASSUMPTIONS)}."


def _sources(plan: Plan) -> Iterator[RenderableType]:
    found = plan.measured
    yield ""
    if found is not None:
        whole = plan.question.job.layers
        depths = " and ".join(map(str, found.layers[-1:] if found.layers[-1] == whole else found.layers))
        of = "the whole model" if found.layers[-1] == whole else f"{depths} of {whole} layers"
        batches = " and ".join(map(str, found.sequences))
        yield (
            f"[dim]From real steps of {of} with {batches} sequences, "
            f"{found.ranks} × {found.threads} threads, {found.cpu}.[/]"
        )
    for one in plan.seen:
        yield f"[dim]{escape(_compared(one))}[/]"
    for note in plan.notes:
        yield f"[bold yellow]![/] {escape(note)}"


def _compared(one: Compared) -> str:
    if one.why_not:
        return f"The run {one.run} says nothing about this plan: {one.why_not}."
    pairs = [("step", one.seconds, one.planned_seconds), ("memory", one.memory, one.planned_memory)]
    said = [f"{(planned / real - 1):+.0%} in its {what}" for what, real, planned in pairs if real and planned]
    return f"In the run {one.run} this plan is off by {' and '.join(said)}." if said else f"{one.run} has no steps."


def _columns(*justify: str, names: tuple[str, ...] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=bool(names), pad_edge=False, padding=(0, 1), header_style="dim")
    for number, way in enumerate(justify):
        title = names[number] if names else ""
        table.add_column(title, justify="right" if way == "right" else "left")
    return table


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 100_000 else f"{number:,}"


def size(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value < 1e12 else f"{value / 1e12:.2f} TB"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def hours(value: float) -> str:
    if value < 1 / 60:
        return f"{value * 3600:.3g} s"
    return f"{value * 60:.3g} min" if value < 1 else f"{value:,.1f} h" if value < 1000 else f"{value / 24:,.0f} days"
