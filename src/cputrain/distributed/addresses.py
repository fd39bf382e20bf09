"""The address under which other machines reach this one: that of its route to the master, never its own name's."""

from __future__ import annotations

import os
import socket


def own_address() -> str:
    """The address that the kernel would use to reach MASTER_ADDR; this machine's own loopback if all is local."""
    master = os.environ.get("MASTER_ADDR", "")
    if not master:
        return "127.0.0.1"
    port = int(os.environ.get("MASTER_PORT") or 29500)
    try:
        family, _, _, _, target = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"MASTER_ADDR={master} can't be resolved: {error}; give an address or a known name.") from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect(target)
        return probe.getsockname()[0]
