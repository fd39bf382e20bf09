"""Typer's commands with help pages of ours. Each module of a sub-command has one `app`, made by `new_app`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from cputrain.cli.terminal import Rows, help_page

_HELP = {"help_option_names": ["-h", "--help"]}


def new_app(**settings: Any) -> typer.Typer:
    """An app whose errors are plain sentences. If it has several commands, `epilog` is its own examples."""
    return typer.Typer(
        cls=Group,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich's table of options cuts long names short
        context_settings=_HELP,
        **settings,
    )


def command(app: typer.Typer, examples: str, cls: type[Command] | None = None, **settings: Any) -> Any:
    """Decorates a function that is a command. `settings` are click's, e.g. allow_interspersed_args=False."""
    return app.command(cls=cls or Command, epilog=examples, context_settings={**_HELP, **settings})


def option(text: str, *names: str, metavar: str | None = None, hidden: bool = False) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, hidden=hidden)


def setting(text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """A field of a dataclass that `with_fields` turns into an option."""
    return field(default=default, metadata={"option": option(text, *names, **more)})


def with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """The parameter that is a dataclass becomes one option for each of its fields, at the same place."""
    signature = inspect.signature(command, eval_str=True)
    [group] = [one for one in signature.parameters.values() if is_dataclass(one.annotation)]
    options = _parameters(group.annotation)
    listed: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        listed += options if one is group else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        chosen = group.annotation(**{option.name: given.pop(option.name) for option in options})
        command(**given, **{group.name: chosen})

    called.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return called


def _parameters(group: Any) -> list[inspect.Parameter]:
    types, kind = get_type_hints(group), inspect.Parameter.KEYWORD_ONLY
    options = [(one, Annotated[types[one.name], one.metadata["option"]]) for one in fields(group)]
    return [inspect.Parameter(one.name, kind, default=one.default, annotation=hint) for one, hint in options]


def run(app: typer.Typer, name: str, arguments: list[str]) -> None:
    """Runs `cputrain NAME ARGUMENTS`, and ends the process."""
    found: Any = typer.main.get_command(app)
    below = getattr(found, "commands", {}).get(arguments[0]) if arguments else None
    if below is None:
        found.main(args=arguments, prog_name=f"cputrain {name}")
    else:  # not through its group, for whose options typer would import pydantic
        below.main(args=arguments[1:], prog_name=f"cputrain {name} {arguments[0]}")


class Command(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_argument, arguments)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_page(self, ctx, []))


class Group(TyperGroup):
    """Several commands under one name. Without any, its help is shown, which is no mistake."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["COMMAND [ARGUMENTS]..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        texts = {name: " ".join((command.help or "").split()) for name, command in self.commands.items()}
        first = [(name, f"{text.partition('. ')[0].rstrip('.')}.") for name, text in texts.items()]
        formatter.write(_page(self, ctx, first))


def _page(command: Any, ctx: Any, commands: Rows) -> str:
    shown = [one for one in command.get_params(ctx) if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    options = [one for one in shown if one.param_type_name == "option"]
    lists = [
        ("Arguments", [(argument_name(one), one.help or "") for one in arguments]),
        ("Commands", commands),
        ("Options", [(_option(one), _meaning(one)) for one in options]),
    ]
    return help_page(
        [" ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])], command.help, lists, command.epilog
    )


def argument_name(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _argument(argument: Any) -> str:
    name = argument_name(argument) if argument.required else f"[{argument_name(argument)}]"
    return f"{name}..." if argument.nargs == -1 else name


def spellings(names: list[str]) -> list[str]:
    """Short ones first; of --num_machines and --num-machines, which both work, the one that was declared first."""
    seen: dict[str, str] = {}
    for name in names:
        seen.setdefault(name.strip().replace("_", "-"), name.strip())
    return sorted(seen.values(), key=lambda name: name.startswith("--"))


def value_name(option: Any) -> str:
    """What stands for an option's value: as declared, else the last word of its name. A flag has none."""
    if option.is_flag or getattr(option, "count", False):
        return ""
    return option.metavar or spellings(option.opts)[-1].replace("_", "-").rpartition("-")[2].upper()


def _option(option: Any) -> str:
    names = ", ".join(spellings(option.opts))
    if option.secondary_opts:
        names += f" / {spellings(option.secondary_opts)[0]}"
    return f"{names} {value_name(option)}".rstrip()


def _meaning(option: Any) -> str:
    default = option.default
    if "--help" in option.opts:
        return "Show this page."
    if option.is_flag or default is None or callable(default) or default in ("", (), []):
        return option.help or ""
    return f"{option.help} (default: {default})"
