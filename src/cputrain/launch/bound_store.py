"""torch's store, listening at the one address that the machines of a run use, where torch itself would use all.

The store has no authentication: any program that reaches its port can read and write. So on a
single machine it is bound to loopback, and on several to the address at which they meet, if that isn't a name.
"""

from __future__ import annotations

import ipaddress
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from cputrain.launch import rendezvous


def handler(address: str, port: int, machines: int, run_id: str, seconds: int) -> StaticTCPRendezvous:
    """torchrun's static rendezvous, for the machine that holds the store. The port 0 is any."""
    store = _store_at(address, port, machines, timedelta(seconds=seconds))
    made = StaticTCPRendezvous(address, store.port, 0, machines, run_id, seconds)
    made._store = store
    return made


def _store_at(address: str, port: int, machines: int, timeout: timedelta) -> TCPStore:
    try:
        server = rendezvous.server_at(address, port)
    except OSError as error:
        raise RendezvousConnectionError(str(error)) from None
    port = server.getsockname()[1]
    return TCPStore(address, port, machines, True, timeout, master_listen_fd=server.detach())


def address_for(endpoint_host: str) -> str | None:
    """Where the store is to listen; None leaves it to torch.

    torch asks for a name's IPv6 addresses first, and for no other as long as none answers: so names are left to it.
    """
    if endpoint_host == "localhost":
        return None
    try:
        ipaddress.ip_address(endpoint_host)
    except ValueError:
        return None
    return rendezvous.address_to_bind(endpoint_host) or None
