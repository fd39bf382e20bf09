"""torchrun's agent, which ends only when every rank of every machine has ended, and fails when one has failed.

torch's own waits at most 300 seconds for the other machines, and then ends well, also if another one failed. In a
PyTorchJob the first pod that ends well makes the job succeed, while rank 0 may still be saving.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from math import ceil
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from cputrain import blame, hardware, settings
from cputrain.keep_alive import LAST_WORDS_SECONDS
from cputrain.launch import processes, rendezvous
from cputrain.launch.liveness import Links, Peers, keep_all_alive
from cputrain.launch.processes import CULPRIT_SECONDS, Failure
from cputrain.launch.restarts import OUT_OF_MEMORY, Own, Restarts, own_failure

if TYPE_CHECKING:
    from cputrain.launch.node import Order

_LOOK_SECONDS = 0.5
_HEARD_SECONDS = 5.0
# After a rank has failed by itself, the others have so long to notice it, and to say so, before they are ended.
_LAST_WORDS_SECONDS = 1.0
_MEETING_SECONDS = 600
# All have ended by then; the holder of the store stays until the others have read that.
GOODBYE_SECONDS = 30.0


class OthersFailed(Exception):
    """Another machine ended the training, and so the ranks of this one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


class MachineLost(OthersFailed):
    """Another machine is gone without a word, so that others may not know."""


def _lost(machines: list[int]) -> Failure:
    names = ", ".join(map(str, machines))
    words = f"machine {names} (counted from 0) is lost: it, or the network on the way there, doesn't answer any more"
    return Failure(words, 1, from_outside=True)


def _out_of_memory() -> str:
    limit = hardware.detect().memory_limit.value
    most = f" beyond the {limit / 2**30:.1f} GiB that its cgroup allows" if limit else ""
    return (
        f"the kernel ended it for want of memory{most}. Smaller batches with more gradient_accumulation_steps, "
        "gradient_checkpointing or a smaller sequence length need less; or raise the limit"
    )


