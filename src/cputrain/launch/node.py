"""The ranks of one machine, run by torchrun's agent, and the program that ssh starts on other machines:

its order is the first line of standard input, as JSON: ranks to run, or the ranks of an mpirun to watch. The end or the
silence of standard input ends them.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cputrain import __version__, blame, settings
from cputrain.keep_alive import LAST_WORDS_SECONDS
from cputrain.launch import import_path, liveness, output, processes, rendezvous, roll_call, ssh
from cputrain.launch.hostfile import Machine
from cputrain.launch.ssh import Session


@dataclass(frozen=True)
class Order:
    """What a machine is to run. `backend` is torchrun's rendezvous: static, or c10d, where nodes number themselves.

    Training starts with `machines` of them, and more may join while it runs, up to `most` if that is set.
    """

    program: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    processes: int
    machines: int = 1
    most: int | None = None
    machine: int = 0
    backend: str = "c10d"
    endpoint: str = f"{rendezvous.LOCAL}:0"
    run_id: str = "none"
    meeting: Mapping[str, Any] = field(default_factory=dict)  # the rendezvous' own settings: timeouts
    max_restarts: int = 0
    log_dir: str | None = None
    bars: bool = False
    in_pod: bool = False  # of an operator, which reads the exit code
    version: str = __version__

    @property
    def most_machines(self) -> int:
        return self.most or self.machines

    @property
    def is_fixed(self) -> bool:
        return self.most_machines == self.machines

    @property
    def meeting_words(self) -> str:
        """How the machines meet, in words."""
        often = f"; all ranks start anew up to {self.max_restarts} times" if self.max_restarts else ""
        if self.most_machines == 1:
            return f"on this machine alone{often}"
        number = str(self.machines) if self.is_fixed else f"{self.machines} to {self.most_machines}"
        settings = "".join(f", {name}={value}" for name, value in self.meeting.items())
        return f"{number} machines, {self.backend} at {self.endpoint}{settings}{often}"


def run(order: Order) -> int:
    """Starts the ranks and waits for those of all machines; the exit code is the one of the rank that failed first.

    If none failed, it may say that output was lost.
    """
    if order.backend == "static" and order.machines > 1:
        roll_call.hold(order.endpoint, order.machine, order.machines, {**os.environ, **order.environment})
    _quiet_agent()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from cputrain.launch import agent

    processes.adopt_orphans()
    os.environ.update(order.environment)
    os.environ["CPUTRAIN_PARENT"] = str(os.getpid())
    os.chdir(order.folder)
    printed = output.Output(order.log_dir, order.bars)
    os.environ[blame.FOLDER] = tempfile.mkdtemp(prefix="cputrain-blame-")
    try:
        failure = agent.train(order, _logs(printed), rank_arguments(order.program))
    except SignalException as error:
        return 128 + int(error.sigval)
    except (DistError, RendezvousError, TimeoutError) as error:
        if not order.in_pod:
            raise ValueError(_no_meeting(order, error)) from None
        failure = processes.Failure(_no_meeting(order, error), 2, from_outside=True)
    finally:
        processes.end_descendants()
        printed.close()
        shutil.rmtree(os.environ.pop(blame.FOLDER), ignore_errors=True)
    if failure is None:
        return output.exit_code(0)
    where = f"; its output is in {order.log_dir}" if order.log_dir else ""
    print(f"cputrain: {failure.sentence.rstrip('.')}{where}.", file=sys.stderr)
    return failure.code_of_pod if order.in_pod else failure.code


def rank_arguments(program: tuple[str, ...]) -> list[str]:
    """After the interpreter. Unbuffered: what a rank printed before it died must be seen."""
    return ["-u", import_path.program("__main__.py"), "run", *program]


def _no_meeting(order: Order, error: Exception) -> str:
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return f"the port of {order.endpoint} is in use on {socket.gethostname()}: choose another --main_process_port."
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{order.machines} machines could not meet at {order.endpoint}: {first}"


def _quiet_agent() -> None:
    """We say ourselves, in a sentence, what the agent would say in a table; LOGLEVEL asks for torch's own words.

    Its loggers have levels of their own, so what they say is stopped on its way up. Ranks keep their own level.
    """
    if not os.environ.get("LOGLEVEL"):
        agents = logging.getLogger("torch.distributed.elastic")
        agents.addHandler(logging.NullHandler())
        agents.propagate = False
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = before or "ERROR"  # read once, when torch is imported
    importlib.import_module("torch")
    if before is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]


def _logs(printed: output.Output) -> Any:
    """The agent opens these paths as the ranks' standard streams."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class Pipes(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            rank_of = {local: int(environ["RANK"]) for local, environ in envs.items()}
            return LogsDest(
                stdouts={local: printed.pipe(rank, sys.stdout.buffer) for local, rank in rank_of.items()},
                stderrs={local: printed.pipe(rank, sys.stderr.buffer) for local, rank in rank_of.items()},
                error_files=dict.fromkeys(envs, os.devnull),
            )

        @property
        def root_log_dir(self) -> str:
            return ""

    return Pipes()


def run_on(machines: list[Machine], order: Order) -> int:
    """Starts all machines, waits, and ends all as soon as one fails."""
    sessions = []
    for number, machine in enumerate(machines):
        its_order = replace(order, processes=machine.processes, machines=len(machines), machine=number)
        sessions.append(Session(machine.name, json.dumps(asdict(its_order))))
    processes.adopt_orphans()
    with processes.sigterm_interrupts():
        try:
            for session in sessions:
                session.start()
            with liveness.beating(sessions):
                return _wait(sessions)
        except KeyboardInterrupt as interrupt:
            return processes.interrupted_code(interrupt)
        finally:
            ssh.end(sessions)


def _wait(sessions: list[Session]) -> int:
    def codes() -> list[int | None]:
        return [session.process.poll() for session in sessions]

    while True:
        found = codes()
        for session, code in zip(sessions, found, strict=True):
            if code and code != output.LOST:
                print(f"cputrain: {session.ending(code)}; all machines are ended.", file=sys.stderr)
                if session.is_lost():
                    # The other machines end by themselves when their ranks have noticed, too, and named the rank that
                    # is gone. Their agents give the ranks as long, and need a moment then.
                    processes.wait_until(lambda: None not in codes(), LAST_WORDS_SECONDS + 1.0)
                return session.exit_code(code)
        if None not in found:
            for session in sessions:
                session.read_to_end()
            return output.exit_code(max(filter(None, found), default=0))
        time.sleep(0.1)


def main() -> None:
    import_path.leave_out_first()
    output.take_over()
    try:
        code = _obey(json.loads(sys.stdin.readline()))
    except ValueError as error:
        print(f"cputrain: {error}", file=sys.stderr, flush=True)
        code = 2
    os._exit(code)  # not held up by the thread that still reads


def _obey(told: dict[str, Any]) -> int:
    """Another version may have other fields: the versions are compared first."""
    roll_call.check_version(told.get("version"))
    if "mark" in told:
        liveness.watch(told["mark"])
        return 0
    order = Order(**{**told, "program": tuple(told["program"])})
    threading.Thread(target=liveness.listen, args=(0, _end), daemon=True).start()
    return run(order)


def _end() -> None:
    """Properly, unless that takes too long: the reader of what is still to be said may be gone."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(settings.grace(1))
    processes.end_descendants()
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
