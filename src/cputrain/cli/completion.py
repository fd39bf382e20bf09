"""`cputrain completion bash|zsh|fish`: a script by which a shell completes commands, options and their values.

The script holds every name, so that Tab starts no Python; zsh runs bash's function. Values are completed where an
option's help lists them (`--engine auto|local`); everything else completes to files.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer

from cputrain.cli.app import command, new_app, spellings, value_name

app = new_app()
EXAMPLES = """
    eval "$(cputrain completion bash)"     in ~/.bashrc
    eval "$(cputrain completion zsh)"      in ~/.zshrc, after compinit
    cputrain completion fish > ~/.config/fish/completions/cputrain.fish
"""


class Entry(NamedTuple):
    """A command: its words ("k8s render"), what it is for, its options with their values, and commands below it."""

    path: str
    summary: str
    options: dict[str, list[str] | None]  # None: the option takes no value; []: some value
    commands: list[str]  # or the values of its argument


@command(app, EXAMPLES)
def completion(shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell that you use.")]) -> None:
    """Print a script by which your shell completes commands, options and their values."""
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in scripts:
        raise ValueError(f"completion is for {', '.join(scripts)}, found {shell!r}.")
    print(scripts[shell](list(entries())))


def entries() -> Iterator[Entry]:
    """Every command, the bare `cputrain` first."""
    from cputrain.cli import SUMMARIES, app_of, run_options

    yield Entry("", "", {"--help": None, "--version": None}, list(SUMMARIES))
    values = {name: list(known) for name, known in run_options.CHOICES.items()}
    yield Entry("run", SUMMARIES["run"], {**values, "--help": None}, [])
    yield Entry("help", SUMMARIES["help"], {}, [name for name in SUMMARIES if name != "help"])
    for name, summary in SUMMARIES.items():
        if name not in ("run", "help"):
            yield from _below(name, summary, typer.main.get_command(app_of(name)))


def _below(path: str, summary: str, found: Any) -> Iterator[Entry]:
    group = getattr(found, "commands", {})
    shown = [one for one in found.params if one.param_type_name == "option" and not one.hidden]
    options = {name: _values(one) for one in shown for name in spellings([*one.opts, *one.secondary_opts])}
    arguments = [one.metavar or "" for one in found.params if one.param_type_name == "argument"]
    values = [value for name in arguments if "|" in name for value in name.split("|")]
    yield Entry(path, summary, {**options, "--help": None}, [*group, *values])
    for name, one in group.items():
        yield from _below(f"{path} {name}", (one.help or "").partition(".")[0], one)


def _values(option: Any) -> list[str] | None:
    name = value_name(option)
    return None if not name else name.split("|") if "|" in name else []


# --- Scripts -----------------------------------------------------------------------------------------------------

_BASH = """\
_cputrain() {
    local word="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" path="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${COMP_WORDS[i]}" in
            %(paths)s) path="$path ${COMP_WORDS[i]}" ;;
            *.py) COMPREPLY=(); return ;;  # what follows belongs to the script
        esac
    done
    case "$path $previous" in
%(values)s
    esac
    case "$path" in
%(words)s
    esac
    case "$word" in
        -*) ;;
        *) words="${words%%%% -*}"; case "$words" in -*) words="" ;; esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _cputrain cputrain"""


def _bash(found: list[Entry]) -> str:
    """Commands stand before options in `words`: where no option was begun, only they are offered, or files."""
    paths = "|".join(f'" {one.path}"' for one in found if one.path)
    patterns: dict[str, list[str]] = {}
    for one in found:
        for name, known in one.options.items():
            if known is not None:
                patterns.setdefault(" ".join(known), []).append(f'"{_in_path(one)} {name}"')
    values = [
        f"""        {"|".join(names)}) COMPREPLY=($(compgen -W "{known}" -- "$word")); return ;;"""
        for known, names in patterns.items()
    ]
    words = [f"""        "{_in_path(one)}") words="{" ".join([*one.commands, *one.options])}" ;;""" for one in found]
    return _BASH % {"paths": paths, "values": "\n".join(values), "words": "\n".join(words)}


def _in_path(entry: Entry) -> str:
    return f" {entry.path}" if entry.path else ""


def _zsh(found: list[Entry]) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(found)}"


def _fish(found: list[Entry]) -> str:
    lines = ["complete -c cputrain -n __fish_use_subcommand -f"]
    summaries = {one.path: one.summary for one in found}
    for one in found:
        words = one.path.split()
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words) or "__fish_use_subcommand"
        below = " ".join(one.commands)
        for name in one.commands:
            text = shlex.quote(summaries.get(f"{one.path} {name}".strip(), ""))
            only = f"{seen}; and not __fish_seen_subcommand_from {below}" if words else seen
            lines.append(f"complete -c cputrain -n {shlex.quote(only)} -f -a {name} -d {text}")
        for name, known in one.options.items():
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            value = "" if known is None else f" -x -a {shlex.quote(' '.join(known))}" if known else " -r"
            lines.append(f"complete -c cputrain -n {shlex.quote(seen)} {kind}{value}")
    return "\n".join(lines)
