"""Files of hosts in each dialect, and the dealing of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cputrain.launch import hostfile, mpi
from cputrain.launch.hostfile import Host, Machine

INTEL = mpi.Mpi("Intel", "2021.18", "/opt/bin/mpirun")
OPEN = mpi.Mpi("Open MPI", "4.1.4", "/usr/bin/mpirun")


def read(tmp_path: Path, text: str) -> list[Host]:
    path = tmp_path / "hosts"
    path.write_text(text)
    return hostfile.read(path)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1\nnode2\n", [Host("node1", None), Host("node2", None)]),
        ("# Intel\nnode1:4\n\n10.0.0.2:2  # two\n", [Host("node1", 4), Host("10.0.0.2", 2)]),
        ("node1 slots=4\nnode-2.lan slots = 2 max_slots=8", [Host("node1", 4), Host("node-2.lan", 2)]),
        ("a\nb\na\n", [Host("a", 2), Host("b", None)]),
        ("fe80::1\n[fd00::2]:3\n", [Host("fe80::1", None), Host("fd00::2", 3)]),
    ],
)
def test_dialects(tmp_path, text, hosts) -> None:
    assert read(tmp_path, text) == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ok\n-oProxyCommand=touch:1\n", r"line 2: '-oProxyCommand.*"),
        ("ok\nroot@node1\n", r"line 2: 'root@node1' is not a host name"),
        ("$(touch /tmp/x)\n", r"line 1: "),
        ("node1;reboot\n", r"line 1: 'node1;reboot' is not a host name or an address"),
        ("node1:many\n", r"line 1: 'node1:many': a whole number must stand after the colon"),
        ("node1 slots=two\n", r"line 1: 'slots=two' is not understood"),
        ("node1 slots=0\n", r"line 1: node1 has no slots"),
        ("# nobody\n", r"names no host"),
    ],
)
def test_wrong_lines_are_a_sentence_with_a_number(tmp_path, text, said) -> None:
    with pytest.raises(ValueError, match=said):
        read(tmp_path, text)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="the hostfile /nowhere can't be read: No such file"):
        hostfile.read("/nowhere")


@pytest.mark.parametrize(
    ("hosts", "processes", "ppn", "dealt"),
    [
        ([Host("a", None), Host("b", None)], 4, 2, [("a", 2, 0), ("b", 2, 2)]),
        ([Host("a", None), Host("b", None)], 4, None, [("a", 2, 0), ("b", 2, 2)]),
        ([Host("a", 3), Host("b", 1)], 4, None, [("a", 3, 0), ("b", 1, 3)]),
        ([Host("a", 3), Host("b", 1)], None, None, [("a", 3, 0), ("b", 1, 3)]),
        ([Host("a", None), Host("b", None)], None, None, [("a", 1, 0), ("b", 1, 1)]),
        ([Host("a", 4), Host("b", 4)], 4, None, [("a", 4, 0)]),
        ([Host("a", 4), Host("b", 4)], 4, 2, [("a", 2, 0), ("b", 2, 2)]),
    ],
)
def test_dealing(hosts, processes, ppn, dealt) -> None:
    assert hostfile.deal(hosts, processes, ppn) == [Machine(*one) for one in dealt]


@pytest.mark.parametrize(
    ("processes", "ppn", "said"),
    [(5, 2, "5 processes were asked for, but 2 hosts have room for 4"), (3, None, "can't be shared evenly by 2 hosts")],
)
def test_too_many(processes, ppn, said) -> None:
    with pytest.raises(ValueError, match=said):
        hostfile.deal([Host("a", None), Host("b", None)], processes, ppn)


# --- Each MPI's command ------------------------------------------------------------------------------------------

MACHINES = [Machine("a", 2, 0), Machine("b", 1, 2)]
SECRETS = {"HF_TOKEN": "hush", "OMP_NUM_THREADS": "3"}


def test_intel(tmp_path) -> None:
    words = mpi.command(INTEL, MACHINES, "/h", SECRETS, "/work", ["python", "x.py"])
    assert words == [
        "/opt/bin/mpirun", "-bootstrap", "ssh", "-machinefile", "/h", "-n", "3", "-wdir", "/work",
        "-genvlist", "HF_TOKEN,OMP_NUM_THREADS", "python", "x.py",
    ]  # fmt: skip
    assert mpi.hosts_text(INTEL, MACHINES) == "a:2\nb:1\n"
    assert INTEL.environment["I_MPI_ROOT"] == "/opt" and INTEL.environment["I_MPI_PIN"] == "0"


def test_open_mpi() -> None:
    words = mpi.command(OPEN, MACHINES, "/h", SECRETS, "/work", ["python", "x.py"])
    start = [word for word in words if word != "--allow-run-as-root"]
    assert start == [
        "/usr/bin/mpirun", "-np", "3", "--hostfile", "/h", "--map-by", "seq", "--wdir", "/work",
        "-x", "HF_TOKEN", "-x", "OMP_NUM_THREADS", "python", "x.py",
    ]  # fmt: skip
    assert mpi.hosts_text(OPEN, MACHINES) == "a\na\nb\n"


@pytest.mark.parametrize("kind", ["Intel", "MPICH", "Open MPI"])
def test_values_never_stand_on_the_command_line(kind) -> None:
    alone = [Machine("localhost", 2, 0)]
    assert "hush" not in " ".join(mpi.command(mpi.Mpi(kind, "1", "/m"), alone, "/h", SECRETS, "/", ["x"]))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20251105", "Intel"),
        ("HYDRA build details:\\n    Version:      4.0.2", "MPICH"),
        ("mpirun (Open MPI) 4.1.4", "Open MPI"),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "Open MPI"),
        ("something else", None),
    ],
)
def test_an_mpi_is_known_by_its_own_words(said, kind, tmp_path) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n".replace("(", "\\(").replace("\\(", "("))
    program.chmod(0o755)
    found = mpi.identify(str(program))
    assert (found.kind if found else None) == kind
