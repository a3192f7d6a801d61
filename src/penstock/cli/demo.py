"""``penstock demo``: what Penstock does, step by step, with PyTorch's loader beside it.

It generates images, loads them with different numbers of workers, kills a worker, breaks a file,
times both loaders, and trains a small model. It ends with the timeline of the training: the
bottleneck, and an HTML page. Nothing is downloaded. The results are printed even where PyTorch's
loader is better.
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

from penstock import __version__
from penstock.cli import demo_faults
from penstock.cli.demo_faults import Epoch
from penstock.cli.demo_images import KINDS, GeneratedImages
from penstock.cli.loader_comparison import LoaderComparison, print_comparison
from penstock.cli.loader_timing import LoaderTiming, take_turns, time_loader
from penstock.cli.parser import CommandParser, add_loader_options, number
from penstock.errors import BadTrace
from penstock.machine.collect import machine
from penstock.machine.other_load import describe_load
from penstock.trace.diagnosis import MIN_BATCHES

if TYPE_CHECKING:
    import torch

    from penstock.loader import DataLoader
    from penstock.trace.timeline import Timeline

BATCH_SIZE = 16
NUM_FAULT_IMAGES = 160
NUM_TURNS = 3
WARM_UP_S, WINDOW_S = 0.3, 0.8
MIN_STEPS = MIN_BATCHES + 4
"""A run with fewer steps is too short to judge. The first ones are start-up."""
STEP_FACTOR, MAX_STEP_S = 2.5, 1.0
"""The step of the second race takes this many times as long as loading a batch."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.add_value("--seconds", "S", number(float, 1, 600), "Seconds to train.", default=6.0)
    add_loader_options(
        parser, "num_workers", help={"num_workers": "Number of workers. By default, auto."}
    )
    parser.add_value(
        "--images", "N", number(int, 1, 100_000), "Number of images to generate.", default=300
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
        _show(Console(highlight=False), Path(folder), options)


def _show(console: Console, folder: Path, options: argparse.Namespace) -> None:
    import torch

    cores = machine().usable_cores
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console.print(
        f"Penstock {__version__} with torch {torch.__version__}, {cores} cores, training on "
        f"{device}. Every step is done with PyTorch's DataLoader too."
    )
    busy = describe_load(cores)
    if busy:
        console.print(busy, style="yellow")
    (folder / "few").mkdir()
    few = GeneratedImages(folder / "few", NUM_FAULT_IMAGES)
    _show_bits(console, few)
    _show_kill(console, few)
    _show_broken_file(console, few)
    images = GeneratedImages(folder, options.images)
    asked = "auto" if options.num_workers is None else options.num_workers
    _show_races(console, images, asked if isinstance(asked, int) else cores)
    _title(console, 5, "Training, and where its time goes")
    loader = _make_loader("penstock", images, asked, trace=True)
    _train(console, loader, device, options.seconds)
    if asked == "auto":
        chosen = loader.plan.num_workers
        console.print(f"  num_workers='auto' chose {chosen.value}: {chosen.reason}", markup=False)
    _show_timeline(loader.timeline(), options.page, console)


def _title(console: Console, step: int, text: str) -> None:
    console.print(f"\n{step}. {text}", style="bold")


# Steps 1 to 3


def _show_bits(console: Console, images: GeneratedImages) -> None:
    _title(console, 1, "The same bits for any number of workers")
    console.print(
        "  The dataset augments images with Python's and NumPy's random numbers. All seeds are "
        "set. The checksums of one epoch:"
    )
    table = Table("workers", *map(str, demo_faults.WORKERS), "", box=None, padding=(0, 2))
    for whose, epochs in demo_faults.compare_workers(images).items():
        is_same = len({epoch.checksum for epoch in epochs}) == 1
        verdict = "the same bits" if is_same else "different bits"
        table.add_row(whose, *(epoch.checksum for epoch in epochs), verdict)
    console.print(table)


def _show_kill(console: Console, images: GeneratedImages) -> None:
    _title(console, 2, "A worker is killed in mid-epoch")
    console.print("  One of 2 workers is killed after the first batch.")
    _print_epochs(console, demo_faults.kill_worker(images), len(images))


def _show_broken_file(console: Console, images: GeneratedImages) -> None:
    _title(console, 3, "A file is broken")
    console.print('  One of the files is truncated. Penstock runs with on_error="skip".')
    _print_epochs(console, demo_faults.break_file(images), len(images))


def _print_epochs(console: Console, epochs: dict[str, Epoch], total: int) -> None:
    for whose, epoch in epochs.items():
        text = f"  {whose:<10}{epoch.num_images} of {total} images, checksum {epoch.checksum}"
        if epoch.error:
            text = f"  {whose:<10}stopped after {epoch.num_images} of {total} images: {epoch.error}"
        elif epoch.bad:
            text += f"; skipped {', '.join(epoch.bad)}"
        console.print(text, markup=False, soft_wrap=True)


# Step 4


def _show_races(console: Console, images: GeneratedImages, num_workers: int) -> None:
    _title(console, 4, "Two races")
    console.print(
        f"  Loading only, so that loading is the limit: batches of {BATCH_SIZE}, {num_workers} "
        f"workers per loader, {NUM_TURNS} turns each"
    )
    found = _race(console, images, num_workers)
    print_comparison(console, found)
    if found.failure is not None:
        return
    batch_s = BATCH_SIZE / min(found.median_rate(found.ours), found.median_rate(found.theirs))
    step_s = min(MAX_STEP_S, STEP_FACTOR * batch_s)
    console.print(
        f"  The same with a step of {step_s:.2g} s per batch, as when a GPU computes, so that "
        "loading is not the limit"
    )
    print_comparison(console, _race(console, images, num_workers, step_s=step_s))


def _race(
    console: Console, images: GeneratedImages, num_workers: int, step_s: float = 0.0
) -> LoaderComparison:
    failures: list[str] = []

    def turn(whose: str) -> LoaderTiming | None:
        try:
            return time_loader(
                lambda: _make_loader(whose, images, num_workers),
                warm_up_s=max(WARM_UP_S, step_s),
                window_s=max(WINDOW_S, 3 * step_s),
                step_s=step_s,
            )
        except RuntimeError as error:
            if whose != "torch":
                raise
            failures.append(str(error))  # reported as a result: a small /dev/shm kills its workers
            return None

    names = ("penstock", "torch")
    num_turns = NUM_TURNS if not step_s else 2
    with _progress(console, num_turns * len(names), "") as report:
        turns_done = iter(range(num_turns * len(names)))
        found = take_turns(
            {name: partial(turn, name) for name in names},
            num_turns,
            on_turn=lambda _: report(next(turns_done), ""),
        )
    timings = {name: [one for one in turns if one is not None] for name, turns in found.items()}
    return LoaderComparison(
        batch_size=BATCH_SIZE,
        ours=timings["penstock"],
        theirs=[] if failures else timings["torch"],
        step_s=step_s,
        failure=failures[0] if failures else None,
    )


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


# Step 5


def _make_model() -> torch.nn.Module:
    from torch import nn

    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64 * 16, len(KINDS)))


