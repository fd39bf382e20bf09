"""`cputrain launch` applies a configuration to one process; options win over the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from cputrain import hardware
from cputrain.cli.launch import launch as launch_command
from cputrain.launch import config_file
from cputrain.launch.config import Config
from tests.launch.programs import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOW = """
import json, os, sys
names = ("ACCELERATE_USE_CPU", "CPUTRAIN_IPEX", "ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS",
         "CPUTRAIN_DTYPE", "CPUTRAIN_PADDING")
print(json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(SHOW)
    return path


def shown(*arguments: str, folder: Path, **environ: str) -> dict:
    answer = launch(*arguments, folder=folder, **environ)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_the_guides_file_reaches_the_script(script: Path) -> None:
    found = shown(
        "--config_file", str(EXAMPLES / "nlp_example.yaml"), str(script), "--num_processes", "-m", folder=script.parent
    )
    assert found == {
        "argv": ["--num_processes", "-m"],
        "ACCELERATE_USE_CPU": "true",
        "CPUTRAIN_IPEX": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "OMP_NUM_THREADS": str(hardware.this_machine().usable_cores.value),
        "CPUTRAIN_DTYPE": None,
        "CPUTRAIN_PADDING": None,
    }


def test_options_win_over_the_file(script: Path) -> None:
    options = ["--mixed-precision", "no", "--no-ipex", "--dtype", "fp32", "--padding", "keep"]
    options += ["--num_cpu_threads_per_process", "3"]
    file = ["--config_file", str(EXAMPLES / "nlp_example.yaml")]
    found = shown(*file, *options, str(script), folder=script.parent, OMP_NUM_THREADS="7")
    assert found["ACCELERATE_MIXED_PRECISION"] == "no" and found["CPUTRAIN_IPEX"] == "false"
    assert (found["CPUTRAIN_DTYPE"], found["CPUTRAIN_PADDING"], found["OMP_NUM_THREADS"]) == ("fp32", "keep", "3")


def test_accelerates_own_spellings_are_accepted(script: Path) -> None:
    (script.parent / "hosts").write_text("127.0.0.1\n")
    flags = ["--mpirun-hostfile", "hosts", "--mpirun_ccl", "1", "--same_network", "--rdzv_backend", "static"]
    answer = launch(*flags, "--dry-run", script, folder=script.parent)
    assert answer.returncode == 0, answer.stderr
    assert "cores" in answer.stdout
    assert ("HOSTFILE, line by line: 127.0.0.1" in answer.stdout) == ("engine: mpi" in answer.stdout)


def test_every_option_is_spelt_with_either_sign() -> None:
    app = typer.Typer()
    app.command()(launch_command)
    app.command("other")(lambda: None)  # without a second one typer would add options of its own
    parameters = typer.main.get_command(app).commands["launch"].params  # type: ignore[attr-defined]
    spelt = [{*one.opts, *one.secondary_opts} for one in parameters if one.param_type_name == "option"]
    assert len(spelt) > 20
    for names in spelt:
        for name in names:
            assert {name.replace("_", "-"), f"--{name[2:].replace('-', '_')}" if name[:2] == "--" else name} <= names


def test_one_process_keeps_its_file_and_starts_anew(tmp_path: Path) -> None:
    """Neither needs a second process; as a rank that others started it keeps its file, and says what it can't do."""
    (tmp_path / "second_time.py").write_text(
        "import pathlib\nseen = pathlib.Path('seen')\nprint('again' if seen.exists() else 'first', flush=True)\n"
        "if not seen.exists():\n    seen.touch()\n    raise SystemExit(5)\n"
    )
    assert launch("--log_dir", "alone", "second_time.py", folder=tmp_path).returncode == 5
    assert (tmp_path / "alone/rank-0.log").read_text() == "first\n"
    (tmp_path / "seen").unlink()
    answer = launch("--max_restarts", "1", "second_time.py", folder=tmp_path)
    assert answer.returncode == 0 and answer.stdout.splitlines()[-1] == "[0] again", answer.stderr
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    answer = launch("--log_dir", "rank", "--max_restarts", "1", "second_time.py", folder=tmp_path, **rank)
    assert answer.returncode == 0 and "max_restarts has no effect" in answer.stderr, answer.stderr
    assert "again\n" in (tmp_path / "rank/rank-0.log").read_text()


def test_the_default_file_is_read_by_itself(script: Path) -> None:
    config_file.write(
        Config(mixed_precision="bf16", ipex=False), config_file.default_path({"HOME": str(script.parent)})
    )
    found = shown(str(script), folder=script.parent)
    assert (found["ACCELERATE_MIXED_PRECISION"], found["CPUTRAIN_IPEX"]) == ("bf16", "false")


def test_a_module_may_be_launched(script: Path) -> None:
    assert shown("-m", "show", "x", folder=script.parent)["argv"] == ["x"]


def test_the_scripts_exit_code_is_ours(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(5)")
    assert launch("ends.py", folder=tmp_path).returncode == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "2", "--ppn", "1", "x.py"], "2 processes with --ppn 1 need several machines: give a --hostfile"),
        (["--hostfile", "nowhere", "x.py"], "the hostfile nowhere can't be read"),
        (["--engine", "slurm", "x.py"], "engine must be auto or local or mpi or torchrun, found 'slurm'"),
        (["--env", "1A=b", "x.py"], "env holds NAME=VALUE, found '1A'"),
        (["--num_machines", "2", "x.py"], "2 machines can't share 1 process evenly"),
        (["--dry-run", "--dtype", "fp8", "x.py"], "--dtype must be one of auto, fp32, bf16, int16, found 'fp8'"),
        (["-n", "4", "--num_machines", "2", "--ppn", "1", "x.py"], "2 machines of 1 processes have 2, found 4"),
        (["--num_machines", "2", "--ppn", "2", "x.py"], "2 machines need a main_process_ip"),  # of four processes
        (["--main_process_ip", "-oX", "x.py"], "main_process_ip: '-oX' is not a host name or an address"),
        (["--mixed_precision", "fp16", "x.py"], "fp16 doesn't train on CPUs"),
        (["--config_file", "nowhere.yaml", "x.py"], "nowhere.yaml can't be read"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    answer = launch(*arguments, folder=tmp_path)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"cputrain: {said}") and answer.stderr.count("\n") == 1
