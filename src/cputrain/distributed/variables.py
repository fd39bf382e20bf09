"""Variables that are oneCCL's in the guides, and what becomes of them here."""

from __future__ import annotations

from cputrain import settings
from cputrain.log import mention_once
from cputrain.settings import value_of


def say_what_has_no_effect(transport: str, environ: settings.Environ | None = None) -> None:
    """One line each, once: a setting that does nothing must not look as if it did."""
    if "oneccl" in transport:
        if value_of(settings.WORKERS, environ) and value_of(settings.OFFLOAD, environ) == "0":
            mention_once("CCL_WORKER_COUNT has no effect: no core is kept for oneCCL's workers (CCL_WORKER_OFFLOAD=0)")
        return
    if value_of(settings.ATL_TRANSPORT, environ):
        mention_once(f"CCL_ATL_TRANSPORT has no effect: it is oneCCL's, and {transport} carries the data")
    kept = any(value_of(name, environ) for name in (settings.COMMUNICATION_CPUS, settings.COMMUNICATION_CORES))
    if value_of(settings.WORKERS, environ) and not kept:
        mention_once(
            "CCL_WORKER_COUNT has no effect: cores are kept free for communication by `cputrain run` and "
            "`cputrain launch`, which did not do it here"
        )
