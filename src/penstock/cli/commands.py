"""Each command is declared here with its options, and lives in a module of its own.

That one is imported when it is run: ``penstock --help`` imports no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import penstock
from penstock.cli import INTERRUPTED, USAGE_ERROR
from penstock.cli.options import (
    Arguments,
    BatchSize,
    Counts,
    Data,
    Epochs,
    Gpu,
    Json,
    Loader,
    MaxBatches,
    Target,
    Timeout,
    VerifyTimeout,
    Watch,
    Workers,
    checked_conv,
    checked_counts,
    checked_place,
    checked_policy,
    checked_start,
    checked_workers,
)
from penstock.cli.run_line import num_own
from penstock.cli.trace import app as trace_commands
from penstock.errors import PenstockError


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


app.add_typer(trace_commands, name="trace", no_args_is_help=True)


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


@app.command()
def demo(
    seconds: Annotated[
        float, typer.Option(min=1.0, max=600.0, help="How long to train, in seconds.")
    ] = 12.0,
    workers: Annotated[
        str,
        typer.Option(
            metavar="auto|N", callback=checked_workers, help="Worker processes; 0 for none."
        ),
    ] = "auto",
    images: Annotated[int, typer.Option(min=1, max=100_000, help="How many images to make.")] = 600,
    page: Annotated[Path, typer.Option(help="Where the page with the timeline goes.")] = Path(
        "penstock-demo.html"
    ),
) -> None:
    """Train a small model through the loader, set its rate beside PyTorch's, show the timeline."""
    from penstock.cli.demo import DemoOptions, run_demo

    num_workers = "auto" if workers == "auto" else int(workers)
    options = DemoOptions(train_s=seconds, num_workers=num_workers, num_images=images, page=page)
    run_demo(options)


@app.command()
def doctor(
    target: Target = None,
    arguments: Arguments = None,
    as_json: Json = False,
    gpu: Gpu = False,
    watch: Watch = False,
    data: Data = None,
    batch_size: BatchSize = None,
    workers: Workers = "auto",
    timeout: Timeout = 60.0,
) -> None:
    """Say what this machine is, what would be done here, and what is wrong, with its cure."""
    if watch:
        from penstock.cli.doctor.watch import run_watch

        raise typer.Exit(run_watch(as_json=as_json))
    from penstock.cli.doctor.command import DoctorOptions, run_doctor

    options = DoctorOptions(
        target=target,
        arguments=tuple(arguments or ()),
        folders=tuple(data or ()),
        as_json=as_json,
        asks_torch=gpu,
        batch_size=batch_size,
        num_workers=None if workers == "auto" else int(workers),
        limit_s=timeout,
    )
    raise typer.Exit(run_doctor(options))


@app.command()
def verify(
    target: Loader = None,
    arguments: Arguments = None,
    epochs: Epochs = 2,
    max_batches: MaxBatches = None,
    workers: Counts = "0,1,2,5",
    as_json: Json = False,
    timeout: VerifyTimeout = 600.0,
) -> None:
    """Say whether a loader gives the same bits whatever loads them; alone: this machine's training.

    Exit status: 0 the same, 1 different, 2 usage.
    """
    from penstock.cli.verify import VerifyOptions, run_verify

    options = VerifyOptions(
        target=target,
        arguments=tuple(arguments or ()),
        epochs=epochs,
        max_batches=max_batches,
        workers=tuple(int(part) for part in workers.split(",")),
        as_json=as_json,
        limit_s=timeout,
    )
    raise typer.Exit(run_verify(options))


@app.command()
def pack(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A folder of images, or SCRIPT.py:DATASET.")
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="A new folder.")],
    workers: Workers = "auto",
    on_error: Annotated[
        str,
        typer.Option(metavar="raise|skip|replace", help="What becomes of bad samples."),
    ] = "raise",
    encoding: Annotated[
        str | None, typer.Option(metavar="keep|jpeg|raw", help="How images are stored.")
    ] = None,
    longer_side: Annotated[int | None, typer.Option(min=1, help="Shrink images to this.")] = None,
    quality: Annotated[int | None, typer.Option(min=1, max=100, help="Of JPEG.")] = None,
    on: Annotated[str, typer.Option(metavar="here|ray", help="Who does the work.")] = "here",
) -> None:
    """Write a dataset to a folder that is read at the speed of memory; stopped, it goes on."""
    from penstock.cli.pack import PackOptions, run_pack

    options = PackOptions(
        source=source,
        target=target,
        workers=workers,
        on_error=checked_policy(on_error),
        encoding=encoding,
        longer_side=longer_side,
        quality=quality,
        on=checked_place(on),
    )
    raise typer.Exit(run_pack(options))


