"""Reads and writes the configuration file. Whatever is wrong with one is a sentence with the file's line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from cputrain import text_files, user_folders
from cputrain.launch.config import OURS, Config, ConfigError

if TYPE_CHECKING:
    from ruamel.yaml.nodes import MappingNode, Node

_TYPES = {item.name: str(item.type) for item in fields(Config) if item.name not in ("ipex", "env", "tpu_env")}
# accelerate writes them too. What they say has no meaning on CPUs, so only "nothing" is accepted.
_EMPTY = ("deepspeed_config", "fsdp_config", "megatron_lm_config", "fp8_config", "parallelism_config", "gpu_ids")
_IGNORED = ("debug", "enable_cpu_affinity", "dynamo_config", "tpu_name", "tpu_zone", "commands")


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `cputrain config` writes, and `cputrain launch` looks first."""
    folder = _folder(environ, "XDG_CONFIG_HOME", ".config")
    if folder is None:
        raise ValueError("there is no home folder to write to: set HOME or XDG_CONFIG_HOME, or give --config_file.")
    return folder / "cputrain" / "default_config.yaml"


def _folder(environ: Mapping[str, str], variable: str, below_home: str) -> Path | None:
    home = user_folders.home(environ)
    return Path(environ[variable]) if environ.get(variable) else home / below_home if home else None


def accelerates_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Accelerate's own default file: read if ours is absent, never written, because it refuses ipex_config."""
    cache = _folder(environ, "XDG_CACHE_HOME", ".cache")
    if cache is None and not environ.get("HF_HOME"):
        return None
    folder = Path(environ.get("HF_HOME") or f"{cache}/huggingface") / "accelerate"
    names = [folder / f"default_config.{ending}" for ending in ("yaml", "yml", "json")]
    return next((name for name in names if name.exists()), names[0])


def read_default(environ: Mapping[str, str] = os.environ) -> tuple[Config, str]:
    """The configuration that holds if none is named, and where it came from."""
    ours = default_path(environ) if _folder(environ, "XDG_CONFIG_HOME", ".config") else None
    for path in filter(None, (ours, accelerates_path(environ))):
        if path.exists():
            return read(path), str(path)
    return Config(), "no configuration file: defaults"


def read(path: str | Path) -> Config:
    return parse(text_files.read(Path(path)), str(path))


def parse(text: str, path: str) -> Config:
    root = _composed(text, path)
    lines: dict[str, int] = {}
    values: dict[str, object] = {}
    for key_node, node in root.value:
        key, line = _scalar(key_node), key_node.start_mark.line + 1
        try:
            if not isinstance(key, str):
                raise ConfigError("", f"a key must be a name, found {_shown(key)}.")
            key = key.replace("-", "_")  # as the options may be spelt
            if key in lines:
                raise ConfigError("", f"{key} stands in line {lines[key]} already.")
            values.update(_values(key, node))
        except ConfigError as error:
            raise ValueError(f"{path}, line {line}: {text_files.quoted(str(error))}") from None
        lines[key] = line
    try:
        return Config(**values)  # type: ignore[arg-type]
    except ConfigError as error:
        line = lines.get(error.key, 1)
        raise ValueError(f"{path}, line {line}: {text_files.quoted(str(error))}") from None


def says(path: str, key: str) -> bool:
    """Whether a file that could be read names a key, rather than leaving it at its default."""
    if not Path(path).is_file():
        return False
    return any(
        str(_scalar(name)).replace("-", "_") == key for name, _ in _composed(text_files.read(Path(path)), path).value
    )


def write(config: Config, path: Path) -> None:
    _write(config.to_mapping(), path)


def write_for_accelerate(config: Config, path: Path) -> None:
    """Without ipex_config, which accelerate refuses since 1.13, and without keys of ours."""
    ours = ("ipex_config", *OURS)
    _write({key: value for key, value in config.to_mapping().items() if key not in ours}, path)


def _write(values: Mapping[str, object], path: Path) -> None:
    text_files.make_folder(path.parent)
    text_files.write(path, to_text(values))


def to_text(values: Mapping[str, object]) -> str:
    """As accelerate writes it: words that YAML would read as truth values stand in quotes."""
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import SingleQuotedScalarString

    yaml = YAML()
    yaml.default_flow_style = False
    stream = StringIO()
    yaml.dump({key: SingleQuotedScalarString(str(v)) if _is_truth(v) else v for key, v in values.items()}, stream)
    return stream.getvalue()


def _composed(text: str, path: str) -> MappingNode:
    """The file's nodes, which know their lines. Nothing is constructed from tags."""
    from ruamel.yaml import YAML
    from ruamel.yaml.nodes import MappingNode

    try:
        with text_files.yaml_errors(text):
            root = YAML(typ="safe", pure=True).compose(StringIO(text))
    except text_files.YamlError as error:
        raise ValueError(f"{path}, line {error.line}: {text_files.quoted(str(error))}.") from None
    if not isinstance(root, MappingNode):
        raise ValueError(f"{path}, line 1: a configuration is a list of `key: value` lines, found none.")
    return root


