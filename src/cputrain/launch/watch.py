"""What `launch` leaves on each other machine of an mpirun: it ends all that is left of the job there.

mpirun's own proxies wait for ever for an mpirun whose machine is gone. Started by ssh: the first line of standard input
is JSON, with the mark by which the job's processes are known; the end or silence of it is the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time

import psutil

from cputrain import __version__
from cputrain.launch import import_path, line, processes
from cputrain.launch.line import Line

# Of mpiruns, which start the ranks and stay beside them.
PROXIES = ("hydra_pmi_proxy", "orted", "prted")
_COMMAND = (sys.executable, import_path.program("launch", "watch.py"))
_READY = b"ready\n"
_LOOK_SECONDS = 20.0


def over(machines: list[str], mark: str) -> list[Line]:
    """Starts a watch on each, side by side; a ValueError says which machines can't be reached, and why."""
    words = json.dumps({"mark": mark, "version": __version__})
    lines = [Line(name, line.login(name, _COMMAND), words) for name in machines]
    for one in lines:
        one.start(answers=True)
    problems = [one.ending(one.process.wait()) for one in lines if _answer(one) != _READY]
    if problems:
        line.end(lines)
        raise ValueError("; ".join(problems) + ".")
    return lines


def _answer(one: Line) -> bytes:
    assert one.process.stdout
    return one.process.stdout.readline()


# --- On the other machine ----------------------------------------------------------------------------------------


class _Job:
    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._proxies: set[psutil.Process] = set()
        self._next_look = 0.0

    def look(self) -> None:
        """Remembers the proxies: when their ranks have ended, nothing tells whose they were."""
        if time.monotonic() < self._next_look:
            return
        for pid in processes.marked(processes.JOB, self._mark):
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(pid).parent()
                if parent and parent.name() in PROXIES and parent.uids().real == os.getuid():
                    self._proxies.add(parent)
        if self._proxies:
            self._next_look = time.monotonic() + _LOOK_SECONDS

    def end(self) -> None:
        for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 0.0)):
            limit = time.monotonic() + seconds
            for pid in self._living():
                processes.send(pid, number)
            while self._living() and time.monotonic() < limit:
                time.sleep(0.1)

    def _living(self) -> list[int]:
        proxies = [proxy.pid for proxy in self._proxies if proxy.is_running()]
        return [*processes.marked(processes.JOB, self._mark), *proxies]


def main() -> None:
    import_path.leave_out_first()
    from cputrain.launch.node import check_version

    order = json.loads(sys.stdin.readline())
    try:
        check_version(order["version"])
    except ValueError as error:
        print(f"cputrain: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    job = _Job(order["mark"])
    sys.stdout.buffer.write(_READY)
    sys.stdout.flush()
    line.listen(0, job.end, heard=job.look)


if __name__ == "__main__":
    main()
