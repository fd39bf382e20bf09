"""Runs an mpirun: its exit code is passed on, and everything ends with us, or if a machine is lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from cputrain import text_files
from cputrain.keep_alive import LAST_WORDS_SECONDS
from cputrain.launch import line, mpi, processes, sinks, ssh, watch
from cputrain.launch.hostfile import Machine
from cputrain.launch.line import Line

# For what was printed last to be read.
_GRACE_SECONDS = 1.0
# An mpirun that is asked to end does so at once, unless it waits for a machine that is gone.
_END_SECONDS = 2.0


def run(
    found: mpi.Mpi, machines: list[Machine], environment: Mapping[str, str], folder: str, program: list[str]
) -> int:
    """The exit code is mpirun's, which is the one of the rank that failed. Ranks label their output themselves.

    If none failed, it may say that output was lost.
    """
    with tempfile.TemporaryDirectory(prefix="cputrain-") as place:
        hostfile = Path(place) / "hosts"
        text_files.write(hostfile, mpi.hosts_text(found, machines))
        words = command(found, machines, str(hostfile), environment, folder, program)
        variables = {**os.environ, **environment}
        # MPICH 4.0 doesn't pass the last variable on to other machines; as from a shell, that is this one.
        variables.pop("_", None)
        elsewhere = [machine.name for machine in machines if not ssh.is_here(machine.name)]
        lines = watch.over(elsewhere, environment[processes.JOB])
        try:
            return sinks.exit_code(_supervised(words, {**variables, "_": words[0]}, lines))
        finally:
            line.end(lines)


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


def _supervised(words: list[str], environ: dict[str, str], lines: list[Line]) -> int:
    processes.adopt_orphans()
    with processes.sigterm_interrupts():
        # Its own session: Ctrl-C reaches us alone, and mpirun gets one SIGTERM from us.
        # Through us: when its own output fails, Hydra ends the ranks, and Open MPI drops it without a word.
        process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout and process.stderr
        readers = [
            sinks.pass_on(process.stdout, sys.stdout.buffer),
            sinks.pass_on(process.stderr, sys.stderr.buffer),
        ]
        try:
            with line.beating(lines):
                return _wait(process, lines)
        except KeyboardInterrupt as interrupt:
            return processes.interrupted_code(interrupt)
        finally:
            _end(process)
            for reader in readers:
                reader.join(_GRACE_SECONDS)


def _wait(process: subprocess.Popen[bytes], lines: list[Line]) -> int:
    """mpirun waits for ever for a machine that is gone without a word: the lines to the machines tell."""
    watched = list(lines)
    while (code := process.poll()) is None:
        for one in watched:
            ended = one.process.poll()
            if ended is not None and _is_lost(one, ended):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_SECONDS)
                return 1
        watched = [one for one in watched if one.process.returncode is None]
        time.sleep(0.1)
    return processes.exit_code(code)


def _is_lost(one: Line, code: int) -> bool:
    """Says so. A watch that was ended from outside is no reason to end a training."""
    sentence = one.ending(code)
    lost = one.is_lost()
    what = "all machines are ended" if lost else "it is no longer watched"
    print(f"cputrain: {sentence}; {what}.", file=sys.stderr)
    return lost


def _end(process: subprocess.Popen[bytes]) -> None:
    """mpirun ends its ranks, here and elsewhere, when it is asked to; what it leaves here is ended by us."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    processes.end_descendants()
