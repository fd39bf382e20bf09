"""The address under which other machines reach this one: that of its route to the master, never its own name's."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

import torch.distributed as dist

from cputrain.settings import meeting_place

_LOCAL = "127.0.0.1"


def reachable_address(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """This rank's address for the others. Every rank of the group calls this.

    On the master's own machine the way to the master is loopback (where torchrun gives its name, which is 127.0.1.1 on
    many systems): there it is the way to the first rank that has come from elsewhere.
    """
    own = own_address()
    store.set(f"address/{rank}", own)
    keys = [f"address/{other}" for other in range(size)]
    store.wait(keys, timeout)
    others = [store.get(key).decode() for key in keys]
    elsewhere = [address for address in others if not ipaddress.ip_address(address).is_loopback]
    if elsewhere and ipaddress.ip_address(own).is_loopback:
        return _towards(elsewhere[0], 9)
    return own


def own_address() -> str:
    """The address that the kernel would use to reach MASTER_ADDR; this machine's own loopback if all is local."""
    master, port = meeting_place()
    if not master:
        return _LOCAL
    try:
        return _towards(master, port)
    except socket.gaierror as error:
        raise ValueError(f"MASTER_ADDR={master} can't be resolved: {error}; give an address or a known name.") from None


def _towards(host: str, port: int) -> str:
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect(target)
        return probe.getsockname()[0]