def _values(key: str, node: Node) -> dict[str, object]:
    """What one line of the file says, by our names."""
    if key == "ipex_config":
        return _ipex(node)
    if key == "mpirun_config":
        return _mpirun(node)
    if key == "env":
        return {"env": _variables(node)}
    if key in ("main_process_ip", "main_process_port") and _scalar(node) is None:
        return {key: None}
    if key in _TYPES:
        reader = {"str": _text, "int": _whole, "bool": _truth}[_TYPES[key].partition(" ")[0]]
        return {key: reader(key, node)}
    if key == "tpu_env" or key in _EMPTY:
        if _scalar(node) not in (None, "", "all") and node.value:
            raise ConfigError(key, f"{key} has no meaning on CPUs: leave it out.")
        return {}
    if key in _IGNORED:
        return {}
    raise ConfigError(key, f"{key} is not a key that cputrain knows; {_instead_of(key)}")


def _instead_of(key: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(key, [*_TYPES, "env", "tpu_env", "ipex_config", "mpirun_config"], 1)
    return f"did you mean {close[0]}?" if close else "remove it."


def _ipex(node: Node) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in _pairs("ipex_config", node, "`ipex: true` or `ipex: false`"):
        if key == "use_xpu" and _truth(key, value):
            raise ConfigError("ipex_config", "use_xpu chooses a GPU, and cputrain trains on CPUs: leave it out.")
        if key not in ("ipex", "use_xpu"):
            raise ConfigError("ipex_config", f"ipex_config knows `ipex`, found {key!r}.")
        if key == "ipex":
            found["ipex"] = _truth("ipex", value)
    return found


def _mpirun(node: Node) -> dict[str, object]:
    """Accelerate's part about mpirun: the file of hosts, and the workers of oneCCL, which are cores to us."""
    found: dict[str, object] = {}
    for key, value in _pairs("mpirun_config", node, "`mpirun_hostfile: FILE`"):
        if key == "mpirun_hostfile" and _scalar(value):
            found["hostfile"] = _text("mpirun_hostfile", value)
        elif key == "mpirun_ccl" and _scalar(value) is not None:
            found["cores_for_communication"] = _whole("mpirun_ccl", value)
        elif key not in ("mpirun_hostfile", "mpirun_ccl"):
            raise ConfigError("mpirun_config", f"mpirun_config knows mpirun_hostfile and mpirun_ccl, found {key!r}.")
    return found


def _pairs(name: str, node: Node, example: str) -> list[tuple[object, Node]]:
    """Keys and values of a mapping within the file; none if nothing is said."""
    from ruamel.yaml.nodes import MappingNode

    if isinstance(node, MappingNode):
        return [(_scalar(key), value) for key, value in node.value]
    if _scalar(node) is None:
        return []
    raise ConfigError(name, f"{name} must hold {example}.")


def _variables(node: Node) -> tuple[str, ...]:
    """A list of NAME=VALUE, or a mapping."""
    from ruamel.yaml.nodes import MappingNode, SequenceNode

    if isinstance(node, MappingNode):
        return tuple(f"{_scalar(key)}={_text(str(_scalar(key)), value)}" for key, value in node.value)
    if isinstance(node, SequenceNode):
        return tuple(_text("env", item) for item in node.value)
    raise ConfigError("env", "env must be a list of NAME=VALUE, or a mapping.")


def _scalar(node: Node) -> object:
    """The text of a scalar, None for YAML's null, and the node itself if it is a list or a mapping."""
    from ruamel.yaml.nodes import ScalarNode

    if not isinstance(node, ScalarNode):
        return node
    return None if str(node.tag).endswith(":null") else node.value


def _text(key: str, node: Node) -> str:
    value = _scalar(node)
    if not isinstance(value, str):
        raise ConfigError(key, f"{key} must be a word.")
    if key in ("downcast_bf16", "mixed_precision") and _is_truth(value):
        return "no" if value.lower() in _NO else value  # an unquoted no is false to YAML, and "no" to accelerate
    return "NO" if key == "distributed_type" and value.lower() in _NO else value


def _whole(key: str, node: Node) -> int:
    value = _scalar(node)
    if not isinstance(value, str) or not re.fullmatch(r"[+-]?\d{1,9}", value):
        raise ConfigError(key, f"{key} must be a whole number, found {_shown(value)}.")
    return int(value)


_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")


def _truth(key: str, node: Node) -> bool:
    value = _scalar(node)
    if not isinstance(value, str) or not _is_truth(value):
        raise ConfigError(key, f"{key} must be true or false, found {_shown(value)}.")
    return value.lower() in _YES


def _is_truth(value: object) -> bool:
    return isinstance(value, str) and value.lower() in (*_YES, *_NO)


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value) if isinstance(value, str) else "a list or a mapping"
