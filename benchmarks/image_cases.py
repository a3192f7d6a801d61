"""Cases of images.py: random crops from JPEGs and from raw pixels."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler

import penstock
from measure import Case, Contender, Pace, Target
from penstock.cli.loader_timing import time_loader
from penstock.images.decode import decode
from penstock.images.jpeg_codecs import choose_decoder
from penstock.images.pixels import to_tensor
from penstock.machine.collect import machine

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.generated_images import encode, make_pixels

TORCH: Any = torch.utils.data.DataLoader
OURS: Any = penstock.DataLoader
BATCH_SIZE, NUM_WORKERS, SIZE = 64, 2, 224
NUM_ROUNDS = 16
"""How often an epoch of (a) and (b) repeats the files. One round is only four batches, and workers
wait for each other at the end of an epoch, which would take 6% of their time."""
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


class ByPillow:
    """The usual recipe: Pillow and torchvision's transforms."""

    def __init__(self, files: list[bytes], antialias: bool) -> None:
        v2: Any = __import__("torchvision.transforms.v2", fromlist=["v2"])
        self.files = files
        self.crop = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=antialias), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        found: torch.Tensor = self.crop(Image.open(io.BytesIO(self.files[index])).convert("RGB"))
        return found


class ByTorchvision(ByPillow):
    """torchvision's own decoder, with its transforms on tensors."""

    def __init__(self, files: list[bytes], antialias: bool) -> None:
        v2: Any = __import__("torchvision.transforms.v2", fromlist=["v2"])
        self.files = files
        self.crop = v2.RandomResizedCrop(SIZE, antialias=antialias)

    def __getitem__(self, index: int) -> torch.Tensor:
        from torchvision.io import decode_jpeg

        raw = torch.frombuffer(bytearray(self.files[index]), dtype=torch.uint8)
        found: torch.Tensor = self.crop(decode_jpeg(raw))
        return found


class BySimplejpeg:
    """The fastest handwritten dataset: simplejpeg and OpenCV, without antialiasing."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files
        self.crop = penstock.RandomResizedCrop(SIZE)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> np.ndarray:
        import cv2
        import simplejpeg

        pixels = simplejpeg.decode_jpeg(self.files[index])
        top, left, height, width = self.crop.draw(*pixels.shape[:2])
        part = pixels[top : top + height, left : left + width]
        return np.asarray(cv2.resize(part, (SIZE, SIZE))).transpose(2, 0, 1)


class Encoded:
    """Penstock's decoder and crop, over bytes in memory. Reading of files is not included."""

    def __init__(self, files: list[bytes], crop: Any, decoder: str | None = None) -> None:
        self.files, self.crop, self.decoder = files, crop, decoder

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read_into(index, ())

    def read_into(self, index: int, rows: Sequence[Any]) -> torch.Tensor:
        """Write crops directly into the batch, as described in docs/packed-sets.md."""
        found: torch.Tensor = to_tensor(
            decode(self.files[index], self.crop, decoder=self.decoder), rows[0] if rows else None
        )
        return found


def _files(pace: Pace, **keywords: Any) -> list[bytes]:
    count = 64 if pace.window_s < 1 else 256
    return [encode(make_pixels(seed=number), **keywords) for number in range(count)]


def _rate(make: Callable[[], Any], pace: Pace) -> Callable[[], float]:
    def turn() -> float:
        timing = time_loader(make, warm_up_s=pace.warm_up_s, window_s=3 * pace.window_s)
        return timing.batches_per_s * BATCH_SIZE

    return turn


