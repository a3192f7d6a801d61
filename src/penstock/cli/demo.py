"""``penstock demo``: a small training through the loader, and a comparison with PyTorch's loader.

Makes pictures, shows the plan, trains a small model, times the two loaders, and ends with the
timeline of the training: what limited it, and a page to look at. Nothing is downloaded. Numbers
that speak for PyTorch are printed like the others.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.cli.demo_images import KINDS, GeneratedImages
from penstock.cli.loader_comparison import LoaderComparison, print_comparison
from penstock.cli.loader_timing import LoaderTiming, take_turns, time_loader
from penstock.cli.parser import CommandParser, add_loader_options, number
from penstock.errors import BadTrace
from penstock.machine.collect import machine

if TYPE_CHECKING:
    import torch

    from penstock.loader import DataLoader
    from penstock.planning.plan import Plan
    from penstock.trace.timeline import Timeline

BATCH_SIZE = 64
NUM_TURNS = 5
WARM_UP_S, WINDOW_S = 0.4, 1.0
"""Fifteen turns of this with starts of workers take about 25 s: with the training, well under a
minute on 2 cores."""


def add_arguments(parser: CommandParser) -> None:
    """Called from: :mod:`penstock.cli.parser`."""
    parser.add_value(
        "--seconds", "S", number(float, 1, 600), "How long to train, in seconds.", default=12.0
    )
    add_loader_options(
        parser, "num_workers", help={"num_workers": "The number of workers; auto if not given."}
    )
    parser.add_value(
        "--images", "N", number(int, 1, 100_000), "How many images to make.", default=600
    )
    parser.add_value(
        "--page",
        "FILE",
        Path,
        "Where the page with the timeline goes.",
        default=Path("penstock-demo.html"),
    )


def execute(options: argparse.Namespace) -> None:
    """Do all of it, printing as it goes."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        _show(Console(), GeneratedImages(Path(folder), options.images), options)


def _show(console: Console, images: GeneratedImages, options: argparse.Namespace) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    console.print(f"Penstock, with torch {torch.__version__}, training on: {device}\n")
    asked = "auto" if options.num_workers is None else options.num_workers
    loader = _make_loader("penstock", images, asked, trace=True)
    _show_plan(console, loader.plan)
    console.print(
        "\nTraining a small CNN to tell flat and upright ellipses, discs and rings apart, "
        f"for {options.seconds:g} s"
    )
    first_batch_s = _train(console, loader, device, options.seconds)
    if asked == "auto":
        console.print(f"  num_workers='auto' became {loader.plan.num_workers}")
    num_workers = 0 if asked == 0 else loader.num_workers or machine().usable_cores
    console.print(
        f"\nLoading alone: the same images in batches of {BATCH_SIZE}, {num_workers} workers each; "
        f"{NUM_TURNS} turns each, in alternation"
    )
    comparison = _compare(console, images, num_workers, first_batch_s)
    print_comparison(console, comparison)
    _show_timeline(loader.timeline(), options.page, console)


def _show_timeline(timeline: Timeline, page: Path, console: Console) -> None:
    console.print("\nWhere the time of the training went")
    timeline.show()
    try:
        timeline.save(page)
    except (BadTrace, OSError) as error:
        told = f"The page of it could not be written: {str(error).splitlines()[0]}"
    else:
        told = f"Every batch on its way through the workers, to zoom into: open {page} in a browser"
    console.print(told, highlight=False, markup=False, soft_wrap=True)


def _make_loader(
    whose: str, images: GeneratedImages, num_workers: int | str, **keywords: Any
) -> DataLoader[Any]:
    """A loader that draws images at random without end; the same for both sides."""
    import torch.utils.data

    from penstock.loader import DataLoader

    sampler = torch.utils.data.RandomSampler(images, replacement=True, num_samples=10**9)
    make: Any = torch.utils.data.DataLoader if whose == "torch" else DataLoader
    loader: DataLoader[Any] = make(
        images, batch_size=BATCH_SIZE, sampler=sampler, num_workers=num_workers, **keywords
    )
    return loader


