"""The file that `cputrain config` writes and `cputrain launch` reads."""

from __future__ import annotations

from cputrain.launch import config_file
from cputrain.launch.config import Config
from tests.fuzz import sentences

SEEDS = [
    b"distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 2\nmain_process_ip: 10.0.0.1\n",
    b"use_cpu: true\nmixed_precision: 'no'\nenv: [A=1, B=2]\nipex_config:\n  ipex: true\n",
    b"mpirun_config:\n  mpirun_hostfile: hosts\n  mpirun_ccl: '1'\nmain_process_port: 29500\n",
    b'{"compute_environment": "LOCAL_MACHINE", "env": {"A": "b"}, "hostfile": null, "ppn": 2, "max-restarts": 3}',
]
WORDS = [
    *(key.encode() for key in Config().to_mapping()),
    *b"env ppn log_dir NO MULTI_CPU true no null ~ 0 -1 2 99999999999 *a ? | > ' \" \\x1b [ ] { } ,".split(),
    *(b": ", b"\n", b"\n  ", b"- ", b"---\n", b"\t", b"&a ", b"<<: *a", b"!!int ", b"!!python/object:os.system "),
]


def check(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:  # a sentence of text_files, which reads the file
        return
    with sentences.refused_in_one():
        config = config_file.parse(text, "config.yaml")
        assert config_file.parse(config_file.to_text(config.to_mapping()), "again.yaml") == config
