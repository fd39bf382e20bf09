"""Pods without Kubernetes: a manifest's containers as processes, each on a machine made of namespaces.

What the operator, the kubelet and the container runtime do is done here: variables, `$(NAME)`, mounts, user,
capabilities and CPU quota are the manifest's; only the image is missing: this machine's files stand in. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from cluster import kubelet

ROOT = Path(__file__).parents[2]
CGROUP = Path("/sys/fs/cgroup/cpu")

# Process 1 of a pod. $1: its name, $2: its hosts file, $3: folders to keep, $4: commands that make the mounts,
# $5: cpu.max, if the pod shall see cgroup v2.
_INIT = r"""
set -e
mount --make-rprivate /
mount -t proc proc /proc
hostname "$1"
ip link set lo up
mount -t tmpfs tmpfs /mnt
number=0
while read -r folder; do
  number=$((number + 1)); mkdir /mnt/$number; mount --bind "$folder" /mnt/$number
done <<<"$3"
for folder in /tmp /root /home /opt /srv /run /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
number=0
while read -r folder; do
  number=$((number + 1)); mkdir -p "$folder"; mount --bind /mnt/$number "$folder"
done <<<"$3"
mkdir /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc
cat "$2" >/etc/hosts
grep -v :1000: /etc/passwd >/mnt/passwd || :
echo job:x:1000:1000::/home/job:/bin/bash >>/mnt/passwd
cat /mnt/passwd >/etc/passwd
eval "$4"
if [ -n "$5" ]; then
  # The kernel's list of mounts says cgroup2; what stands there is made, where the controllers are bound to v1.
  umount -R /sys/fs/cgroup
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
  mount -t tmpfs tmpfs /sys/fs/cgroup
  echo "$5" >/sys/fs/cgroup/cpu.max
fi
echo ready
while :; do wait; sleep 0.2; done
"""


class Pod:
    """A machine for one container of a manifest."""

    def __init__(self, name: str, address: str, starter: subprocess.Popen[str], container: dict[str, Any]) -> None:
        self.name, self.address, self.container, self.starter = name, address, container, starter
        assert starter.stdout and starter.stdout.readline() == "ready\n", f"{name} did not start"
        (child,) = psutil.Process(starter.pid).children()
        self.pid = child.pid
        self.processes: list[subprocess.Popen[str]] = []
        self.quota = _quota(container)

    def start(self, environment: Mapping[str, str], programs: Path, log: Path) -> subprocess.Popen[str]:
        """Runs the container's command as its user, without any capability."""
        words = kubelet.command(self.container, environment)
        # The runtime starts it in the pod's cgroup, before it becomes the user that the manifest says.
        enter = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--"]
        user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        line = f"echo $$ >{shlex.quote(str(self.quota / 'tasks'))}; exec {shlex.join([*enter, *user, *words])}"
        environ = {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin", "LANG": "C.UTF-8", **environment}
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", line], env=environ, stdout=out, stderr=out, stdin=subprocess.DEVNULL, text=True, cwd="/"
            )
        self.processes.append(process)
        return process

    def kill(self) -> None:
        """All processes of the container at once, as when it runs out of memory; the pod stays."""
        for number in (self.quota / "tasks").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)

    def end(self) -> None:
        self.starter.kill()
        self.starter.wait()
        for process in self.processes:
            process.wait()
        limit = time.monotonic() + 10
        while (self.quota / "tasks").read_text() and time.monotonic() < limit:
            time.sleep(0.05)  # until the kernel has ended the namespace's processes
        self.quota.rmdir()


def _quota(container: dict[str, Any]) -> Path:
    folder = CGROUP / f"cputrain-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000")
    (folder / "cpu.cfs_quota_us").write_text(str(_microseconds(container)))
    return folder


def _microseconds(container: dict[str, Any]) -> int:
    """The limit as the kubelet writes it, of a period of 100,000."""
    return int(container["resources"]["limits"]["cpu"]) * 100_000


