"""Variables that are oneCCL's in the guides, and what becomes of them here."""

from __future__ import annotations

from collections.abc import Mapping

from cputrain import settings
from cputrain.log import mention_once


def say_what_has_no_effect(transport: str, environ: Mapping[str, str]) -> None:
    """One line each, once: a setting that does nothing must not look as if it did."""
    if "oneccl" in transport:
        if environ.get("CCL_WORKER_COUNT") and environ.get("CCL_WORKER_OFFLOAD") == "0":
            mention_once("CCL_WORKER_COUNT has no effect: no core is kept for oneCCL's workers (CCL_WORKER_OFFLOAD=0)")
        return
    if environ.get("CCL_ATL_TRANSPORT"):
        mention_once(f"CCL_ATL_TRANSPORT has no effect: it is oneCCL's, and {transport} carries the data")
    kept = environ.get(settings.COMMUNICATION_CPUS) or environ.get(settings.COMMUNICATION_CORES)
    if environ.get("CCL_WORKER_COUNT") and not kept:
        mention_once(
            "CCL_WORKER_COUNT has no effect: cores are kept free for communication by `cputrain run` and "
            "`cputrain launch`, which did not do it here"
        )
