"""`init_process_group("ccl")` in a script that imports nothing of ours, under `cputrain run`, and its store's address.

Imported while torch itself is being imported: our backend follows when the first group is made.
"""

from __future__ import annotations

import sys
from typing import Any

from cputrain.integrations import hook, store_address


def _create(options: Any, kind: Any) -> Any:
    from cputrain.distributed import backend

    return backend.create(options, kind)


def _announce() -> None:
    known = sys.modules["torch.distributed.distributed_c10d"].Backend
    if "CCL" not in known._plugins:
        known.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


def _bind_store() -> None:
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous.TCPStore = store_address.bound(rendezvous.TCPStore)


if hook.is_active() and "torch.distributed.distributed_c10d" in sys.modules:
    _announce()
    _bind_store()
