"""Which number format a model computes in: a decision with its reason.

`auto` follows from the instruction sets; a short measurement (speed.py) may only veto it. All processes of one
job compute in what the first of them chose, whether or not they have a process group yet.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from functools import cache

import torch

from cputrain import hardware, settings
from cputrain.formats import Bf16, Bf16Saved, Fp32, Int16, speed
from cputrain.log import logger, say_once

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int16: "int16"}
AUTO = "auto: "  # begins the reason of a choice that the user left open
_told: set[str] = set()
_again: Choice | None = None  # what a training that goes on has chosen before


@dataclass(frozen=True)
class Choice:
    """What the user will hear (`dtype`: fp32, bf16 or int16), what the layers do (`format`, its name), and why."""

    dtype: str
    format: str
    reason: str


def choose(dtype: str | torch.dtype) -> Choice:
    """What runs for what the user asked for."""
    name = NAMES.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
    if name == "auto":
        return _agreed()
    if name == "fp32":
        return Choice("fp32", Fp32.name, "asked for")
    if name == "int16":
        return Choice("int16", Int16.name, "asked for: products of block-scaled 16-bit integers, all else in fp32")
    if name == "bf16":
        return _bf16()
    raise ValueError(
        f"dtype must be 'auto', 'fp32', 'bf16' or 'int16', or torch's name of one of them, found {dtype!r}."
    )


def _bf16() -> Choice:
    if speed.bf16_pays():
        return Choice("bf16", Bf16.name, "asked for: this CPU multiplies bf16 itself")
    lacks = "has no bf16"
    if hardware.has_bf16():
        ratio = speed.ratio(Bf16.name)
        how = f"at only {ratio:.2f} × fp32's speed" if ratio is not None else "at a speed that wasn't clear"
        lacks = f"multiplies bf16 {how}"
    ratio = speed.ratio(Int16.name)
    clear = ratio is not None and ratio > 1
    better = f"; dtype='int16' is more exact, and its products are {ratio:.2f} × as fast" if clear else ""
    reason = f"asked for: {_cpu()} {lacks}, so activations are kept as bf16 and products run in fp32{better}"
    say_once(f"bf16 was {reason}")
    return Choice("bf16", Bf16Saved.name, reason)


def tell(choice: Choice) -> None:
    """Says once what `auto` chose, and why; fp32, which is stock's, only at level INFO."""
    if choice.reason.startswith(AUTO) and choice.reason not in _told:
        _told.add(choice.reason)
        level = logging.INFO if choice.format == Fp32.name else logging.WARNING
        why = choice.reason.removeprefix(AUTO)
        logger.log(level, "the model computes in %s: %s (dtype='fp32' keeps stock's arithmetic)", choice.dtype, why)


def note_told(choice: Choice) -> None:
    """Another part of cputrain has said it already."""
    _told.add(choice.reason)


@cache
def automatic(measured: bool = True) -> Choice:
    """The fastest format on this CPU that is at least as exact as bf16."""
    sets = hardware.this_machine().instruction_sets.value
    slow: list[str] = []
    candidates: list[tuple[str, str, str]] = []
    if "avx2" in sets:
        has = "AVX-512" if "avx512bw" in sets else "AVX2"
        other = "and bf16, which would be less exact and no faster" if hardware.has_bf16() else "but no bf16"
        candidates.append(("int16", Int16.name, f"{_cpu()} has {has} {other}"))
    if hardware.has_bf16():
        # AVX512_BF16 alone multiplies bf16 no faster than VNNI multiplies int16, which is more exact, and on some CPUs
        # slower than fp32: int16 comes first there (docs/precision.md has the figures).
        place = 0 if set(sets) & speed.FAST_BF16 else len(candidates)
        candidates.insert(place, ("bf16", Bf16.name, f"{_cpu()} multiplies bf16 itself"))
    for dtype, format, why in candidates:
        if not measured:
            return Choice(dtype, format, f"{AUTO}{why}; not measured: the ranks have no way yet to agree on a result")
        ratio = speed.ratio(format)
        if speed.pays(format):
            vetoed = f" ({', '.join(slow)})" if slow else ""
            found = f"measured {ratio:.2f} × fp32" if ratio is not None else "a measurement wasn't clear"
            return Choice(dtype, format, f"{AUTO}{why}; {found}{vetoed}")
        slow.append(f"{dtype} only {ratio:.2f} × fp32" if ratio is not None else f"{dtype} not clearly")
    found = f": measured {' and '.join(slow)}" if slow else ", which has neither bf16 nor AVX2"
    return Choice("fp32", Fp32.name, f"{AUTO}nothing is faster on {_cpu()}{found}")


def choose_again(choice: Choice | None) -> None:
    """What `auto` gives from now on: a choice of a checkpoint, the same on all ranks; None: it chooses."""
    global _again
    _again = choice


def _agreed() -> Choice:
    """The first rank's answer, asked of the store that all ranks of the job share."""
    if _again is not None:
        return _again
    if not torch.distributed.is_available():
        return automatic()
    if torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        rank, size = settings.number(settings.RANK), settings.number(settings.WORLD_SIZE, 1)
    if size == 1:
        return automatic()
    store = _store()
    if store is None:
        return automatic(measured=False)
    key = f"cputrain/precision/{settings.attempt()}"
    if rank == 0:
        store.set(key, json.dumps(asdict(automatic())))
    choice = Choice(**json.loads(store.get(key)))
    if choice.format == Bf16.name and not hardware.has_bf16():
        return Choice("bf16", Bf16Saved.name, f"{AUTO}rank 0 chose bf16, which {_cpu()} only stores")
    return choice


def _store() -> torch.distributed.Store | None:
    """The process group's; before there is one, that of torchrun's agent: `cputrain launch` has one, mpirun not."""
    distributed = torch.distributed
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    if not settings.has_agents_store():
        return None
    return distributed.TCPStore(*settings.meeting_place(), is_master=False)


def _cpu() -> str:
    return f"this CPU ({hardware.this_machine().model.value})"
