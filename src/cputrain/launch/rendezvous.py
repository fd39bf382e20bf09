"""Where the ranks meet: address and port of rank 0, as the environment says them, or asked of MPI."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Mapping
from typing import NamedTuple

from cputrain import authentication
from cputrain.launch import pmi
from cputrain.launch.config import PORT
from cputrain.launch.pmi import Exchange
from cputrain.launch.ranks import Place, first_number

LOCAL = "127.0.0.1"
_SECONDS = 5.0
_TICK = 0.05


class Meeting(NamedTuple):
    address: str
    port: int
    reason: str
    token: str = ""  # the run's, if MPI carried one


def meet(place: Place, environ: Mapping[str, str]) -> tuple[Meeting, Exchange | None]:
    """The meeting place, and the connection to MPI, if it had to be asked."""
    address, reason = _told_address(place, environ)
    port = first_number(environ, "MASTER_PORT", "PET_MASTER_PORT")
    if address and port:
        return Meeting(address, port, reason), None
    if place.by == "slurm" or environ.get("SLURM_JOB_ID"):
        if not address:
            raise ValueError("Slurm doesn't say where rank 0 is (SLURM_STEP_NODELIST): set MASTER_ADDR.")
        return Meeting(address, port or _slurm_port(environ), reason), None
    # Open MPI's ranks know a port without a question.
    exchange = None if address and place.by == "openmpi" else pmi.exchange(place, environ)
    if exchange is None:
        if not address:
            raise ValueError(_unknown_address(place))
        return Meeting(address, port or _openmpi_port(environ), reason), None
    if address:
        said, token = exchange.broadcast(f"{port or _free_port()},{authentication.new_token()}").split(",")
        return Meeting(address, int(said), reason, token), exchange
    return _asked(place, exchange, port), exchange


def _told_address(place: Place, environ: Mapping[str, str]) -> tuple[str | None, str]:
    for name in ("MASTER_ADDR", "PET_MASTER_ADDR"):
        if environ.get(name):
            return environ[name], name
    if place.is_local:
        return LOCAL, "all ranks are on this machine"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return first_host(environ[name]), f"the first host of {name}"
    return None, ""


def _unknown_address(place: Place) -> str:
    said = {
        "environment": "RANK, WORLD_SIZE and LOCAL_RANK are set, but not MASTER_ADDR: set it to rank 0's address.",
        "openmpi": "Open MPI has no libpmix to ask where rank 0 is: give mpirun -x MASTER_ADDR=…, or install mpi4py.",
    }
    return said.get(place.by, "mpirun doesn't say where rank 0 is: set MASTER_ADDR, or pip install mpi4py.")


# --- Which of rank 0's addresses can be reached ------------------------------------------------------------------


def _asked(place: Place, exchange: Exchange, port: int | None) -> Meeting:
    """Rank 0 offers all its addresses, and every rank takes the first at which rank 0 answers.

    A host name would not do: on many systems it resolves to 127.0.1.1, or on each host to something else.
    """
    if place.rank == 0:
        token = authentication.new_token()
        with _Greeter(port, _greeting_key(token), place.size) as greeter:
            addresses = own_addresses()
            exchange.broadcast(",".join([str(greeter.port), token, *addresses]))
            exchange.barrier()
            return Meeting(greeter.met_at or addresses[0], greeter.port, "rank 0 was asked through MPI", token)
    said, token, *addresses = exchange.broadcast("-").split(",")
    address = next((name for name in addresses if _answers(name, int(said), token, place.rank)), None)
    if address is None:
        raise ValueError(
            f"rank {place.rank} on {socket.gethostname()} can't reach rank 0 at {' or '.join(addresses)}, port {said}: "
            "open the firewall between the machines, or set MASTER_ADDR and MASTER_PORT."
        )
    exchange.barrier()
    return Meeting(address, int(said), "rank 0 was asked through MPI", token)


def _greeting_key(token: str) -> bytes:
    return authentication.key_for("greeting", {authentication.TOKEN: token})


class _Greeter:
    """Listens at a port until all ranks have tried to reach it; then the port is free for torch's store.

    At all addresses: which one the others reach is the question.
    """

    def __init__(self, port: int | None, key: bytes, ranks: int) -> None:
        self.met_at: str | None = None
        self._listener = authentication.Listener(_listening(port or 0), key, ranks)
        self.port = self._listener.port
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._greet, daemon=True)

    def __enter__(self) -> _Greeter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join()
        self._listener.close()

    def _greet(self) -> None:
        while not self._closing.is_set():
            for _, peer in self._listener.wait(_TICK):
                with peer:
                    self.met_at = peer.getsockname()[0].removeprefix("::ffff:")


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise ValueError(f"rank 0 can't listen at port {port}: {error.strerror}; choose another MASTER_PORT.") from None


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _answers(address: str, port: int, token: str, rank: int) -> bool:
    try:
        authentication.connect((address, port), _greeting_key(token), rank, _SECONDS).close()
        return True
    except OSError:
        return False


def own_addresses() -> list[str]:
    """Addresses of interfaces that are up, other machines' way in: IPv4 first, then global IPv6; never loopback."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [entry for name, entries in psutil.net_if_addrs().items() if name in up for entry in entries]
    four = [e.address for e in found if e.family == socket.AF_INET]
    six = [e.address for e in found if e.family == socket.AF_INET6 and "%" not in e.address]
    return [address for address in (*four, *six) if not ipaddress.ip_address(address).is_loopback][:12] or [LOCAL]