def _bare(files: list[bytes], crop: Any, decoder: str, pace: Pace) -> Callable[[], float]:
    """Measure two threads that decode and crop into a buffer, without a loader."""

    def turn() -> float:
        counts, end_s = [0] * NUM_WORKERS, time.perf_counter() + 3 * pace.window_s

        def work(number: int) -> None:
            while time.perf_counter() < end_s:
                place = (counts[number] * NUM_WORKERS + number) % len(files)
                decode(files[place], crop, decoder=decoder)
                counts[number] += 1

        threads = [threading.Thread(target=work, args=(n,)) for n in range(NUM_WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (3 * pace.window_s)

    return turn


def _bare_processes(
    files: list[bytes], crop: Any, decoder: str, pace: Pace, num: int
) -> Callable[[], float]:
    """Measure the same in processes, one per core."""

    def turn() -> float:
        context: Any = multiprocessing.get_context("fork")
        counts, gate = context.Array("q", num, lock=False), context.Barrier(num)
        arguments = (files, crop, decoder, 3 * pace.window_s, counts, gate)
        processes = [context.Process(target=_decode_for, args=(n, *arguments)) for n in range(num)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return float(sum(counts)) / (3 * pace.window_s)

    return turn


def _decode_for(
    number: int, files: list[bytes], crop: Any, decoder: str, limit_s: float, counts: Any, gate: Any
) -> None:
    torch.set_num_threads(1)
    penstock.decode(files[number], crop, decoder=decoder)
    gate.wait()
    end_s = time.perf_counter() + limit_s
    while time.perf_counter() < end_s:
        decode(files[(counts[number] * len(counts) + number) % len(files)], crop, decoder=decoder)
        counts[number] += 1


def _peers(files: list[bytes], antialias: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in (
        ("PyTorch, Pillow", partial(ByPillow, files, antialias)),
        ("PyTorch, torchvision's decoder", partial(ByTorchvision, files, antialias)),
        *(() if antialias else (("PyTorch, simplejpeg and OpenCV", partial(BySimplejpeg, files)),)),
    ):
        try:
            dataset = make()
            dataset[0]
            found[name] = dataset
        except Exception as error:
            print(f"without {name}: {type(error).__name__}: {str(error)[:100]}")
    return found


def _case(key: str, antialias: bool, pace: Pace) -> Case:
    torch.set_num_threads(1)
    files = _files(pace) * NUM_ROUNDS
    crop = penstock.RandomResizedCrop(SIZE, antialias=antialias)
    keywords: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "drop_last": True}
    keywords |= {"num_workers": NUM_WORKERS, "persistent_workers": True}
    theirs = _peers(files, antialias)
    decoder = choose_decoder(files[0])  # otherwise every worker would choose one
    ours, bare = Encoded(files, crop, decoder), "two bare threads, the same work"
    word = "antialiased" if antialias else "not antialiased"
    return Case(
        key=key,
        title=f"JPEG 500x375 to random crops of 224, {word}, uint8, {NUM_WORKERS} workers",
        unit="images/s",
        contenders=[
            Contender(name=bare, turn=_bare(files, crop, decoder, pace)),
            Contender(
                name="Penstock",
                turn=_rate(partial(OURS, ours, **keywords), pace),
                against=(bare,),
                target=Target(bound=0.95),
            ),
            *(
                Contender(name=name, turn=_rate(partial(TORCH, data, **keywords), pace))
                for name, data in theirs.items()
            ),
            Contender(
                name="Penstock, again",
                turn=_rate(partial(OURS, ours, **keywords), pace),
                against=tuple(theirs),
                target=Target(bound=1.0),
            ),
        ],
    )


def _on_all_cores(key: str, antialias: bool, pace: Pace) -> Case:
    """(e), (f) Like (a) and (b), with one worker per core, and one bare process per core."""
    torch.set_num_threads(1)
    num = machine().usable_cores
    files = _files(pace) * NUM_ROUNDS
    order = RandomSampler(
        files, replacement=True, num_samples=1_281_167
    )  # as long as an ImageNet epoch
    crop = penstock.RandomResizedCrop(SIZE, antialias=antialias)
    keywords: dict[str, Any] = {"batch_size": BATCH_SIZE, "sampler": order, "drop_last": True}
    keywords["num_workers"] = num
    theirs = _peers(files, antialias)
    decoder = choose_decoder(files[0])
    bare = f"{num} bare processes, the same work"
    ours = _rate(partial(OURS, Encoded(files, crop, decoder), **keywords), pace)
    word = "antialiased" if antialias else "not antialiased"
    best = Target(bound=1.3)
    return Case(
        key=key,
        title=f"JPEG 500x375 to random crops of 224, {word}, uint8, {num} workers",
        unit="images/s",
        contenders=[
            Contender(name=bare, turn=_bare_processes(files, crop, decoder, pace, num)),
            Contender(name="Penstock", turn=ours, against=(bare,), target=Target(bound=0.9)),
            *(
                Contender(name=name, turn=_rate(partial(TORCH, data, **keywords), pace))
                for name, data in theirs.items()
            ),
            Contender(name="Penstock, again", turn=ours, against=tuple(theirs), target=best),
        ],
    )


def smooth(pace: Pace) -> Case:
    return _case("a", True, pace)


def quick(pace: Pace) -> Case:
    return _case("b", False, pace)


def raw(pace: Pace) -> Case:
    """(c) Packed raw pixels, 256 on the longer side, without decoding."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    images = [make_pixels(192, 256, seed=number) for number in range(256)]
    field = penstock.Field(ragged=True)
    packed = penstock.pack(images, folder / "raw", fields={"value": field}, workers=0)
    keywords: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "drop_last": True}
    keywords |= {"num_workers": NUM_WORKERS, "persistent_workers": True}
    rows = {}
    for antialias in (True, False):
        crop = penstock.RandomResizedCrop(SIZE, antialias=antialias)
        rows[f"Penstock, antialias={antialias}"] = packed.with_transforms(value=crop)
    return Case(
        key="c",
        title="raw pixels 256x192 to random crops of 224, 2 workers",
        unit="images/s",
        contenders=[
            Contender(name=name, turn=_rate(partial(OURS, data, **keywords), pace))
            for name, data in rows.items()
        ],
    )


def scaled(pace: Pace) -> Case:
    """(d) Large JPEGs, for which decoding at reduced scale is faster. Also prints its error."""
    torch.set_num_threads(1)
    files = [encode(make_pixels(1200, 1600, seed=number)) for number in range(16)]
    exact, fast = (penstock.Resize((SIZE, SIZE), fast=is_fast) for is_fast in (False, True))
    errors = [
        np.abs(decode(one, exact).astype(int) - decode(one, fast)).mean() for one in files[:4]
    ]
    print(f"fast=True differs by {np.mean(errors):.2f} levels on average")
    keywords: dict[str, Any] = {"batch_size": 16, "num_workers": NUM_WORKERS}
    rows = {"exact": Encoded(files, exact), "fast=True": Encoded(files, fast)}

    def rate(data: Any) -> Callable[[], float]:
        turn = _rate(partial(OURS, data, **keywords, persistent_workers=True), pace)
        return lambda: turn() * 16 / BATCH_SIZE

    return Case(
        key="d",
        title="JPEG 1600x1200 to 224, antialiased, exact and at reduced scale",
        unit="images/s",
        contenders=[
            Contender(
                name=f"Penstock, {name}",
                turn=rate(data),
                against=() if name == "exact" else ("Penstock, exact",),
            )
            for name, data in rows.items()
        ],
    )


CASES = {
    "a": smooth,
    "b": quick,
    "c": raw,
    "d": scaled,
    "e": lambda pace: _on_all_cores("e", True, pace),
    "f": lambda pace: _on_all_cores("f", False, pace),
}
