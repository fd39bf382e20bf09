"""torchrun's agent, which ends only when every rank of every machine has ended, and fails when one has failed.

torch's own waits at most 300 seconds for the other machines, and then ends well, also if another one failed. In a
PyTorchJob the first pod that ends well makes the job succeed, while rank 0 may still be saving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from cputrain.launch import processes, rendezvous
from cputrain.launch.peers import Failure, Peers

if TYPE_CHECKING:
    from cputrain.launch.node import Order

_LOOK_SECONDS = 0.5
_HEARD_SECONDS = 5.0
# All have ended by then; whoever holds the store stays until the others have read that.
GOODBYE_SECONDS = 30.0


class OthersFailed(Exception):
    """Another machine ended the training, and so the ranks of this one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


class Agent(LocalElasticAgent):
    """Ranks that have ended count as running until all others have ended as well.

    So torch's loop goes on: a machine that comes back is noticed, and the ranks of all start anew together.
    """

    peers: Peers | None = None  # from the first start on
    _ended: RunResult | None = None
    _next_look = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ended = None
        self.peers = Peers(worker_group.store, worker_group.group_rank or 0, worker_group.group_world_size or 1)
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = self._ended or super()._monitor_workers(worker_group)
        assert self.peers
        if result.state == WorkerState.SUCCEEDED and self._ended is None:
            self._ended = result
            self.peers.say_ended()
            self._next_look = 0.0
        if result.state in (WorkerState.SUCCEEDED, WorkerState.HEALTHY) and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            return self._after_a_look(result, self.peers)
        return RunResult(state=WorkerState.HEALTHY) if self._ended else result

    def _after_a_look(self, result: RunResult, peers: Peers) -> RunResult:
        failure = peers.failure()
        if failure:
            raise OthersFailed(failure)
        if self._ended is None:
            peers.beat()
            return result
        if peers.all_ended():
            return result
        # A machine that was lost before its ranks had ended: nobody knows what they still had to do.
        lost = peers.lost()
        if lost and not self._remaining_restarts:
            raise OthersFailed(Failure(f"machine {', '.join(map(str, lost))} was lost before its ranks had ended", 1))
        return RunResult(state=WorkerState.UNHEALTHY if lost else WorkerState.HEALTHY)

    def tell_others(self, failure: Failure) -> None:
        """If they can be told: the store may be on a machine that is gone. If it is on this one, it stays a moment."""
        if self.peers is None:
            return
        with contextlib.suppress(RuntimeError):
            self.peers.say_failed(failure)
            limit = time.monotonic() + _HEARD_SECONDS
            while not self.peers.all_heard() and time.monotonic() < limit:
                time.sleep(0.1)


def train(order: Order, logs: Any, program: list[str]) -> Failure | None:
    """Runs the ranks of an order until all machines have ended; the answer is what failed, here or elsewhere."""
    handler = get_rendezvous_handler(_meeting(order))
    agent = Agent(_spec(order, handler, program), logs, exit_barrier_timeout=GOODBYE_SECONDS)
    try:
        failure = _run(agent, order)
    except SignalException as stop:
        # The rendezvous stays open: others, or this machine when it is back, may go on with the training.
        if order.is_fixed and not order.max_restarts:
            agent.tell_others(Failure(f"{socket.gethostname()} was ended by {stop.sigval.name}", 128 + stop.sigval))
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
        return Failure(f"{others.failure.sentence}, and with it the ranks of {here}", others.failure.code)
    except RendezvousClosedError:
        return Failure(f"the training that met at {order.endpoint} is over, without {here}", 1)
    except (RuntimeError, RendezvousConnectionError) as error:
        if agent.peers is None:  # they never met
            raise
        first = str(error).strip().partition("\n")[0]
        return Failure(f"{here} lost the machine at {order.endpoint}, where all meet ({first})", 1)
    if result is None:
        return Failure(f"the training that met at {order.endpoint} needed no more machines than it had", 1)
    if not result.is_failed():
        return None
    failure = _first(result.failures)
    agent.tell_others(failure)
    return failure


def _first(failures: Mapping[int, ProcessFailure]) -> Failure:
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    code = failure.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    return Failure(f"rank {rank} on {socket.gethostname()} {how}", processes.exit_code(code) or 1)


def _meeting(order: Order) -> RendezvousParameters:
    if order.backend != "static" and order.most_machines > 1:
        # torch 2.13's agents keep the first round's address to themselves, and one that comes back asks in vain.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    static = {"rank": order.machine, "timeout": 600} if order.backend == "static" else {}
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
    host, _, port = order.endpoint.rpartition(":")
    static = {"master_addr": host.strip("[]"), "master_port": int(port)} if order.backend == "static" else {}
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
    return rendezvous.address_towards(order.endpoint.rpartition(":")[0].strip("[]"))