def _show_plan(console: Console, plan: Plan) -> None:
    table = Table("choice", "value", "why", title="The loader's plan", title_justify="left")
    for name, choice in plan.choices.items():
        table.add_row(name, str(choice.value), f"{choice.source}: {choice.reason}")
    console.print(table)


# Training


def _make_model() -> torch.nn.Module:
    from torch import nn

    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64 * 16, len(KINDS)))


def _train(console: Console, loader: DataLoader[Any], device: str, limit_s: float) -> float:
    """Train and say how it went; returns what the first batch took."""
    step = _make_step(device)
    num_images, stall_s, losses = 0, 0.0, []
    accuracies: deque[float] = deque(maxlen=10)
    with _progress(console, limit_s, "{task.fields[note]}") as report:
        start_s = time.perf_counter()
        batches = iter(loader)
        batch = next(batches)
        first_s = now = time.perf_counter()
        while now - first_s < limit_s:
            loss, accuracy = step(*batch)
            losses.append(loss)
            accuracies.append(accuracy)
            num_images += len(batch[0])
            asked_s = time.perf_counter()
            batch = next(batches)
            now = time.perf_counter()
            stall_s += now - asked_s
            report(now - first_s, f"loss {loss:.2f}, {num_images / (now - first_s):,.0f} images/s")
    elapsed_s = now - first_s
    console.print(
        f"  {num_images:,} images in {elapsed_s:.1f} s, {num_images / elapsed_s:,.0f} a second; "
        f"{stall_s / elapsed_s:.0%} of the time went by waiting for data"
    )
    console.print(
        f"  loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last; "
        f"{sum(accuracies) / len(accuracies):.0%} of the last images were told right"
    )
    return first_s - start_s


def _make_step(device: str) -> Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]:
    """A function that learns from one batch; returns the loss and the share of right guesses."""
    import torch

    torch.manual_seed(0)
    model = _make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_of = torch.nn.CrossEntropyLoss()

    def step(images: torch.Tensor, kinds: torch.Tensor) -> tuple[float, float]:
        images, kinds = images.to(device), kinds.to(device)
        guesses = model(images)
        loss = loss_of(guesses, kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), (guesses.argmax(1) == kinds).float().mean().item()

    return step


# The comparison


def _compare(
    console: Console, images: GeneratedImages, num_workers: int, cold_s: float
) -> LoaderComparison:
    failures: list[str] = []

    def turn(whose: str) -> LoaderTiming | None:
        count = 0 if whose == "alone" else num_workers
        try:
            return time_loader(
                lambda: _make_loader(whose, images, count),
                warm_up_s=WARM_UP_S,
                window_s=WINDOW_S,
            )
        except RuntimeError as error:
            if whose != "torch":
                raise
            failures.append(str(error))  # a small /dev/shm ends its workers: that is a result
            return None

    names = ("penstock", "torch", "alone") if num_workers else ("penstock", "torch")
    with _progress(console, NUM_TURNS * len(names), "") as report:
        turns_done = iter(range(NUM_TURNS * len(names)))
        found = take_turns(
            {name: partial(turn, name) for name in names},
            NUM_TURNS,
            on_turn=lambda _: report(next(turns_done), ""),
        )
    timings = {name: [one for one in turns if one is not None] for name, turns in found.items()}
    return LoaderComparison(
        batch_size=BATCH_SIZE,
        num_workers=num_workers,
        cold_s=cold_s if num_workers else None,
        ours=timings["penstock"],
        theirs=[] if failures else timings["torch"],
        alone=timings.get("alone", ()),
        failure=failures[0] if failures else None,
    )


@contextmanager
def _progress(console: Console, total: float, note: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on a terminal, nothing in a pipe; yields what moves it on."""
    if not console.is_terminal:
        yield lambda done, text: None
        return
    columns = (BarColumn(), TextColumn(note), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, note="")
        yield lambda done, text: progress.update(task, completed=done, note=text)
