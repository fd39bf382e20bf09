"""Two ranks on this machine, by torchrun's agent and by each MPI: started, bound, labelled, and ended all together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cputrain import hardware
from cputrain.launch import config_file
from cputrain.launch.config import Config
from tests.launch import programs
from tests.launch.programs import CLEAN, LAUNCH, free_port, launch, shown

INTEL = str(Path(sys.prefix) / "bin" / "mpiexec.hydra")
MPIS = [
    pytest.param(INTEL, id="Intel", marks=pytest.mark.needs_program(INTEL, "impi-rt, which pip installs")),
    pytest.param("mpirun.mpich", id="MPICH", marks=pytest.mark.needs_program("mpirun.mpich", "mpich")),
    pytest.param("mpirun.openmpi", id="Open MPI", marks=pytest.mark.needs_program("mpirun.openmpi", "openmpi-bin")),
]
ENGINES = [
    pytest.param([], id="agent"),
    *(pytest.param(["--engine", "mpi", "--mpirun", *p.values], id=p.id, marks=p.marks) for p in MPIS),
]
RUN = [sys.executable, "-m", "cputrain", "run"]
CORES = hardware.this_machine().usable_cores.value


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("several")
    programs.write(place, show=programs.SHOW, sum=programs.SUM, fail=programs.FAIL, wait=programs.WAIT)
    programs.write(place, show_and_sum=programs.SHOW + programs.SUM)
    return place


def sleepers(number: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", number]]


def nothing_is_left(number: str, seconds: float = 10) -> bool:
    limit = time.monotonic() + seconds
    while sleepers(number) and time.monotonic() < limit:
        time.sleep(0.1)
    left = sleepers(number)
    for process in left:
        process.kill()
    return not left


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_see_who_they_are_and_compute_together(engine: list[str], place: Path, tmp_path: Path) -> None:
    options = ["-n", "2", *engine, "--log-dir", tmp_path / "logs", "--env", "SPECIAL=a b"]
    answer = launch(*options, "show_and_sum.py", "--lr", "1", folder=place)
    assert answer.returncode == 0, answer.stderr
    first, second = shown(answer.stdout)
    assert (first["RANK"], first["LOCAL_RANK"], first["WORLD_SIZE"], first["MASTER_ADDR"]) == (
        "0",
        "0",
        "2",
        "127.0.0.1",
    )
    assert (second["RANK"], second["LOCAL_RANK"], second["MASTER_PORT"]) == ("1", "1", first["MASTER_PORT"])
    assert first["OMP_NUM_THREADS"] == second["OMP_NUM_THREADS"] == str(max(1, CORES // 2))
    assert first["argv"] == ["--lr", "1"] and first["SPECIAL"] == "a b"
    if CORES >= 2 and hardware.this_machine().cpu_quota.value is None:
        assert not set(first["cpus"]) & set(second["cpus"]), "cores of their own"
    labelled = sorted(line if "SUM" in line else line[:9] for line in answer.stdout.splitlines())
    assert labelled == ["[0] SHOWN", "[0] SUM 3.0 3.0 shm", "[1] SHOWN", "[1] SUM 3.0 3.0 shm"]
    for rank in (0, 1):
        kept = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert (kept.count("SHOWN"), kept.count("SUM")) == (1, 1)


@pytest.mark.parametrize(
    ("engine", "how", "code"),
    [pytest.param(*e.values, "3", 3, id=f"{e.id}-3", marks=e.marks) for e in ENGINES]
    + [pytest.param([], "raise", 1, id="agent-raise")],
)
def test_a_rank_that_fails_ends_all_with_its_exit_code(engine, how, code, place: Path) -> None:
    answer = launch("-n", "2", *engine, "fail.py", how, folder=place)  # ends before rank 0 would
    assert answer.returncode == code, answer.stderr
    assert ('[1] KeyError: "rank 1\'s trouble"' if how == "raise" else "[1] rank 1's last words") in answer.stderr
    assert nothing_is_left("4321")


def test_a_rank_that_is_killed_is_named(place: Path) -> None:
    answer = launch("-n", "2", "fail.py", "kill", folder=place)
    assert answer.returncode == 128 + 9
    assert f"cputrain: rank 1 on {socket.gethostname()} was ended by SIGKILL." in answer.stderr
    assert nothing_is_left("4321")


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[1]])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_everything(engine: list[str], number: int, place: Path) -> None:
    process = subprocess.Popen(
        [*LAUNCH, "-n", "2", *engine, "wait.py"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=place,
        env={**CLEAN, "HOME": str(place), "PYTHONFAULTHANDLER": "1"},
    )
    assert process.stdout
    for _ in range(2):
        assert "WAITING" in process.stdout.readline()
    process.send_signal(number)
    try:
        code = process.wait(30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # says where it hangs
        raise
    assert code == 128 + number
    assert nothing_is_left("4322")


def test_ranks_end_even_if_the_launch_is_killed(place: Path) -> None:
    process = subprocess.Popen([*LAUNCH, "-n", "2", "wait.py"], stdout=subprocess.PIPE, text=True, cwd=place, env=CLEAN)
    assert process.stdout and "WAITING" in process.stdout.readline()
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    process.kill()
    process.wait()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    assert nothing_is_left("4322")


def test_a_rank_whose_launch_was_killed_before_it_began_ends_too(place: Path) -> None:
    (place / "says.py").write_text("print('RUNS')\n")
    started_by = subprocess.Popen(["sleep", "0"])
    for has_ended in ("not asked for its exit code", "asked"):
        os.waitid(os.P_PID, started_by.pid, os.WEXITED | os.WNOWAIT) if has_ended != "asked" else started_by.wait()
        environment = {**CLEAN, "CPUTRAIN_PARENT": str(started_by.pid)}
        answer = subprocess.run([*RUN, "says.py"], cwd=place, env=environment, capture_output=True, text=True)
        assert (answer.returncode, answer.stdout) == (128 + signal.SIGKILL, ""), has_ended
    alive = {**CLEAN, "CPUTRAIN_PARENT": "1"}  # of a shell between the launch and this process
    assert "RUNS" in subprocess.run([*RUN, "says.py"], cwd=place, env=alive, capture_output=True, text=True).stdout


def test_a_port_in_use_is_a_sentence(place: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        answer = launch("-n", "2", "--main_process_port", str(port), "show.py", folder=place)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr
    assert f"cputrain: the port of 127.0.0.1:{port} is in use on" in answer.stderr


# --- Started by others -------------------------------------------------------------------------------------------


def started(*words: str | Path, place: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**CLEAN, "HOME": str(place), "I_MPI_ROOT": sys.prefix, **environ}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, cwd=place, env=environ, timeout=100, check=False
    )


@pytest.mark.parametrize("mpirun", MPIS)
def test_mpirun_cputrain_run(mpirun: str, place: Path) -> None:
    answer = started(mpirun, "-n", "2", sys.executable, "-m", "cputrain", "run", "sum.py", place=place)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("SUM 3.0 3.0 shm") == 2
    assert "cputrain: rank 0 of 2: " in answer.stderr and "all ranks are on this machine" in answer.stderr


@pytest.mark.parametrize("mpirun", MPIS)
def test_launch_under_mpirun_is_a_rank_and_starts_nothing(mpirun: str, place: Path) -> None:
    answer = started(mpirun, "-n", "2", *LAUNCH, "show.py", place=place)
    assert answer.returncode == 0, answer.stderr
    assert [one["RANK"] for one in shown(answer.stdout)] == ["0", "1"], "two processes, not four"


@pytest.mark.parametrize("mpirun", [MPIS[0]])
def test_a_configuration_of_another_size_is_an_error(mpirun: str, place: Path, tmp_path: Path) -> None:
    file = tmp_path / "four.yaml"
    config_file.write(Config(distributed_type="MULTI_CPU", num_processes=4), file)
    answer = started(mpirun, "-n", "2", *LAUNCH, "--config_file", file, "show.py", place=place)
    assert answer.returncode == 2 and "SHOWN" not in answer.stdout
    assert f"cputrain: {file} asks for 4 processes, but 2 were started (PMI_RANK=" in answer.stderr


@pytest.mark.parametrize("mpirun", [MPIS[0]])
def test_mpi_may_be_used_by_the_script_itself(mpirun: str, place: Path) -> None:
    """The address was asked through PMI, which a later MPI_Init and MPI_Finalize must not notice."""
    (place / "own_mpi.py").write_text(
        "import ctypes, sys, time\nmpi = ctypes.CDLL(sys.prefix + '/lib/libmpi.so.12')\n"
        "assert mpi.MPI_Init(None, None) == 0\nimport os\ntime.sleep(int(os.environ['RANK']))\n"
        "assert mpi.MPI_Finalize() == 0\nsys.stdout.write('FINALIZED\\n')\n"
    )
    library = {"LD_LIBRARY_PATH": f"{sys.prefix}/lib"}
    answer = started(mpirun, "-n", "2", sys.executable, "-m", "cputrain", "run", "own_mpi.py", place=place, **library)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("FINALIZED") == 2


def test_torchrun_threads_are_counted_anew(place: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "cputrain", "run", "show.py"]
    answer = started(sys.executable, *words, place=place)
    assert answer.returncode == 0, answer.stderr
    assert [one["OMP_NUM_THREADS"] for one in shown(answer.stdout)] == [str(max(1, CORES // 2))] * 2


@pytest.mark.parametrize(("users", "counted"), [({}, "True"), ({"OMP_NUM_THREADS": "1"}, "False")])
def test_torchruns_one_thread_is_told_from_the_users(users: dict[str, str], counted: str) -> None:
    """On two cores the test above would see 1 either way."""
    asks = "import os; from cputrain.launch import join; print(join._only_torchrun_says('1', os.environ))"
    agent = (
        "import os, subprocess, sys\n"
        "told = {**os.environ, 'OMP_NUM_THREADS': '1', 'TORCHELASTIC_RUN_ID': 'x'}\n"
        f"subprocess.run([sys.executable, '-c', {asks!r}], env=told, check=True)"
    )
    environ = {**CLEAN, **users}
    answer = subprocess.run([sys.executable, "-c", agent], capture_output=True, text=True, check=True, env=environ)
    assert answer.stdout.strip() == counted


def test_kubeflows_node_is_launched(place: Path) -> None:
    """A TrainJob's variables: the machine's processes are started, and rank and size follow from its number."""
    told = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    told["PET_MASTER_PORT"] = str(free_port())
    nodes = [
        subprocess.Popen(
            [*LAUNCH, "show.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=place,
            env={**CLEAN, "HOME": str(place), **told, "PET_NODE_RANK": str(node)},
        )
        for node in (0, 1)
    ]
    answers = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], answers
    assert [one["RANK"] for one in shown(answers[0][0] + answers[1][0])] == ["0", "1"]
    run = started(
        sys.executable, "-m", "cputrain", "run", "show.py", place=place, **{**told, "PET_NPROC_PER_NODE": "2"}
    )
    assert run.returncode == 2 and "write cputrain launch in place of cputrain run" in run.stderr


# --- What would run ----------------------------------------------------------------------------------------------


def test_a_dry_run_starts_nothing_and_keeps_secrets(place: Path) -> None:
    options = ["-n", "2", "--env", "API_TOKEN=hush", "--env", "HTTPS_PROXY=http://me:hush@proxy:1", "--dry-run"]
    words = ["--hub_token", "hush", "--tokenizer_name", "bert"]
    answer = launch("--env", "HF_AUTH=hush", *options, "show.py", *words, folder=place, OMP_NUM_THREADS="999")
    assert answer.returncode == 0, answer.stderr
    assert "SHOWN" not in answer.stdout and "hush" not in answer.stdout
    for said in (
        "engine: local (all 2 ranks are on this machine)",
        "meeting: on this machine alone",
        "API_TOKEN=***",
        "HF_AUTH=***",
        "show.py --hub_token '***' --tokenizer_name bert",
        "HTTPS_PROXY=http://***@proxy:1",
        "rank 1: ",
        ", OMP_NUM_THREADS=999 (",
        "warning: OMP_NUM_THREADS=999 is kept, but this rank has",
        "cputrain/__main__.py run show.py",
        "OpenMP here: ",
    ):
        assert said in answer.stdout
    assert os.fspath(place) in answer.stdout


def test_a_dry_run_in_a_pod_says_how_the_machines_meet(place: Path) -> None:
    told = {"PET_NNODES": "1:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "w-0:1", "PET_MAX_RESTARTS": "3"}
    answer = launch("--dry-run", "show.py", folder=place, **told, PET_RDZV_CONF="join_timeout=9")
    assert (
        "meeting: 1 to 4 machines, c10d at w-0:1, join_timeout=9; all ranks start anew up to 3 times" in answer.stdout
    )
    assert "CPUTRAIN_EXPECTED_RANKS=1:4" in answer.stdout and "ranks: 1 of 1 to 4 on 1 machine\n" in answer.stdout


def test_a_dry_run_of_one_process_and_of_a_rank(place: Path) -> None:
    alone = launch("--dry-run", "show.py", folder=place).stdout
    assert "engine: none (one process, in place of this one)" in alone
    assert f"not bound, OMP_NUM_THREADS={CORES} (" in alone
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    rank = launch("--dry-run", "show.py", folder=place, **told).stdout
    assert "engine: none (rank 1 of 2: RANK=1" in rank and f"OMP_NUM_THREADS={max(1, CORES // 2)} (" in rank


def test_all_of_it_from_the_file(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nengine: local\nenv:\n  SPECIAL: x\nlog_dir: logs\n")
    answer = launch("--config_file", file, "--dry-run", "show.py", folder=place)
    assert "ranks: 2 on 1 machine" in answer.stdout and "SPECIAL=x" in answer.stdout
    parsed = config_file.read(file)
    assert config_file.parse(config_file.to_text(parsed.to_mapping()), "again") == parsed


ASK = """
import os, sys
from cputrain.launch import pmi, ranks
if sys.argv[1] == "mpi4py":
    pmi.pmix_library = lambda environ: None
place = ranks.find(os.environ)
exchange = pmi.exchange(place, os.environ)
said = exchange.broadcast(f"rank-{place.rank}")
exchange.barrier()
sys.stdout.write(f"{type(exchange).__name__} {said}\\n")
if sys.argv[1] == "pmix, then MPI":
    os.environ["MPI4PY_MPIABI"] = "openmpi"
    from mpi4py import MPI
    assert MPI.COMM_WORLD.allreduce(1) == 2
if sys.argv[1] == "failure" and place.rank == 1:
    exchange.exit_code = 3
    sys.exit(3)
"""


@pytest.mark.needs_program("mpirun.openmpi", "openmpi-bin")
@pytest.mark.parametrize("how", ["pmix, then MPI", "mpi4py", "failure"])
def test_open_mpi_is_asked(how: str, place: Path) -> None:
    """By its own protocol; where its library isn't, by mpi4py."""
    (place / "ask.py").write_text(ASK)
    words = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "ask.py", how]
    answer = started(*words, place=place)
    asked = "Mpi4py" if how == "mpi4py" else "Pmix"
    assert answer.stdout.splitlines() == [f"{asked} rank-0"] * 2, answer.stderr
    assert answer.returncode == (3 if how == "failure" else 0), answer.stderr
