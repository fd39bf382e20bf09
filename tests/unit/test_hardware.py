"""Machines that we don't have, as trees of files: each fact must be right, and say where it came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain import hardware, settings

GIB = 1 << 30
ZEN3 = "fpu sse4_1 sse4_2 avx f16c fma avx2 vaes"
EMERALD_RAPIDS = (
    f"{ZEN3} avx512f avx512dq avx512bw avx512vl avx512cd avx512_vnni avx512_bf16 avx_vnni amx_bf16 amx_tile"
)


class FakeMachine:
    """A root folder with the files of a machine; each method adds some."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def cpuinfo(self, cpus: int, flags: str, vendor: str = "AuthenticAMD", model: str = "EPYC 7763", extra="") -> None:
        block = "processor\t: {}\nvendor_id\t: {}\nmodel name\t: {}\nflags\t\t: {}\n{}"
        self.write("/proc/cpuinfo", "\n".join(block.format(cpu, vendor, model, flags, extra) for cpu in range(cpus)))

    def topology(self, sockets: int, cores_per_socket: int, smt: int = 1) -> None:
        """CPUs numbered as Linux does: first each core's first thread, then the siblings. A NUMA node per socket."""
        cores = sockets * cores_per_socket
        self.write("/sys/devices/system/cpu/online", f"0-{cores * smt - 1}")
        for cpu in range(cores * smt):
            folder = f"/sys/devices/system/cpu/cpu{cpu}"
            siblings = ",".join(str(cpu % cores + cores * thread) for thread in range(smt))
            self.write(f"{folder}/topology/core_cpus_list", siblings)
            self.write(f"{folder}/topology/physical_package_id", cpu % cores // cores_per_socket)
            self._caches(
                f"{folder}/cache", siblings, self._socket_cpus(cpu % cores // cores_per_socket, sockets, cores, smt)
            )
        for socket in range(sockets):
            node = f"/sys/devices/system/node/node{socket}"
            self.write(f"{node}/cpulist", self._socket_cpus(socket, sockets, cores, smt))
            self.write(f"{node}/meminfo", f"Node {socket} MemTotal:       {64 * 1024 * 1024} kB")

    def _socket_cpus(self, socket: int, sockets: int, cores: int, smt: int) -> str:
        each = cores // sockets
        starts = [socket * each + cores * thread for thread in range(smt)]
        return ",".join(f"{start}-{start + each - 1}" for start in starts)

    def _caches(self, folder: str, siblings: str, socket_cpus: str) -> None:
        levels = [(1, "Data", "48K", siblings), (1, "Instruction", "32K", siblings), (3, "Unified", "32M", socket_cpus)]
        for index, (level, kind, size, shared) in enumerate(levels):
            for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
                self.write(f"{folder}/index{index}/{name}", value)

    def process(self, affinity: str, cgroup: str = "0::/", mounts: tuple[str, ...] = ()) -> None:
        self.write("/proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{affinity}")
        self.write("/proc/self/cgroup", cgroup)
        self.write("/proc/self/mountinfo", "\n".join(("22 1 8:1 / / rw - ext4 /dev/sda rw", *mounts)))

    def read(self) -> hardware.Hardware:
        return hardware.detect(self.root)


V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def v1(controllers: str, root: str = "/", where: str | None = None) -> str:
    where = where or f"/sys/fs/cgroup/{controllers}"
    return f"32 31 0:29 {root} {where} rw,relatime shared:10 - cgroup cgroup rw,{controllers}"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """Eight cores without SMT, one socket, no limits."""
    fake = FakeMachine(tmp_path)
    fake.cpuinfo(8, ZEN3)
    fake.topology(sockets=1, cores_per_socket=8)
    fake.process("0-7", mounts=(V2,))
    fake.write("/proc/meminfo", f"MemTotal:       {64 * 1024 * 1024} kB\nMemFree: 1 kB")
    return fake


# --- The CPU -----------------------------------------------------------------------------------------------------


def test_amd_without_smt(machine: FakeMachine) -> None:
    found = machine.read()
    assert found.vendor == hardware.Fact("AuthenticAMD", "/proc/cpuinfo: vendor_id")
    assert found.model.value == "EPYC 7763"
    assert found.instruction_sets.value == ("sse4_1", "sse4_2", "avx", "f16c", "fma", "avx2")
    assert len(found.cores.value) == 8
    assert found.threads_per_core == 1
    assert found.sockets.value == (tuple(range(8)),)
    assert found.memory_total.value == 64 * GIB
    assert found.usable_cores.value == 8


def test_intel_with_two_sockets_and_smt(machine: FakeMachine) -> None:
    machine.cpuinfo(16, EMERALD_RAPIDS, "GenuineIntel", "Xeon")
    machine.topology(sockets=2, cores_per_socket=4, smt=2)
    machine.process("0-15", mounts=(V2,))
    found = machine.read()
    assert found.cores.value[0] == (0, 8)
    assert len(found.cores.value) == 8
    assert found.threads_per_core == 2
    assert found.sockets.value == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert [(node.cpus, node.memory) for node in found.numa_nodes.value] == [
        ((0, 1, 2, 3, 8, 9, 10, 11), 64 * GIB),
        ((4, 5, 6, 7, 12, 13, 14, 15), 64 * GIB),
    ]
    assert {"avx512_bf16", "avx_vnni", "amx_bf16", "amx_tile"} <= set(found.instruction_sets.value)
    assert found.usable_cores.value == 8, "two threads of one core are one core"


def test_caches_are_counted_once_however_many_cpus_share_them(machine: FakeMachine) -> None:
    machine.topology(sockets=2, cores_per_socket=2, smt=2)
    assert machine.read().caches.value == (
        hardware.Cache(1, "data", 48 << 10, 4),
        hardware.Cache(1, "instruction", 32 << 10, 4),
        hardware.Cache(3, "unified", 32 << 20, 2),
    )


def test_only_what_every_cpu_has_counts(machine: FakeMachine) -> None:
    machine.cpuinfo(1, EMERALD_RAPIDS)
    first = (machine.root / "proc/cpuinfo").read_text()
    machine.write("/proc/cpuinfo", f"{first}\nprocessor\t: 1\nflags\t\t: {ZEN3}")
    assert "avx512f" not in machine.read().instruction_sets.value
    assert "avx2" in machine.read().instruction_sets.value


def test_arm_names_its_features_otherwise(machine: FakeMachine) -> None:
    machine.write("/proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve bf16\nCPU implementer\t: 0x41")
    found = machine.read()
    assert found.vendor == hardware.Fact("0x41", "/proc/cpuinfo: CPU implementer")
    assert found.instruction_sets.value == ("asimd", "bf16", "sve")
    assert hardware.best_isa(found, {})[0] == "portable"


def test_an_older_kernel_calls_the_siblings_otherwise(machine: FakeMachine) -> None:
    machine.topology(sockets=1, cores_per_socket=4, smt=2)
    for cpu in range(8):
        folder = machine.root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        (folder / "core_cpus_list").rename(folder / "thread_siblings_list")
    found = machine.read().cores
    assert found.value == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found.source.endswith("thread_siblings_list")


def test_memory_only_nodes_are_left_out(machine: FakeMachine) -> None:
    machine.write("/sys/devices/system/node/node1/cpulist", "")
    assert [node.number for node in machine.read().numa_nodes.value] == [0]


# --- What may be used --------------------------------------------------------------------------------------------


def test_affinity_decides(machine: FakeMachine) -> None:
    machine.process("1,4-5", mounts=(V2,))
    found = machine.read()
    assert found.affinity.value == found.usable_cpus.value == (1, 4, 5)
    assert found.usable_cores.value == 3
    assert "affinity" in found.usable_cores.source


def test_a_mask_may_name_cpus_that_are_not_there(machine: FakeMachine) -> None:
    machine.process("0-63", mounts=(V2,))
    assert machine.read().affinity.value == tuple(range(8))


def test_affinity_to_both_threads_of_a_core_is_one_core(machine: FakeMachine) -> None:
    machine.topology(sockets=1, cores_per_socket=4, smt=2)
    machine.process("2,6", mounts=(V2,))
    assert machine.read().usable_cores.value == 1


@pytest.mark.parametrize(
    ("text", "quota", "cores"),
    [("max 100000", None, 8), ("300000 100000", 3.0, 3), ("150000 100000", 1.5, 1), ("20000 100000", 0.2, 1)],
)
def test_v2_quota(machine: FakeMachine, text: str, quota: float | None, cores: int) -> None:
    machine.write("/sys/fs/cgroup/cpu.max", text)
    found = machine.read()
    assert found.cpu_quota.value == quota
    assert found.usable_cores.value == cores
    assert ("quota" in found.usable_cores.source) == (quota is not None)


def test_nested_v2_groups_the_least_wins_wherever_it_is(machine: FakeMachine) -> None:
    machine.process("0-7", cgroup="0::/kubepods/pod1/main", mounts=(V2,))
    for folder, quota, memory in [
        ("kubepods", "600000 100000", 2 * GIB),
        ("kubepods/pod1", "200000 100000", "max"),
        ("kubepods/pod1/main", "300000 100000", 3 * GIB),
        ("kubepods/pod2", "100000 100000", 1 * GIB),
    ]:
        machine.write(f"/sys/fs/cgroup/{folder}/cpu.max", quota)
        machine.write(f"/sys/fs/cgroup/{folder}/memory.max", memory)
    found = machine.read()
    assert found.cpu_quota == hardware.Fact(2.0, "/sys/fs/cgroup/kubepods/pod1/cpu.max")
    assert found.memory_limit == hardware.Fact(2 * GIB, "/sys/fs/cgroup/kubepods/memory.max")
    assert found.usable_memory == found.memory_limit
    assert found.usable_cores.value == 2


def test_a_limit_above_the_memory_limits_nothing(machine: FakeMachine) -> None:
    machine.write("/sys/fs/cgroup/memory.max", 100 * GIB)
    found = machine.read()
    assert found.memory_limit.value == 100 * GIB
    assert found.usable_memory == found.memory_total


def test_v1_quota_memory_and_cpuset(machine: FakeMachine) -> None:
    machine.process(
        "0-3",
        cgroup="5:memory:/box\n4:cpuset:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/",
        mounts=(v1("cpu,cpuacct"), v1("memory"), v1("cpuset")),
    )
    machine.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    machine.write("/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", 125_000)
    machine.write("/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", 50_000)
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    machine.write("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", GIB)
    machine.write("/sys/fs/cgroup/cpuset/cpuset.cpus", "0-7")
    machine.write("/sys/fs/cgroup/cpuset/box/cpuset.cpus", "0-3")
    found = machine.read()
    assert found.cpu_quota == hardware.Fact(2.5, "/sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us")
    assert found.memory_limit == hardware.Fact(GIB, "/sys/fs/cgroup/memory/box/memory.limit_in_bytes")
    assert found.cpuset == hardware.Fact((0, 1, 2, 3), "/sys/fs/cgroup/cpuset/box/cpuset.cpus")
    assert found.usable_cores.value == 2


def test_v1_without_a_limit(machine: FakeMachine) -> None:
    machine.process("0-7", cgroup="5:memory:/\n3:cpu,cpuacct:/", mounts=(v1("cpu,cpuacct"), v1("memory")))
    machine.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    found = machine.read()
    assert found.cpu_quota.value is None
    assert found.memory_limit.value is None
    assert found.usable_memory.value == 64 * GIB


def test_docker_on_v1_mounts_its_own_group_as_the_root(machine: FakeMachine) -> None:
    """/proc/self/cgroup names the path as the host sees it, which doesn't exist inside."""
    mount = v1("cpu,cpuacct", root="/docker/abc")
    machine.process("0-7", cgroup="3:cpu,cpuacct:/docker/abc/worker", mounts=(mount,))
    machine.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 400_000)
    machine.write("/sys/fs/cgroup/cpu,cpuacct/worker/cpu.cfs_quota_us", 300_000)
    machine.write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", 100_000)
    assert machine.read().cpu_quota.value == 3.0


def test_hybrid_takes_the_least_of_both_hierarchies(machine: FakeMachine) -> None:
    unified = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    machine.process("0-7", cgroup="3:cpu:/box\n0::/slice", mounts=(v1("cpu"), unified))
    machine.write("/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", 500_000)
    machine.write("/sys/fs/cgroup/unified/slice/cpu.max", "400000 100000")
    assert machine.read().cpu_quota == hardware.Fact(4.0, "/sys/fs/cgroup/unified/slice/cpu.max")


def test_cpuset_decides_where_the_mask_agrees_with_it(machine: FakeMachine) -> None:
    machine.process("2-3", cgroup="0::/pod", mounts=(V2,))
    machine.write("/sys/fs/cgroup/cpuset.cpus.effective", "0-7")
    machine.write("/sys/fs/cgroup/pod/cpuset.cpus.effective", "2-3")
    found = machine.read()
    assert found.usable_cores.value == 2
    assert "cpuset (/sys/fs/cgroup/pod/cpuset.cpus.effective)" in found.usable_cores.source


def test_mask_and_cpuset_are_cut(machine: FakeMachine) -> None:
    machine.process("0-4", mounts=(V2,))
    machine.write("/sys/fs/cgroup/cpuset.cpus.effective", "3-7")
    found = machine.read()
    assert found.usable_cpus.value == (3, 4)
    assert found.usable_cores.value == 2


def test_a_mount_point_with_a_blank(machine: FakeMachine) -> None:
    machine.process("0-7", mounts=(V2.replace("/sys/fs/cgroup", "/mnt/c\\040groups"),))
    machine.write("/mnt/c groups/cpu.max", "100000 100000")
    assert machine.read().cpu_quota.value == 1.0


def test_a_group_outside_the_namespace_is_read_at_the_mount(machine: FakeMachine) -> None:
    machine.process("0-7", cgroup="0::/../other", mounts=(V2,))
    machine.write("/sys/fs/other/cpu.max", "100000 100000")
    machine.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    assert machine.read().cpu_quota.value == 2.0


# --- What is hidden ----------------------------------------------------------------------------------------------


def test_nothing_at_all_is_one_plain_core_and_says_so(tmp_path: Path) -> None:
    found = hardware.detect(tmp_path)
    assert found.usable_cores.value == 1
    assert found.vendor.value == found.model.value == "unknown"
    assert found.instruction_sets.value == ()
    assert found.memory_total.value is found.memory_limit.value is found.cpu_quota.value is found.cpuset.value is None
    for fact in (found.logical_cpus, found.cores, found.sockets, found.numa_nodes, found.affinity):
        assert fact.source.startswith("assumed"), fact
    assert hardware.best_isa(found, {})[0] == "portable"


def test_a_container_that_hides_sys_is_read_from_proc(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    blocks = [
        f"processor\t: {cpu}\nphysical id\t: {cpu // 4}\ncore id\t\t: {cpu % 4 // 2}\nflags\t: {ZEN3}"
        for cpu in range(8)
    ]
    fake.write("/proc/cpuinfo", "\n\n".join(blocks))
    found = fake.read()
    assert found.cores.value == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found.cores.source == "/proc/cpuinfo: physical id, core id"
    assert found.sockets.value == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.usable_cores.value == 4


def test_a_hidden_mountinfo_leaves_the_usual_places(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.cpuinfo(8, ZEN3)
    fake.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", 300_000)
    fake.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", 100_000)
    assert fake.read().cpu_quota.value == 3.0
    fake.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    assert fake.read().cpu_quota.value == 2.0


# --- Which kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "isa", "reason"),
    [
        (EMERALD_RAPIDS, "avx512", "avx512f"),
        (EMERALD_RAPIDS.replace("avx512dq ", ""), "avx2", "avx512 lacks avx512dq"),
        (ZEN3, "avx2", "avx512 lacks avx512f"),
        (ZEN3.replace("fma ", ""), "portable", "avx2 lacks fma"),
        ("sse4_2 avx", "portable", "avx2 lacks avx2, fma, f16c"),
    ],
)
def test_the_widest_isa_that_runs(machine: FakeMachine, flags: str, isa: str, reason: str) -> None:
    machine.cpuinfo(8, flags)
    found, why = hardware.best_isa(machine.read(), {})
    assert found == isa
    assert reason in why


def test_a_lower_isa_can_be_forced(machine: FakeMachine) -> None:
    machine.cpuinfo(8, EMERALD_RAPIDS)
    for isa in ("avx512", "avx2", "portable"):
        assert hardware.best_isa(machine.read(), {"CPUTRAIN_ISA": isa}) == (isa, f"CPUTRAIN_ISA={isa}")


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUTRAIN_ISA", "portable")
    assert hardware.best_isa() == ("portable", "CPUTRAIN_ISA=portable")


def test_an_isa_that_cannot_run_or_does_not_exist(machine: FakeMachine) -> None:
    with pytest.raises(ValueError, match=r"CPUTRAIN_ISA is 'avx512', but this CPU lacks avx512f, .*choose a lower one"):
        hardware.best_isa(machine.read(), {"CPUTRAIN_ISA": "avx512"})
    assert tuple(hardware.ISA_NEEDS) == settings.ISAS
    with pytest.raises(ValueError, match="CPUTRAIN_ISA must be one of avx512, avx2, portable, found 'neon'"):
        hardware.best_isa(machine.read(), {"CPUTRAIN_ISA": "neon"})


# --- This machine ------------------------------------------------------------------------------------------------


def test_this_machine_agrees_with_the_kernel() -> None:
    found = hardware.detect()
    assert found.affinity.value == tuple(sorted(os.sched_getaffinity(0)))
    assert sum(map(len, found.cores.value)) == sum(map(len, found.sockets.value)) == len(found.logical_cpus.value)
    assert 1 <= found.usable_cores.value <= len(found.cores.value)


def test_a_narrower_mask_is_seen() -> None:
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os, json; os.sched_setaffinity(0, [{one}])\n"
        "from cputrain import hardware; found = hardware.detect()\n"
        "print(json.dumps([found.affinity.value, found.usable_cores.value]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == [[one], 1]
