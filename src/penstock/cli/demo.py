"""``penstock demo``: trains a small model and compares the loader with PyTorch's loader.

It generates images, shows the plan, trains a small model, and times both loaders. It ends with the
timeline of the training: the bottleneck, and an HTML page. Nothing is downloaded. The results are
printed even where PyTorch's loader is faster.
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
"""Fifteen turns, including the start of workers, take about 25 s. With the training, the demo takes
well under a minute on 2 cores."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.add_value("--seconds", "S", number(float, 1, 600), "Seconds to train.", default=12.0)
    add_loader_options(
        parser, "num_workers", help={"num_workers": "Number of workers. By default, auto."}
    )
    parser.add_value(
        "--images", "N", number(int, 1, 100_000), "Number of images to generate.", default=600
    )
    parser.add_value(
        "--page",
        "FILE",
        Path,
        "HTML file for the timeline.",
        default=Path("penstock-demo.html"),
    )


def execute(options: argparse.Namespace) -> None:
    """Run the demo, and print the results of each step."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        _show(Console(), GeneratedImages(Path(folder), options.images), options)


def _show(console: Console, images: GeneratedImages, options: argparse.Namespace) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    console.print(f"Penstock with torch {torch.__version__}, training on {device}\n")
    asked = "auto" if options.num_workers is None else options.num_workers
    loader = _make_loader("penstock", images, asked, trace=True)
    _show_plan(console, loader.plan)
    console.print(
        "\nTraining a small CNN to classify flat and upright ellipses, discs and rings "
        f"for {options.seconds:g} s"
    )
    first_batch_s = _train(console, loader, device, options.seconds)
    if asked == "auto":
        console.print(f"  num_workers='auto' chose {loader.plan.num_workers}")
    num_workers = 0 if asked == 0 else loader.num_workers or machine().usable_cores
    console.print(
        f"\nLoading without training: the same images, batch size {BATCH_SIZE}, {num_workers} "
        f"workers per loader, {NUM_TURNS} alternating turns per loader"
    )
    comparison = _compare(console, images, num_workers, first_batch_s)
    print_comparison(console, comparison)
    _show_timeline(loader.timeline(), options.page, console)


def _show_timeline(timeline: Timeline, page: Path, console: Console) -> None:
    console.print("\nTimeline of the training")
    timeline.show()
    try:
        timeline.save(page)
    except (BadTrace, OSError) as error:
        told = f"The HTML page could not be written: {str(error).splitlines()[0]}"
    else:
        told = f"Open {page} in a browser to zoom into every batch"
    console.print(told, highlight=False, markup=False, soft_wrap=True)


def _make_loader(
    whose: str, images: GeneratedImages, num_workers: int | str, **keywords: Any
) -> DataLoader[Any]:
    """Return a loader that draws random images indefinitely, from Penstock or from torch."""
    import torch.utils.data

    from penstock.loader import DataLoader

    sampler = torch.utils.data.RandomSampler(images, replacement=True, num_samples=10**9)
    make: Any = torch.utils.data.DataLoader if whose == "torch" else DataLoader
    loader: DataLoader[Any] = make(
        images, batch_size=BATCH_SIZE, sampler=sampler, num_workers=num_workers, **keywords
    )
    return loader


def _show_plan(console: Console, plan: Plan) -> None:
    table = Table("choice", "value", "reason", title="Plan of the loader", title_justify="left")
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
    """Train the model and print the results. Returns the time to the first batch in seconds."""
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
        f"  {num_images:,} images in {elapsed_s:.1f} s, {num_images / elapsed_s:,.0f} images/s; "
        f"{stall_s / elapsed_s:.0%} of the time was spent waiting for data"
    )
    console.print(
        f"  first loss {losses[0]:.2f}, last loss {losses[-1]:.2f}; "
        f"accuracy {sum(accuracies) / len(accuracies):.0%} on the last images"
    )
    return first_s - start_s


def _make_step(device: str) -> Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]:
    """Return a function that trains on one batch and returns the loss and the accuracy."""
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
            failures.append(str(error))  # reported as a result: a small /dev/shm kills its workers
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
    """Show a progress bar on a terminal. Yields the function that updates it."""
    if not console.is_terminal:
        yield lambda done, text: None
        return
    columns = (BarColumn(), TextColumn(note), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, note="")
        yield lambda done, text: progress.update(task, completed=done, note=text)
