"""What a report says about the machine and the versions that it was measured with."""

from __future__ import annotations

import datetime
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
# The instruction sets that decide which kernels run, in the spelling of /proc/cpuinfo.
TELLING_FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


def cpuinfo(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return "unknown"


def cpu_label() -> str:
    """Short enough for a file name; vendor, family and model, because virtual machines hide the trade name."""
    vendor = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(cpuinfo("vendor_id"), "cpu")
    return f"{vendor}-{cpuinfo('cpu family')}-{cpuinfo('model')}"


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def description() -> dict[str, str]:
    flags = set(cpuinfo("flags").split())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{cpuinfo('model name')}, family {cpuinfo('cpu family')}, model {cpuinfo('model')}",
        "instruction sets": " ".join(flag for flag in TELLING_FLAGS if flag in flags) or "none of the telling ones",
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{memory:.0f} GB",
        "load average at the start": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "Python": sys.version.split()[0],
        **{name: package_version(name) for name in ("torch", "transformers", "cputrain")},
    }


def report_path(what: str, suffix: str = ".md") -> Path:
    """`benchmarks/results/<what>_<cpu>_<yyyymm>.md`"""
    month = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m")
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{re.sub(r'[^a-z0-9_]+', '-', what.lower())}_{cpu_label()}_{month}{suffix}"


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table; the first row's keys are the head."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *[[row[key] for key in head] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def facts_table(facts: dict[str, str]) -> str:
    return table([{"what": key, "value": value} for key, value in facts.items()])
