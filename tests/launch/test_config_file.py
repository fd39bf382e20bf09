"""Configuration files: the guide's are read verbatim and written key for key; bad ones are a sentence with a line."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain import cli
from cputrain.launch import config_file
from cputrain.launch.config import Config

EXAMPLES = Path(__file__).parents[2] / "examples"
# The two files of Accelerate's guide (accelerate_ipex): one process on one machine, sixteen on four.
ONE = (EXAMPLES / "nlp_example.yaml").read_text()
SIXTEEN = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
ipex_config:
  ipex: true
machine_rank: 0
main_process_ip: 36.112.23.24
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
num_machines: 4
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


@pytest.mark.parametrize("text", [ONE, SIXTEEN], ids=["one", "sixteen"])
def test_the_guides_files_are_written_as_they_were_read(text: str) -> None:
    assert config_file.to_text(config_file.parse(text, "guide").to_mapping()) == text


def test_what_the_guides_files_mean() -> None:
    assert config_file.parse(ONE, "guide") == Config(mixed_precision="bf16")
    assert config_file.parse(SIXTEEN, "guide") == Config(
        distributed_type="MULTI_CPU",
        main_process_ip="36.112.23.24",
        main_process_port=29500,
        mixed_precision="bf16",
        num_machines=4,
        num_processes=16,
    )


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("use_cpu: no", {"use_cpu": False}),
        ("use_cpu: True", {"use_cpu": True}),
        ("mixed_precision: no", {"mixed_precision": "no"}),
        ("distributed_type: NO", {"distributed_type": "NO"}),
        ("ipex_config: {ipex: false}", {"ipex": False}),
        ("ipex_config: {}", {}),
        ("main_process_port: null", {}),
        ("main_process_ip:", {}),
        ("deepspeed_config: {}", {}),
        ("gpu_ids: all", {}),
        ("debug: false", {}),
        ("cores-for-communication: 2\nlog-dir: x", {"cores_for_communication": 2, "log_dir": "x"}),
    ],
)
def test_spellings_of_accelerate_and_yaml(line: str, meant: dict) -> None:
    assert config_file.parse(line, "f") == replace(Config(), **meant)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("use_cpu: true\nspeed: 3\n", 2, "speed is not a key"),
        ("use_cpu: true\n\nnum_processes: two\n", 3, "num_processes must be a whole number, found 'two'"),
        ("num_machines: 1.5", 1, "num_machines must be a whole number"),
        ("same_network: maybe", 1, "same_network must be true or false, found 'maybe'"),
        ("use_cpu: [true]", 1, "use_cpu must be true or false, found a list or a mapping"),
        ("mixed_precision: [bf16]", 1, "mixed_precision must be a word"),
        ("a: 1\n", 1, "a is not a key that cputrain knows; remove it."),
        (
            "use_cpu: true\nnum_proceses: 3\n",
            2,
            "num_proceses is not a key that cputrain knows; did you mean num_processes?",
        ),
        ("ipex_conf: 1\n", 1, "ipex_conf is not a key that cputrain knows; did you mean ipex_config?"),
        ("use_cpu: true\nuse_cpu: false", 2, "use_cpu stands in line 1 already"),
        ("mixed_precision: fp16", 1, "fp16 doesn't train on CPUs"),
        ("mixed_precision: fp8", 1, "mixed_precision must be no or bf16, found 'fp8'"),
        ("distributed_type: MULTI_GPU", 1, "distributed_type must be NO or MULTI_CPU"),
        ("compute_environment: AMAZON_SAGEMAKER", 1, "compute_environment must be LOCAL_MACHINE"),
        ("deepspeed_config: {zero_stage: 2}", 1, "deepspeed_config has no meaning on CPUs"),
        ("ipex_config: {use_xpu: true}", 1, "use_xpu chooses a GPU"),
        ("ipex_config: true", 1, "ipex_config must hold"),
        ("use_cpu: true\nnum_processes: 2", 2, "num_processes is 2, but distributed_type is NO"),
        (SIXTEEN.replace(": 16", ": 15"), 12, "4 machines can't share 15 processes evenly"),
        (
            SIXTEEN.replace("machine_rank: 0", "machine_rank: 4"),
            6,
            "machine_rank is 4, but the ranks of 4 machines end",
        ),
        (SIXTEEN.replace("machine_rank: 0", "machine_rank: -1"), 6, "machine_rank must be at least 0"),
        (SIXTEEN.replace("main_process_ip: 36.112.23.24\n", ""), 10, "4 machines need a main_process_ip"),
        (SIXTEEN.replace("29500", "99999"), 8, "main_process_port must be 1 to 65535"),
        (SIXTEEN.replace("36.112.23.24", "a b"), 7, "main_process_ip: 'a b' is not a host name or an address"),
        ("log-dir: x\nlog_dir: x", 2, "log_dir stands in line 1 already"),
        ("", 1, "a configuration is a list of"),
        ("- 1", 1, "a configuration is a list of"),
        ("use_cpu: true\n\tnum_machines: 1", 2, "found character"),
        ("use_cpu: 'true\n", 2, "found unexpected end of stream"),
        ("use_cpu: *nobody", 1, "found undefined alias"),
        ("? [1]\n: 2", 1, "a key must be a name"),
        ("num_processes: 99999999999999999999", 1, "num_processes must be a whole number"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, line: int, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^f\.yaml, line {line}: {re.escape(said)}"):
        config_file.parse(text, "f.yaml")


def malformed(seed: int) -> bytes:
    """The guide's file after an accident: bytes cut, doubled, swapped or replaced by what YAML doesn't like."""
    chance = random.Random(seed)
    content = bytearray(SIXTEEN, "utf-8")
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(content))
        noise = chance.choice(
            [b"\t", b"\0", b"\xff", b": ", b"[", b"{", b"'", b"&x ", b"*y", b"!!z ", b"|", b"\n", b"- ", b"%"]
        )
        match chance.randrange(4):
            case 0:
                content[place:place] = noise
            case 1:
                del content[place : place + chance.randint(1, 30)]
            case 2:
                content[place : place + len(noise)] = noise
            case 3:
                content[place:place] = bytes(content[: chance.randint(1, 60)])
    return bytes(content) if chance.random() < 0.9 else bytes(content)[: chance.randrange(40)]


def updated(path: Path, monkeypatch, capsys) -> tuple[object, str]:
    """Exit code and standard error of `cputrain config --update`, which reads the file and writes it anew."""
    monkeypatch.setattr(sys, "argv", ["cputrain", "config", "--update", "--file", str(path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


def test_200_malformed_files_are_a_sentence_with_a_line(tmp_path: Path, monkeypatch, capsys) -> None:
    """Some accidents leave a file that is still right; none ends in a traceback, and none changes a file."""
    path, refused = tmp_path / "config.yaml", 0
    for seed in range(250):
        path.write_bytes(malformed(seed))
        code, said = updated(path, monkeypatch, capsys)
        if code == 2:
            refused += 1
            assert re.fullmatch(rf"cputrain: {re.escape(str(path))}, line \d+: .+\n", said), (seed, said)
            assert path.read_bytes() == malformed(seed)
        else:
            assert (code, said) == (0, ""), seed
    assert refused >= 200


def test_launch_shows_the_sentence_and_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("use_cpu: true\nspeed: 3\n")
    command = [sys.executable, "-m", "cputrain", "launch", "--config_file", str(tmp_path / "bad.yaml"), "x.py"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"cputrain: {tmp_path}/bad.yaml, line 2: speed is not a key")
    assert answer.stderr.count("\n") == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.yaml can't be read: No such file"):
        config_file.read(tmp_path / "nothing.yaml")


# --- Which file --------------------------------------------------------------------------------------------------


def test_ours_comes_before_accelerates(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert config_file.read_default(environ) == (Config(), "no configuration file: defaults")
    theirs = tmp_path / ".cache/huggingface/accelerate/default_config.yaml"
    config_file.write_for_accelerate(Config(mixed_precision="bf16"), theirs)
    assert config_file.read_default(environ) == (Config(mixed_precision="bf16"), str(theirs))
    ours = config_file.default_path(environ)
    assert ours == tmp_path / ".config/cputrain/default_config.yaml"
    config_file.write(Config(ipex=False), ours)
    assert config_file.read_default(environ) == (Config(ipex=False), str(ours))
    assert config_file.default_path({"XDG_CONFIG_HOME": "/etc/x"}) == Path("/etc/x/cputrain/default_config.yaml")


def test_accelerate_reads_what_is_written_for_it(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "theirs.yaml"
    config_file.write_for_accelerate(config_file.parse(SIXTEEN, "guide"), path)
    loaded = load_config_from_file(str(path))
    assert (loaded.num_processes, loaded.num_machines, loaded.mixed_precision) == (16, 4, "bf16")
    assert loaded.use_cpu is True