def address_to_bind(host: str) -> str:
    """This machine's address by which others reach it as `host`; "", which is all of them, if that can't be told.

    A name may be another address elsewhere: here 127.0.1.1, say, or an address that is translated on the way.
    """
    if is_loopback(host):
        return LOCAL if host == "localhost" else host
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return ""
    own = found.intersection(own_addresses())
    return own.pop() if len(own) == len(found) == 1 else ""


def split(endpoint: str) -> tuple[str, int]:
    """Host and port of node1:29500 or [fe80::1]:29500."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host means each machine itself. Another name may do so on the machine that has it, and there only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_at(address: str, port: int) -> socket.socket:
    """A listening socket; the address "" is all of this machine's, of IPv4 and IPv6."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, dualstack_ipv6=both, backlog=1024)


def address_towards(host: str) -> str | None:
    """This machine's own address on the way to a host; None if the host is unknown."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # nothing is sent: the kernel only chooses a route
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The network interface on the way to a host, for gloo, which would go by the own host name."""
    import psutil

    own = address_towards(host)
    if own is None or ipaddress.ip_address(own).is_loopback:
        return None
    names = psutil.net_if_addrs().items()
    return next((name for name, entries in names if any(entry.address == own for entry in entries)), None)


def first_host(hosts: str) -> str:
    """node[003-006,9],x means node003. Brackets may stand anywhere, and more than once."""
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts)[0])
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"{hosts!r} is not a list of hosts as Slurm writes it: set MASTER_ADDR.")
    return name


def _slurm_port(environ: Mapping[str, str]) -> int:
    """The same on all ranks, and another for each step: steps of one job may run side by side."""
    job = int(re.sub(r"\D", "", environ.get("SLURM_JOB_ID", "")) or 0)
    step = int(re.sub(r"\D", "", environ.get("SLURM_STEP_ID", "")) or 0)
    return 20_000 + (job * 31 + step) % 10_000


def _openmpi_port(environ: Mapping[str, str]) -> int:
    """Jobs of Open MPI side by side have different numbers, which all their ranks know."""
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PRTE_MCA_ess_base_jobid") or ""
    return 20_000 + int(job) // 65_536 % 10_000 if job.isdecimal() else PORT
