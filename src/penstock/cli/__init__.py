"""What does a person type?

Each command is declared here with its options and lives in a module of its own, imported when it is
run: ``penstock --help`` imports no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import penstock
from penstock.errors import PenstockError

USAGE_ERROR = 2
INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended."""


class _Commands(TyperGroup):
    """The one place where exceptions become exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(USAGE_ERROR) from None
        except KeyboardInterrupt:  # older typers end with status 1 here
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    name="penstock",
    help="Penstock feeds PyTorch: a drop-in DataLoader that needs no recipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def _front_desk(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Takes the options that stand before a command."""


def _checked_workers(text: str) -> str:
    if text == "auto" or text.isdecimal():
        return text
    raise typer.BadParameter(f"{text!r} is neither 'auto' nor a number such as 2")


@app.command()
def demo(
    seconds: Annotated[
        float, typer.Option(min=1.0, max=600.0, help="How long to train, in seconds.")
    ] = 12.0,
    workers: Annotated[
        str,
        typer.Option(
            metavar="auto|N", callback=_checked_workers, help="Worker processes; 0 for none."
        ),
    ] = "auto",
    images: Annotated[int, typer.Option(min=1, max=100_000, help="How many images to make.")] = 600,
) -> None:
    """Train a small model through the loader, then set its rate beside PyTorch's."""
    from penstock.cli.demo import DemoOptions, run_demo

    num_workers = "auto" if workers == "auto" else int(workers)
    run_demo(DemoOptions(train_s=seconds, num_workers=num_workers, num_images=images))


def main() -> NoReturn:
    """Run the command line and exit.

    Called from: the ``penstock`` script and ``python -m penstock``.
    """
    try:
        app(prog_name="penstock")
    except KeyboardInterrupt:  # before or after a command had the say
        sys.exit(INTERRUPTED)
    sys.exit(0)
