"""Tab in a real bash: commands, options and values are offered as a person would type them; else files are."""

from __future__ import annotations

import subprocess

import pytest

from cputrain.cli import SUMMARIES, completion

SCRIPT = completion._bash(list(completion.entries()))


def offered(*words: str) -> list[str]:
    """What bash offers for the last word."""
    typed = " ".join(f'"{word}"' for word in ("cputrain", *words))
    ask = f'{SCRIPT}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}; _cputrain; printf "%s\\n" "${{COMPREPLY[@]}}"'
    answer = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=False)
    assert answer.returncode == 0 and not answer.stderr, answer.stderr
    return answer.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["la"], ["launch"]),
        (["--v"], ["--version"]),
        (["run", "--dt"], ["--dtype"]),
        (["run", "--dtype", ""], ["auto", "fp32", "bf16", "int16"]),
        (["launch", "--engine", "m"], ["mpi"]),
        (["launch", "--engine", "mpi", "--num_pr"], ["--num_processes"]),
        (["k8s", "re"], ["render"]),
        (["k8s", "render", "--kind", "t"], ["trainjob"]),
        (["slurm", "render", "--part"], ["--partition"]),
        (["help", "k8"], ["k8s"]),
        (["completion", "f"], ["fish"]),
        (["launch", "--config_file", ""], []),  # bash completes files where nothing is offered
        (["launch", ""], []),
        (["run", "train.py", "--dt"], []),  # the script's own
    ],
)
def test_bash_offers(words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_all_commands_are_offered() -> None:
    assert offered("") == list(SUMMARIES)


def test_zsh_runs_bashs_function_and_fish_has_a_line_for_each_name() -> None:
    found = list(completion.entries())
    assert completion._zsh(found).endswith(SCRIPT)
    lines = completion._fish(found).splitlines()
    assert (
        "complete -c cputrain -n '__fish_seen_subcommand_from launch' -l engine -x -a 'auto local mpi torchrun'"
        in lines
    )
    render = "'__fish_seen_subcommand_from k8s; and __fish_seen_subcommand_from render'"
    assert f"complete -c cputrain -n {render} -l image -r" in lines
    assert len(lines) > sum(len(one.options) for one in found)


def test_another_shell_is_refused() -> None:
    with pytest.raises(ValueError, match="completion is for bash, zsh, fish, found 'csh'"):
        completion.completion("csh")
