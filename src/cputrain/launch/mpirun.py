"""Runs an mpirun: its exit code is passed on, and everything ends with us."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cputrain.launch import mpi, processes
from cputrain.launch.hostfile import Machine


def run(
    found: mpi.Mpi, machines: list[Machine], environment: Mapping[str, str], folder: str, program: list[str]
) -> int:
    """The exit code is mpirun's, which is the one of the rank that failed. Ranks label their output themselves."""
    with tempfile.TemporaryDirectory(prefix="cputrain-") as place:
        hostfile = Path(place) / "hosts"
        hostfile.write_text(mpi.hosts_text(found, machines))
        words = command(found, machines, str(hostfile), environment, folder, program)
        variables = {**os.environ, **environment}
        # MPICH 4.0 doesn't pass the last variable on to other machines; as from a shell, that is this one.
        variables.pop("_", None)
        return _supervised(words, {**variables, "_": words[0]})


def command(
    found: mpi.Mpi,
    machines: list[Machine],
    hostfile: str,
    environment: Mapping[str, str],
    folder: str,
    program: list[str],
) -> list[str]:
    """Without a hostfile where this machine is the only one: then mpirun needs no ssh."""
    size = sum(machine.processes for machine in machines)
    elsewhere = [machine for machine in machines if machine.name != "localhost"]
    return mpi.command(found, size, hostfile if elsewhere else None, environment, folder, program)


def _supervised(words: list[str], environ: dict[str, str]) -> int:
    processes.adopt_orphans()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    # Its own session: Ctrl-C reaches us alone, and mpirun gets one SIGTERM from us.
    process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return processes.exit_code(process.wait())
    except KeyboardInterrupt as interrupt:
        return 128 + (signal.SIGTERM if interrupt.args else signal.SIGINT)
    finally:
        _end(process)
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """mpirun ends its ranks, here and elsewhere, when it is asked to; what it leaves here is ended by us."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    processes.end_descendants()