class Agent(LocalElasticAgent):
    """Ranks that have ended count as running until all others have ended as well.

    So torch's loop goes on: a machine that comes back is noticed, and the ranks of all start anew together.
    """

    peers: Peers | None = None  # from the first start on
    links: Links | None = None
    endpoint = ""  # an address of the machine where all meet
    _broken_since: float | None = None
    _ended: RunResult | None = None
    _next_look = 0.0
    verdict: Failure | None = None  # which rank of this machine failed first, and how
    _failed_since: float | None = None
    _own: Own | None = None  # if it was its own fault
    _remaining_restarts: int  # torch's
    _oom_kills = 0  # of this cgroup, when the ranks were started

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._restarts = Restarts()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ended = self.verdict = self._failed_since = self._own = None
        self._oom_kills = hardware.oom_kills()
        blame.forget_all(os.environ[blame.FOLDER])
        keep_all_alive()
        store, own, size = worker_group.store, worker_group.group_rank or 0, worker_group.group_world_size or 1
        self.peers = Peers(store, own, size)
        if self.links:
            self.links.close()
        self._broken_since = None
        key = f"cputrain/links/{self.peers.start}"
        self.links = Links(store, key, own, size, self.endpoint) if size > 1 else None
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._ended is None and self._waits_for_the_cause(worker_group):
            result = RunResult(state=WorkerState.HEALTHY)
        else:
            result = self._ended or super()._monitor_workers(worker_group)
            if result.state == WorkerState.FAILED:
                self._decide_on_a_restart(worker_group)
        assert self.peers
        if result.state == WorkerState.SUCCEEDED and self._ended is None:
            self._ended = result
            self.peers.say_ended()
            self._next_look = 0.0
        if result.state in (WorkerState.SUCCEEDED, WorkerState.HEALTHY) and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            try:
                return self._after_a_look(result, self.peers)
            except RuntimeError:  # the store's machine is gone
                if self._ended or self._ranks_had_their_say():
                    raise
        return RunResult(state=WorkerState.HEALTHY) if self._ended else result

    def _waits_for_the_cause(self, worker_group: WorkerGroup) -> bool:
        """Once a rank has failed: torch would end all others at once, and what they still had to say were lost."""
        codes = self._exit_codes(worker_group)
        if not any(codes.values()):
            return False
        self._failed_since = self._failed_since or time.monotonic()
        blames = self._blames(rank for rank, code in codes.items() if code)
        waited, lost = time.monotonic() - self._failed_since, self.links and self.links.broken
        if processes.cause_may_show(codes, blames) and waited < CULPRIT_SECONDS and not lost:
            return True
        if self.verdict is None:
            self.verdict = processes.first_failure(codes, blames)
            out_of_memory = hardware.oom_kills() > self._oom_kills
            self._own = own_failure(os.environ[blame.FOLDER], codes, out_of_memory)
            if self._own and self._own.what == OUT_OF_MEMORY:
                self.verdict = self.verdict._replace(sentence=f"{self.verdict.sentence}: {_out_of_memory()}")
        if None in codes.values() and waited < _LAST_WORDS_SECONDS:
            return True
        if self.verdict.code != blame.STOPPED:
            blame.note_failure(os.environ[blame.FOLDER])
        self._end_stopped()
        return False

    def _decide_on_a_restart(self, worker_group: WorkerGroup) -> None:
        """torch's loop starts anew as long as restarts remain."""
        assert self.verdict
        if self.verdict.code == blame.STOPPED:  # of several machines one may come back, and no start is used up for it
            self.verdict = Failure(f"the ranks of {socket.gethostname()} were asked to stop", blame.STOPPED, True)
            several = (worker_group.group_world_size or 1) > 1 and worker_group.spec.max_restarts
            self._remaining_restarts = self._remaining_restarts + 1 if several else 0
        elif self._remaining_restarts and (why := self._restarts.why_not(self._own)):
            self.verdict = self.verdict._replace(sentence=f"{self.verdict.sentence} {why}")
            self._remaining_restarts = 0

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.verdict is not None:  # else machines come or go
            steps = [blame.step_of(os.environ[blame.FOLDER], worker.global_rank) for worker in worker_group.workers]
            self._stop_workers(worker_group)
            seconds = self._restarts.pause(max(filter(None, steps), default=None))
            soon = f" in {seconds:.0f} s" if seconds else ""
            more = f"{self._remaining_restarts} more times at most" if self._remaining_restarts else "for the last time"
            print(f"cputrain: {self.verdict.sentence}; all ranks start anew{soon}, {more}.", file=sys.stderr)
            time.sleep(seconds)
        super()._restart_workers(worker_group)

    def _blames(self, ranks: Iterable[int]) -> dict[int, blame.Blame]:
        """What those of these ranks that know of another one's failure have left."""
        folder = os.environ[blame.FOLDER]
        return {rank: found for rank in ranks if (found := blame.read(folder, rank))}

    def _handlers(self) -> dict[int, Any]:
        """torch's, of the processes of this machine's ranks, by their local numbers."""
        return self._pcontext.subprocess_handlers if self._pcontext else {}

    def _exit_codes(self, worker_group: WorkerGroup) -> dict[int, int | None]:
        """Of the ranks of this machine, by their global numbers; None while they run."""
        workers = worker_group.workers
        return {workers[local].global_rank: one.proc.poll() for local, one in self._handlers().items()}

    def _end_stopped(self) -> None:
        """torch's SIGTERM would reach a stopped rank when it goes on, which it does only now."""
        for handler in self._handlers().values():
            if handler.proc.poll() is None:
                handler.proc.terminate()
                handler.proc.send_signal(signal.SIGCONT)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        """With the user's time, in place of torch's 30 seconds."""
        self._end_stopped()
        super()._shutdown(death_sig, ceil(settings.grace()))

    def _after_a_look(self, result: RunResult, peers: Peers) -> RunResult:
        if failure := peers.failure():
            blame.note_failure(os.environ[blame.FOLDER])
            raise OthersFailed(failure)
        unreachable = self._unreachable(peers)
        if self._ended is None:
            peers.beat()
            self._end_without(unreachable)
            return result
        if peers.all_ended():
            return result
        # A machine that was lost before its ranks had ended: what they still had to do is unknown.
        lost = sorted({*peers.lost(), *unreachable})
        if lost and not self._remaining_restarts:
            raise MachineLost(_lost(lost))
        return RunResult(state=WorkerState.UNHEALTHY if lost else WorkerState.HEALTHY)

    def _unreachable(self, peers: Peers) -> list[int]:
        """The machines whose kernel doesn't answer, and whose ranks have not ended."""
        if self.links is None:
            return []
        self.links.look()
        return sorted(number for number in self.links.broken if not peers.has_ended(number))

    def _end_without(self, machines: list[int]) -> None:
        """Ranks that don't communicate would go on for nothing, and others may take long to end."""
        if machines and not self._remaining_restarts and self._ranks_had_their_say():
            blames = self._blames(self._exit_codes(self._worker_group))
            named = processes.first_failure(dict.fromkeys(blames, 1), blames) if blames else None
            raise MachineLost(named._replace(from_outside=True) if named else _lost(machines))

    def _ranks_had_their_say(self) -> bool:
        """Ranks that communicate notice a lost machine nearly as soon as we do, and know more of it."""
        self._broken_since = self._broken_since or time.monotonic()
        return time.monotonic() - self._broken_since > LAST_WORDS_SECONDS

    def tell_others(self, failure: Failure) -> None:
        """If they can be told: the store may be on a machine that is gone. If it is on this one, it stays a moment."""
        if self.peers is None:
            return
        with contextlib.suppress(RuntimeError):
            self.peers.say_failed(failure)
            if not (self.links and self.links.broken):  # a machine that can't be reached can't hear
                processes.wait_until(self.peers.all_heard, _HEARD_SECONDS)