@app.command()
def bench(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCRIPT:NAME | FOLDER]",
            help="A dataset or loader, or a folder of pictures; without: pictures made here.",
        ),
    ] = None,
    arguments: Arguments = None,
    batch_size: BatchSize = None,
    workers: Annotated[
        str, typer.Option(metavar="N,N,...", help="To try; else by the cores.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, max=600.0, help="For each setting.")] = 2.0,
    out: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help=".json or .html; several times.")
    ] = None,
) -> None:
    """Measure how fast a dataset loads here, stage by stage and setting by setting."""
    from penstock.cli.bench.command import BenchOptions, run_bench

    if workers:
        checked_counts(workers)
    options = BenchOptions(
        target=target,
        arguments=tuple(arguments or ()),
        batch_size=batch_size,
        workers=tuple(int(part) for part in workers.split(",")) if workers else (),
        seconds=seconds,
        out=tuple(out or ()),
    )
    run_bench(options)


class _RunCommand(TyperCommand):
    """Everything behind the script, or behind ``-m``, is the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = num_own(args)
        if place and args[place - 1] == "-m":
            args = [*args[:place], "--", *args[place:]]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # typers have click under several names
                error.message += ". The script's own stand behind it"  # type: ignore[attr-defined]
            raise


_pending: list[Any] = []


@app.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="Or -m MODULE.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The script's own.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed everything; the same bits each time.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="auto|N", help="In the place of what the script says.")
    ] = None,
    start_method: Annotated[
        str | None,
        typer.Option(
            metavar="spawn|fork",
            callback=checked_start,
            help="In the place of what the script says.",
        ),
    ] = None,
    persistent_workers: Annotated[
        bool,
        typer.Option(
            "--persistent-workers", help="Keep workers between epochs, whatever the script says."
        ),
    ] = False,
    on_error: Annotated[
        str,
        typer.Option(
            metavar="raise|skip|replace",
            callback=checked_policy,
            help="What becomes of bad samples.",
        ),
    ] = "raise",
    max_bad: Annotated[
        float | None, typer.Option(help="Bad samples allowed in an epoch; below 1: the part.")
    ] = None,
    bad_samples_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="A line of JSON for each bad sample.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Workers replaced within ten minutes.")
    ] = 100,
    sample_timeout_s: Annotated[
        float | None, typer.Option(help="A sample that takes longer hangs.")
    ] = None,
    conv: Annotated[
        str | None,
        typer.Option(
            metavar="auto|on|off",
            callback=checked_conv,
            help="Convolutions without the GPU's library: where it is broken, or all.",
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="The timeline: .html to look at, or .json.")
    ] = None,
) -> None:
    """Run a training script, unchanged, with Penstock under its DataLoaders.

    Exit status: the script's.
    """
    from penstock.cli.run_checks import make_options

    if workers is not None:
        checked_workers(workers)
    _pending.append(
        make_options(
            target=target,
            arguments=arguments,
            is_module=is_module,
            seed=seed,
            workers=workers,
            start_method=start_method,
            persistent_workers=persistent_workers,
            on_error=on_error,
            max_bad=max_bad,
            bad_samples_file=bad_samples_file,
            max_restarts=max_restarts,
            sample_timeout_s=sample_timeout_s,
            conv=conv,
            trace=trace,
        )
    )


def run_command() -> NoReturn:
    """What was typed, to its end."""
    try:
        app(prog_name="penstock")
    except KeyboardInterrupt:  # before or after a command had the say
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code or not _pending:
            raise
    if _pending:  # not from inside a command: the script's exceptions are not ours
        from penstock.cli.run import run_to_end

        run_to_end(_pending.pop())
    sys.exit(0)
