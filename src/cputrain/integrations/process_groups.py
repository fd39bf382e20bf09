"""`init_process_group("ccl")` in a script that imports nothing of ours, under `cputrain run`, and its store's address.

Imported while torch itself is being imported: our backend follows when the first group is made.

torch's store has no authentication: any program that reaches its port can read and write. So it listens at the address
that the ranks were told, where torch would use all. (`launch` makes the store of the ranks that it starts itself.)
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from typing import Any

from cputrain.integrations import hook
from cputrain.settings import Environ, all_ranks_are_here


def bound(stock: Any) -> Any:
    """In place of torch's TCPStore where a process group's store is made."""

    def store(host_name: str, port: int, *, is_master: bool = False, **settings: Any) -> Any:
        server = _server_at(host_name, port) if is_master else None
        if server:
            settings["master_listen_fd"] = server.detach()
        return stock(host_name=host_name, port=port, is_master=is_master, **settings)

    return store


def _server_at(host: str, port: int, environ: Environ | None = None) -> socket.socket | None:
    """None leaves it to torch: a name, or an address that isn't this machine's, may be another one to other ranks.

    The port is in use if this process has a store there already, which torch then shares.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.is_unspecified or (address.is_loopback and not all_ranks_are_here(environ)):
        return None
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError):
        return socket.create_server((host, port), family=family, backlog=1024)
    return None


def _create(options: Any, kind: Any) -> Any:
    from cputrain.distributed import backend

    return backend.create(options, kind)


def _announce() -> None:
    known = sys.modules["torch.distributed.distributed_c10d"].Backend
    if "CCL" not in known._plugins:
        known.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


def _bind_store() -> None:
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    rendezvous.TCPStore = bound(rendezvous.TCPStore)


if hook.is_active() and "torch.distributed.distributed_c10d" in sys.modules:
    _announce()
    _bind_store()