def train(order: Order, logs: Any, program: list[str]) -> Failure | None:
    """Runs the ranks of an order until all machines have ended; the answer is what failed, here or elsewhere."""
    handler = _handler(order)
    agent = Agent(_spec(order, handler, program), logs, exit_barrier_timeout=GOODBYE_SECONDS)
    agent.endpoint = rendezvous.split(order.endpoint)[0]
    try:
        failure = _run(agent, order)
    except SignalException as stop:
        # The rendezvous stays open: others, or this machine when it is back, may go on with the training.
        if order.is_fixed and not order.max_restarts:
            ended = f"{socket.gethostname()} was ended by {stop.sigval.name}"
            agent.tell_others(Failure(ended, 128 + stop.sigval, from_outside=True))
        raise
    except BaseException:
        handler.shutdown()
        raise
    handler.shutdown()
    return failure


def _run(agent: Agent, order: Order) -> Failure | None:
    here = socket.gethostname()
    try:
        result = agent.run()
    except OthersFailed as others:
        if isinstance(others, MachineLost):
            agent.tell_others(others.failure)
        return others.failure._replace(sentence=f"{others.failure.sentence}, and with it the ranks of {here}")
    except RendezvousClosedError:
        return Failure(f"the training that met at {order.endpoint} is over, without {here}", 1)
    except (RuntimeError, RendezvousConnectionError) as error:
        if agent.peers is None:  # they never met
            raise
        first = str(error).strip().partition("\n")[0]
        return Failure(f"{here} lost the machine at {order.endpoint}, where all meet ({first})", 1, from_outside=True)
    if result is None:
        return Failure(f"the training that met at {order.endpoint} needed no more machines than it had", 1)
    if not result.is_failed():
        return None
    assert agent.verdict, "a rank has failed, so it was judged"
    agent.tell_others(agent.verdict)
    return agent.verdict


def _handler(order: Order) -> RendezvousHandler:
    """torch's own, unless the store is ours to make: on a machine alone, or as the first of several with numbers."""
    host, port = rendezvous.split(order.endpoint)
    address = _address_of_store(host)
    is_alone = order.most_machines == 1 and rendezvous.is_loopback(host)
    if address and (is_alone or (order.backend == "static" and order.machine == 0)):
        return _holder(address, port, order, int(order.meeting.get("timeout", _MEETING_SECONDS)))
    return get_rendezvous_handler(_meeting(order))


def _address_of_store(host: str) -> str | None:
    """The one address that the machines of a run use; None leaves it to torch, which listens at all of them.

    The store has no authentication: any program that reaches its port can read and write. torch asks for a name's IPv6
    addresses first, and for no other as long as none answers: so names are left to it.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    return rendezvous.address_to_bind(host) or None


def _holder(address: str, port: int, order: Order, seconds: int) -> StaticTCPRendezvous:
    """torchrun's static rendezvous, for the machine that holds the store. The port 0 is any."""
    try:
        server = rendezvous.server_at(address, port)
    except OSError as error:
        raise RendezvousConnectionError(str(error)) from None
    port, limit = server.getsockname()[1], timedelta(seconds=seconds)
    made = StaticTCPRendezvous(address, port, 0, order.machines, order.run_id, seconds)
    made._store = TCPStore(address, port, order.machines, True, limit, master_listen_fd=server.detach())
    return made


def _meeting(order: Order) -> RendezvousParameters:
    if order.backend != "static" and order.most_machines > 1:
        # torch 2.13's agents keep the first round's address to themselves, and one that comes back asks in vain.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    static = {"rank": order.machine, "timeout": _MEETING_SECONDS} if order.backend == "static" else {}
    return RendezvousParameters(
        backend=order.backend,
        endpoint=order.endpoint,
        run_id=order.run_id,
        min_nodes=order.machines,
        max_nodes=order.most_machines,
        local_addr=_local_address(order),
        **{**static, **order.meeting},
    )


def _spec(order: Order, handler: Any, program: list[str]) -> WorkerSpec:
    host, port = rendezvous.split(order.endpoint)
    static = {"master_addr": host, "master_port": port} if order.backend == "static" else {}
    return WorkerSpec(
        role="rank",
        local_world_size=order.processes,
        entrypoint=sys.executable,
        args=tuple(program),
        rdzv_handler=handler,
        max_restarts=order.max_restarts,
        monitor_interval=0.1,
        local_addr=_local_address(order),
        **static,
    )


def _local_address(order: Order) -> str | None:
    """On the way to the others: the own host name may mean something else to them."""
    return rendezvous.address_towards(rendezvous.split(order.endpoint)[0])