def _train(console: Console, loader: DataLoader[Any], device: str, limit_s: float) -> None:
    """Train the model and print the results."""
    console.print(
        f"  A small CNN learns to tell ellipses, discs and rings apart, for at least {limit_s:g} s."
    )
    step = _make_step(device)
    num_images, losses = 0, []
    accuracies: deque[float] = deque(maxlen=10)
    with _progress(console, limit_s, "{task.fields[note]}") as report:
        start_s = now = time.perf_counter()
        for batch in loader:
            loss, accuracy = step(*batch)
            losses.append(loss)
            accuracies.append(accuracy)
            num_images += len(batch[0])
            now = time.perf_counter()
            report(now - start_s, f"loss {loss:.2f}")
            if now - start_s > limit_s and len(losses) >= MIN_STEPS:
                break
    console.print(
        f"  {num_images:,} images: first loss {losses[0]:.2f}, last loss {losses[-1]:.2f}; "
        f"accuracy {sum(accuracies) / len(accuracies):.0%} on the last images"
    )


def _make_step(device: str) -> Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]:
    """Return a function that trains on one batch and returns the loss and the accuracy."""
    import torch

    torch.manual_seed(0)
    model = _make_model().to(device)
    loss_of = torch.nn.CrossEntropyLoss()
    # Momentum by hand, because torch's optimizers import torch._dynamo, which takes 5 s.
    moved = [(weight, torch.zeros_like(weight)) for weight in model.parameters()]

    def step(images: torch.Tensor, kinds: torch.Tensor) -> tuple[float, float]:
        images, kinds = images.to(device), kinds.to(device)
        guesses = model(images)
        loss = loss_of(guesses, kinds)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight, velocity in moved:
                assert weight.grad is not None
                velocity.mul_(0.9).add_(weight.grad)
                weight.sub_(velocity, alpha=0.05)
        return loss.item(), (guesses.argmax(1) == kinds).float().mean().item()

    return step


def _show_timeline(timeline: Timeline, page: Path, console: Console) -> None:
    timeline.show()
    try:
        timeline.save(page)
    except (BadTrace, OSError) as error:
        told = f"The HTML page could not be written: {str(error).splitlines()[0]}"
    else:
        told = f"Open {page} in a browser to zoom into every batch"
    console.print(told, highlight=False, markup=False, soft_wrap=True)


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
