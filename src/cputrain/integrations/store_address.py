"""Makes torch's store listen at the address that the ranks were told, under `cputrain run`; torch would use all.

The store has no authentication: any program that reaches its port can read and write. (`launch` makes the store of the
ranks that it starts itself, see launch/agent.py.)
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any

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
