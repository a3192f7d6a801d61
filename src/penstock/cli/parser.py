"""The command-line parser: argparse, with one subparser for each command.

A command is a module with ``add_arguments(parser)`` and ``execute(options)``. The module is
imported when its arguments are parsed or its help is shown. ``penstock --help`` therefore imports
no command, and no command imports the others.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from penstock import __version__
from penstock.errors import BadArgument

if TYPE_CHECKING:
    from penstock.options import Option

COMMANDS = {
    "demo": (
        "penstock.cli.demo",
        "Show what Penstock does beside PyTorch's loader: same bits, faults, speed, the timeline.",
        "penstock demo",
    ),
    "doctor": (
        "penstock.cli.doctor.command",
        "Describe this machine and the plan for it, and list problems with fixes.",
        "penstock doctor train.py:dataset -- --data photos/",
    ),
    "verify": (
        "penstock.cli.verify",
        "Check that a loader gives the same bits for any number of workers. Without a target, "
        "check that training on this machine is reproducible.",
        "penstock verify train.py:make_loader",
    ),
    "pack": (
        "penstock.cli.pack",
        "Write a dataset to a folder that can be read at memory speed. Interrupted runs resume.",
        "penstock pack photos/ packed/",
    ),
    "bench": (
        "penstock.cli.bench",
        "Measure how fast a dataset loads, by stage and by number of workers.",
        "penstock bench train.py:dataset",
    ),
    "run": (
        "penstock.cli.run",
        "Run a training script, unchanged, with Penstock behind its DataLoaders.",
        "penstock run --trace run.json train.py --epochs 3",
    ),
    "top": (
        "penstock.cli.top",
        "Show the loaders that run now: rates, waits, workers, and the bottleneck (Linux).",
        "penstock top",
    ),
    "trace": (
        "penstock.cli.trace",
        "Show, convert and compare the traces of DataLoader(trace=...) and run --trace.",
        "penstock trace show run.json",
    ),
}
"""The module, the summary and an example of each command."""


def make_parser() -> CommandParser:
    """Return the parser of ``penstock``, with all commands."""
    parser = CommandParser(
        prog="penstock",
        description="Penstock is a drop-in DataLoader for PyTorch.",
        example="penstock run --trace run.html train.py",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"penstock {__version__}",
        help="Show the version.",
    )
    commands = parser.add_commands()
    for name, (module, summary, example) in COMMANDS.items():
        commands.add_parser(name, help=summary, description=summary, example=example, module=module)
    return parser


class CommandParser(argparse.ArgumentParser):
    """An argument parser with Penstock's messages and help format.

    Args:
        module: The module of a command. It is imported before the parser is first used, and its
            ``add_arguments`` is called with the parser.
        example: A command line, for the help.
    """

    def __init__(self, *, module: str | None = None, example: str = "", **keywords: Any) -> None:
        super().__init__(
            allow_abbrev=False, add_help=False, formatter_class=_formatter_for(80), **keywords
        )
        self.color = False  # Python 3.14 would add its own colors
        self.unknown_option_hint = ""
        self.example = example
        self._module = module
        self._has_script_arguments = False
        self._commands: Any = None
        self._positionals.title, self._optionals.title = "Arguments", "Options"
        self.add_argument("-h", "--help", action="help", help="Show this help.")

    def add_commands(self) -> Any:
        """Enable subcommands. Call ``add_parser`` on the returned object to add one."""
        self._commands = self.add_subparsers(
            title="Commands",
            dest="command",
            required=True,
            metavar="COMMAND [ARGUMENTS]...",
            prog=self.prog,
            parser_class=type(self),
        )
        return self._commands

    def add_value(
        self, flag: str, metavar: str, read: Callable[[str], Any], help: str, **keywords: Any
    ) -> None:
        """Add an option that takes a value. ``keywords`` are passed to ``add_argument``."""
        self.add_argument(flag, metavar=metavar, type=read, help=help, **keywords)

    def add_script_arguments(self) -> None:
        """Accept arguments for the user's script after ``--``, as ``options.arguments``."""
        self._has_script_arguments = True
        self.add_argument(
            "arguments", nargs="*", metavar="[-- ARGUMENTS]", help="Arguments for the script."
        )

    def subcommands(self) -> Iterator[tuple[str, CommandParser]]:
        """Yield every command that has no subcommands, with its full name."""
        self._declare()
        for parser in () if self._commands is None else self._commands.choices.values():
            yield from parser.subcommands()
        if self._commands is None:
            yield self.prog, self

    def _declare(self) -> None:
        if self._module is not None:
            module = importlib.import_module(self._module)
            self._module = None
            module.add_arguments(self)
            if self._commands is None:
                self.set_defaults(execute=module.execute)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._declare()
        line, behind = list(sys.argv[1:] if args is None else args), []
        if self._commands is not None and not line:
            self.print_help()
            self.exit(2)
        if self._has_script_arguments and "--" in line:
            place = line.index("--")
            line, behind = line[:place], line[place + 1 :]
        options, unknown = super().parse_known_args(line, namespace)
        if unknown:
            is_option = unknown[0].startswith("-")
            kind = "No such option" if is_option else "Unexpected argument"
            near = difflib.get_close_matches(unknown[0], self._option_string_actions, n=1)
            hint = f". Did you mean {near[0]}?" if near else "."
            if self.unknown_option_hint:
                hint += f" {self.unknown_option_hint}"
            self.error(f"{kind}: {unknown[0]}{hint.rstrip('.') if is_option else ''}")
        if self._has_script_arguments:
            options.arguments = [*options.arguments, *behind]
        return options, []

    def error(self, message: str) -> NoReturn:
        message = message.replace("the following arguments are required", "Missing argument")
        message = message.removesuffix(", [-- ARGUMENTS]")  # optional
        self.print_usage(sys.stderr)
        self.exit(2, f"Try '{self.prog} --help' for help.\n\nError: {message}\n")

    # -- help --------------------------------------------------------------------------------------

    def format_usage(self) -> str:
        self._declare()
        arguments = [
            action.metavar or action.dest.upper()
            for action in self._actions
            if not action.option_strings
        ]
        self.usage = " ".join(["%(prog)s", "[OPTIONS]", *map(str, arguments)])
        return super().format_usage()

    def format_help(self) -> str:
        self.format_usage()  # sets self.usage, which the help starts with
        example = f"\nExample: {self.example}\n" if self.example else ""
        return super().format_help() + example

    def print_help(self, file: Any = None) -> None:
        from rich.console import Console
        from rich.text import Text

        console = Console(file=file, highlight=False)
        self.formatter_class = _formatter_for(min(console.width, 100))
        text = Text(self.format_help().rstrip())
        text.highlight_regex(r"(?m)^(Usage|Arguments|Options|Commands|Example):", "bold")
        text.highlight_regex(r"(?m)(?<![\w-])--?[a-z][a-z-]*", "cyan")
        if self._commands is not None:
            names = "|".join(self._commands.choices)
            text.highlight_regex(rf"(?m)^  ({names})\b", "cyan")
        console.print(text, soft_wrap=True)


