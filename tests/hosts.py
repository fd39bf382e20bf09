"""Machines made of namespaces: each with its own network address, name, processes, shared memory, /tmp and sshd.

    with Cluster(2, shared=[folder]) as cluster:
        cluster.hosts[0].run(sys.executable, "-m", "cputrain", "launch", …)

Network namespaces alone would share /dev/shm, process numbers and the host name, and nothing that crosses machines
would be tested. Needs root, iproute2 and openssh-server; everything is gone when the context ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
needs_hosts = [
    pytest.mark.needs_program("sshd", "openssh-server"),
    pytest.mark.needs_program("ip", "iproute2"),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of machines need root"),
]

# Runs as process 1 of a machine. $1: its name, $2: its folder (keys, hosts), the rest: folders that all machines see.
_INIT = r"""
set -e
name=$1; place=$2; shift 2
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"
ip link set lo up
mount -t tmpfs tmpfs /mnt
number=0
for folder in "$place" "$@"; do
  number=$((number + 1)); mkdir /mnt/$number; mount --bind "$folder" /mnt/$number
done
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs tmpfs /run
number=0
for folder in "$place" "$@"; do
  number=$((number + 1)); mkdir -p "$folder"; mount --bind /mnt/$number "$folder"
done
umount -R -l /mnt
mkdir -p /run/sshd /root/.ssh
mount -t tmpfs -o mode=700 tmpfs /root/.ssh
cp "$place/client_key" /root/.ssh/id_ed25519
cp "$place/known_hosts" /root/.ssh/known_hosts
chmod 600 /root/.ssh/*
mount --bind "$place/hosts_$name" /etc/hosts
/usr/sbin/sshd -D -e -f /dev/null -h "$place/key_$name" -o PidFile=none -o UsePAM=no -o StrictModes=no \
  -o PermitRootLogin=yes -o MaxStartups=100 -o AuthorizedKeysFile="$place/client_key.pub" 2>/tmp/sshd.log &
echo ready
while :; do wait; sleep 0.2; done
"""


class Host:
    """One machine, by the process that is number 1 in it."""

    def __init__(self, name: str, address: str, starter: subprocess.Popen[str]) -> None:
        self.name, self.address, self._starter = name, address, starter
        assert starter.stdout and starter.stdout.readline() == "ready\n", f"{name} did not start"
        (child,) = psutil.Process(starter.pid).children()
        self.pid = child.pid

    def words(self, *command: str | Path) -> list[str]:
        """A command that runs on this machine, from outside."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--", *map(str, command)]

    def popen(self, *command: str | Path, environ: dict[str, str] | None = None, **options) -> subprocess.Popen[str]:
        clean = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", **(environ or {})}
        words = self.words("env", "-C", str(options.pop("folder", ROOT)), *command)
        return subprocess.Popen(
            words,
            env=clean,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *command: str | Path, seconds: float = 120, **options) -> subprocess.CompletedProcess[str]:
        process = self.popen(*command, **options)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def commands(self) -> list[str]:
        """What runs on this machine, beside what was there at its start."""
        return list(self._running().values())

    def end_all(self) -> None:
        """Kills what runs, but for what was there at its start."""
        for process in self._running():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _running(self) -> dict[psutil.Process, str]:
        """All of its process namespace: also what was started from outside."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                words = " ".join(process.cmdline())
                of_the_host = words.startswith(("sshd: /usr/sbin/sshd", "/usr/sbin/sshd", "sleep 0.2"))
                lives_here = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if words and lives_here and not of_the_host and process.pid != self.pid:
                    found[process] = words
        return found

    def is_quiet(self, seconds: float = 10) -> bool:
        """Whether nothing runs any more, soon."""
        limit = time.monotonic() + seconds
        while self.commands() and time.monotonic() < limit:
            time.sleep(0.1)
        return not self.commands()

    def kill(self) -> None:
        """As if its power failed."""
        self._starter.kill()
        self._starter.wait()


class Cluster:
    """Several machines behind one switch, which know each other's names and host keys."""

    def __init__(self, count: int, folder: Path, shared: Iterable[Path | str] = ()) -> None:
        self.names = [f"box{number}" for number in range(1, count + 1)]
        self._addresses = {name: f"10.77.0.{number}" for number, name in enumerate(self.names, 1)}
        self._folder = folder
        prefixes = {ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(ROOT / ".venv").resolve()}
        wanted = [Path(path) for path in (*prefixes, *shared)]
        # Only what the machines' own /tmp would hide.
        self._shared = sorted({str(path) for path in wanted if path.is_relative_to("/tmp") and path.exists()})
        self.hosts: list[Host] = []
        self._starters: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_keys()
        try:
            switch = self._start(
                "switch", "ip link add br0 type bridge && ip link set br0 up && echo ready && exec sleep inf"
            )
            assert switch.stdout and switch.stdout.readline() == "ready\n"
            for number, name in enumerate(self.names):
                self.hosts.append(Host(name, self._addresses[name], self._start(name, _INIT)))
                self._connect(switch.pid, number, self.hosts[-1])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for starter in reversed(self._starters):
            starter.kill()
            starter.wait()

    def _start(self, name: str, script: str) -> subprocess.Popen[str]:
        kinds = (
            ["--net"] if name == "switch" else ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        )
        # With this process, too, if it is killed and can't leave the context.
        words = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *kinds,
            "bash",
            "-c",
            script,
            "bash",
            name,
            str(self._folder),
            *self._shared,
        ]
        starter = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self._starters.append(starter)
        return starter

    def _connect(self, switch: int, number: int, host: Host) -> None:
        _ip(
            "link",
            "add",
            "eth0",
            "netns",
            str(host.pid),
            "type",
            "veth",
            "peer",
            "name",
            f"port{number}",
            "netns",
            str(switch),
        )
        _ip("link", "set", f"port{number}", "master", "br0", "up", inside=switch)
        _ip("addr", "add", f"{host.address}/24", "dev", "eth0", inside=host.pid)
        _ip("link", "set", "eth0", "up", inside=host.pid)

    def check_quiet(self) -> None:
        """After a test: nothing runs on any machine, or lies in its shared memory; what does is ended."""
        for host in self.hosts:
            quiet, left = host.is_quiet(), host.commands()
            host.end_all()  # the next test begins with nothing
            assert quiet, left
            assert host.run("ls", "/dev/shm").stdout == ""

    def take_down(self, host: Host) -> None:
        """Pulls the plug of its network."""
        _ip("link", "set", "eth0", "down", inside=host.pid)

    def bring_up(self, host: Host) -> None:
        _ip("link", "set", "eth0", "up", inside=host.pid)

    def _write_keys(self) -> None:
        known = []
        for name in (*(f"key_{name}" for name in self.names), "client_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        for name in self.names:
            kind, key = (self._folder / f"key_{name}.pub").read_text().split()[:2]
            known.append(f"{name},{self._addresses[name]} {kind} {key}\n")
            # As Debian does it: a machine's own name is a loopback address, which would mislead other machines.
            others = [f"{address} {other}\n" for other, address in self._addresses.items() if other != name]
            text = "".join([f"127.0.0.1 localhost\n127.0.1.1 {name}\n", *others])
            (self._folder / f"hosts_{name}").write_text(text)
        (self._folder / "known_hosts").write_text("".join(known))


def _ip(*words: str, inside: int | None = None) -> None:
    enter = ["nsenter", "-t", str(inside), "-n"] if inside else []
    subprocess.run([*enter, "ip", *words], check=True)
