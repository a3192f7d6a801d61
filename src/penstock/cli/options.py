"""What several commands take: options with their help, and what they may be."""

from __future__ import annotations

from typing import Annotated

import typer


def checked_workers(text: str) -> str:
    if text == "auto" or text.isdecimal():
        return text
    raise typer.BadParameter(f"{text!r} is neither 'auto' nor a number such as 2")


def checked_policy(text: str) -> str:
    if text in ("raise", "skip", "replace"):
        return text
    raise typer.BadParameter(f"{text!r} is none of raise, skip, replace")


def checked_start(text: str | None) -> str | None:
    if text in (None, "spawn", "fork", "forkserver"):
        return text
    raise typer.BadParameter(f"{text!r} is neither spawn nor fork")


def checked_conv(text: str | None) -> str | None:
    if text in (None, "auto", "on", "off"):
        return text
    raise typer.BadParameter(f"{text!r} is none of auto, on, off")


def checked_counts(text: str) -> str:
    if text and all(part.strip().isdecimal() for part in text.split(",")):
        return text
    raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0,1,2,5")


def checked_place(text: str) -> str:
    if text in ("here", "ray"):
        return text
    raise typer.BadParameter(f"{text!r} is neither here nor ray")


Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[SCRIPT:NAME | BAD.JSONL]",
        help="A dataset or loader to try, or a list of bad samples.",
    ),
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="The script's own.")
]
Json = Annotated[bool, typer.Option("--json", help="For a program.")]
Gpu = Annotated[
    bool, typer.Option("--gpu", help="Ask torch which GPUs it can use, and time copies to them.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Show what the GPUs are doing.")]
Data = Annotated[
    list[str] | None, typer.Option(metavar="PATH", help="Where the data lies; several times.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Samples in a batch; the loader's, or 32.")
]
Workers = Annotated[
    str, typer.Option(metavar="auto|N", callback=checked_workers, help="As planned, or N.")
]
Timeout = Annotated[float, typer.Option(min=1.0, max=86_400.0, help="Seconds for a trial.")]
Loader = Annotated[
    str | None,
    typer.Argument(
        metavar="[SCRIPT:NAME]",
        help="A function that makes a loader (num_workers=... if it takes it), or a loader.",
    ),
]
Epochs = Annotated[int, typer.Option(min=1, max=1000, help="Epochs to compare.")]
MaxBatches = Annotated[int | None, typer.Option(min=1, help="Compare only so many of each epoch.")]
VerifyTimeout = Annotated[float, typer.Option(min=1.0, max=86_400.0, help="Seconds for it all.")]
Counts = Annotated[
    str,
    typer.Option(
        metavar="N,N,...", callback=checked_counts, help="Workers; the first is the reference."
    ),
]