class _HelpFormatter(argparse.HelpFormatter):
    """Writes ``Usage:`` as a title and shows defaults, except None, False and empty lists."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, "Usage: ")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS) or not action.option_strings:
            return action.help
        return f"{action.help} [default: %(default)s]"

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(
            action, argparse._SubParsersAction
        ):  # skips its metavar, which repeats the title
            subactions = list(action._get_subactions())
            return "".join(map(self._format_action, subactions))
        return super()._format_action(action)


def _formatter_for(width: int) -> Any:
    """Return the formatter class. The explicit width avoids a query of the terminal."""
    return functools.partial(_HelpFormatter, max_help_position=32, width=width)


# -- options and their values ----------------------------------------------------------------------


def add_loader_options(
    parser: argparse.ArgumentParser, *names: str, help: Mapping[str, str] | None = None
) -> None:
    """Add options with the flag, check, default and help declared in :mod:`penstock.options`.

    Args:
        help: Help texts, by option name, that replace the declared ones.
    """
    from penstock.options import PatchOptions, options_of

    for name in names:
        option = options_of(PatchOptions)[name]
        summary = re.sub(r":\w+:`([^`]*)`", r"\1", option.help).replace("``", "")
        summary = (help or {}).get(name) or summary.partition(". ")[0].rstrip(".") + "."
        if option.metavar:
            keywords: dict[str, Any] = {"metavar": option.metavar, "type": _reader(option)}
        else:
            keywords = {"action": "store_true"}
        parser.add_argument(
            option.flag, dest=name, default=option.default, help=summary, **keywords
        )


def _reader(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = option.parse(text)
        except ValueError:
            words = {"auto|N": "auto, 0, 1, 2, ...", "N": "an integer"}
            expected = words.get(option.metavar, option.metavar)
            raise argparse.ArgumentTypeError(f"{text!r} must be {expected}") from None
        try:
            return option.check(option.flag, value)
        except BadArgument as error:
            value = re.search(r"=(?:'([^']+)'|([\w.]+))", error.remedy or "")
            remedy = f"\n  Try: {option.flag} {value[1] or value[2]}" if value else ""
            raise argparse.ArgumentTypeError(f"[{error.code}] {error.what}{remedy}") from None

    return read


def number(
    kind: Callable[[str], Any], low: float, high: float | None = None
) -> Callable[[str], Any]:
    """Return a function that parses an int or a float from ``low`` to ``high``."""

    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= (value if high is None else high):
            bounds = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text} must be {bounds}")
        return value

    read.__name__ = kind.__name__  # argparse shows this name if the text cannot be parsed
    return read


def percent(text: str) -> float:
    """Parse a share such as ``10%``.

    Example:
        >>> percent("12.5%")
        0.125
    """
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%", text)
    if found is None or float(found[1]) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} must be a percentage such as 10%")
    return float(found[1]) / 100


def one_of(*words: str) -> Callable[[str], str]:
    """Return a function that accepts one of ``words``."""

    def read(text: str) -> str:
        if text in words:
            return text
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(words)}")

    return read


def worker_counts(text: str) -> tuple[int, ...]:
    """Parse a list of numbers such as ``0,1,2,5``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1,2,5")
    return tuple(map(int, parts))