class Pods:
    """All pods of a job behind one switch; `names` of each are what the cluster's DNS would answer."""

    def __init__(self, folder: Path, cgroup: int = 1) -> None:
        self.folder = folder
        self.cgroup = cgroup
        self.volume = folder / "volume"
        self.programs = folder / "programs"
        self._starters: list[subprocess.Popen[str]] = []
        self.pods: list[Pod] = []

    def __enter__(self) -> Pods:
        self.volume.mkdir()
        os.chown(self.volume, 0, 1000)  # as fsGroup does
        self.volume.chmod(0o2775)
        self.programs.mkdir()
        for name, words in (
            ("cputrain", f"{sys.executable} -m cputrain"),
            ("torchrun", f"{sys.executable} -m torch.distributed.run"),
            ("python3", sys.executable),
        ):
            (self.programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (self.programs / name).chmod(0o755)
        self.folder.chmod(0o755)  # pytest keeps it to root, and pods run as another user
        script = "ip link add br0 type bridge && ip link set br0 up && echo ready && sleep inf"
        words = ["unshare", "--net", "bash", "-c", script]
        self._switch = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert self._switch.stdout and self._switch.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        for pod in self.pods:
            pod.end()
        self._switch.kill()
        self._switch.wait()

    def add(self, names: Mapping[str, list[str]], name: str, template: dict[str, Any], container: dict[str, Any],
            files: Mapping[str, Mapping[str, str]]) -> Pod:  # fmt: skip
        """One pod. `names`: DNS names of every pod; `files`: folders that the operator mounts, with their files."""
        number = len(self.pods) + 1
        addresses = {other: f"10.78.0.{index}" for index, other in enumerate(names, 1)}
        hosts = self.folder / f"hosts-{number}"
        rows = [f"{addresses[other]} {' '.join([other, *more])}" for other, more in names.items()]
        hosts.write_text("127.0.0.1 localhost\n" + "\n".join(rows) + "\n")
        kinds = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        arguments = [name, str(hosts), "\n".join(self._kept()), self._mounts(number, template, container, files)]
        arguments += [f"{_microseconds(container)} 100000"] if self.cgroup == 2 else [""]
        words = ["unshare", *kinds, "bash", "-c", _INIT, "bash", *arguments]
        starter = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        pod = Pod(name, addresses[name], starter, container)
        self.pods.append(pod)
        peer = ["type", "veth", "peer", "name", f"port{number}", "netns", str(self._switch.pid)]
        _ip("link", "add", "eth0", "netns", str(pod.pid), *peer)
        _ip("link", "set", f"port{number}", "master", "br0", "up", inside=self._switch.pid)
        _ip("addr", "add", f"{pod.address}/24", "dev", "eth0", inside=pod.pid)
        _ip("link", "set", "eth0", "up", inside=pod.pid)
        return pod

    def _kept(self) -> list[str]:
        """What stands in for the image, where the pod's own folders would hide it."""
        wanted = {ROOT, Path(sys.prefix), Path(sys.base_prefix), self.folder}
        return sorted({str(path) for path in wanted if path.parts[1] in ("tmp", "root", "home", "opt", "srv")})

    def _mounts(self, number: int, template: dict[str, Any], container: dict[str, Any],
                files: Mapping[str, Mapping[str, str]]) -> str:  # fmt: skip
        """The manifest's volumes as commands: claims and maps are folders, empty ones memory."""
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        lines = []
        for mount in container["volumeMounts"]:
            volume, path = volumes[mount["name"]], shlex.quote(mount["mountPath"])
            lines.append(f"mkdir -p {path}")
            if "emptyDir" in volume:
                lines.append(f"mount -t tmpfs -o mode=2775,gid=1000 tmpfs {path}")
            elif "persistentVolumeClaim" in volume:
                lines.append(f"mount --bind {shlex.quote(str(self.volume))} {path}")
            else:
                folder = self.folder / f"map-{number}"
                shutil.copytree(self.folder / volume["configMap"]["name"], folder)
                lines.append(f"mount --bind -o ro {shlex.quote(str(folder))} {path}")
        for place, contents in files.items():
            folder = self.folder / f"{place.strip('/').replace('/', '-')}-{number}"
            folder.mkdir()
            for name, text in contents.items():
                (folder / name).write_text(text)
            lines += [f"mkdir -p {place}", f"mount --bind -o ro {shlex.quote(str(folder))} {place}"]
        return "\n".join(lines)


def _ip(*words: str, inside: int | None = None) -> None:
    enter = ["nsenter", "-t", str(inside), "-n"] if inside else []
    subprocess.run([*enter, "ip", *words], check=True)
