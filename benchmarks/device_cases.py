"""The questions about GPUs, each with its contenders and the ratio that was promised."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import penstock
from device_datasets import Mapped, Photographs, Stacked, make_photographs
from measure import Case, Contender, Pace, Target

BATCH_SIZE = 64
TRAIN_BATCH = 256
NUM_WORKERS = max(1, (os.cpu_count() or 2) - 1)
IMAGE_BYTES = 3 * 224 * 224
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NUM_IMAGES = 8_192
"""1.2 GB: more than any cache, less than a second to make."""

_utilisation: dict[str, list[float]] = {}


# -- delivery ------------------------------------------------------------------------------------


def deliver(pace: Pace, key: str, num_workers: int, target: Target) -> Case:
    """Batches of 64 x 150 KB, on the GPU, and nothing else done with them."""
    data = Stacked()
    shared: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": num_workers}
    pinned = {**shared, "pin_memory": True}
    makers: dict[str, tuple[Callable[[], Any], bool]] = {
        "PyTorch, pin_memory": (partial(TorchDataLoader, data, **pinned), True),
        "PyTorch, pin_memory, prefetch_factor=8": (
            partial(TorchDataLoader, data, **pinned, prefetch_factor=8),
            True,
        ),
        "Penstock, pin_memory": (partial(penstock.DataLoader, data, **pinned), True),
        "Penstock, device='cuda'": (
            partial(penstock.DataLoader, data, **shared, device="cuda"),
            False,
        ),
    }
    theirs = tuple(name for name in makers if name.startswith("PyTorch"))
    return Case(
        key=key,
        title=f"On the GPU: {BATCH_SIZE} x 150 KB uint8, {num_workers} workers",
        unit="GB/s",
        contenders=[
            Contender(
                name=name,
                turn=partial(_delivered, make, copies, pace),
                against=() if name in theirs else theirs,
                target=None if name in theirs else target,
            )
            for name, (make, copies) in makers.items()
        ],
    )


def _delivered(make: Callable[[], Any], copies: bool, pace: Pace) -> float:
    """GB/s, counted when the last copy is complete."""
    with _fresh():
        batches = iter(_endless(make()))

        def take() -> torch.Tensor:
            batch = next(batches)
            return batch.cuda(non_blocking=True) if copies else batch  # type: ignore[no-any-return]

        rate = _rate(take, pace)
        batches.close()  # type: ignore[attr-defined]
    return rate * BATCH_SIZE * IMAGE_BYTES / 1e9


# -- training ------------------------------------------------------------------------------------


def train_from_memory(pace: Pace, key: str, model: str) -> Case:
    """Uint8 tensors in memory, and mapped from a file."""
    images = torch.randint(0, 256, (NUM_IMAGES, 3, 224, 224), dtype=torch.uint8)
    labels = torch.arange(NUM_IMAGES) % 1000
    in_memory = TensorDataset(images, labels)
    mapped = Mapped.of(images, labels)
    ours: dict[str, Any] = {"batch_size": TRAIN_BATCH, "shuffle": True, **_ours()}
    makers = {
        "PyTorch, in memory, 8 workers": _theirs(in_memory, 8),
        f"PyTorch, in memory, {NUM_WORKERS} workers": _theirs(in_memory, NUM_WORKERS),
        "PyTorch, in memory, 0 workers": _theirs(in_memory, 0),
        "Penstock, in memory, 0 workers": partial(penstock.DataLoader, in_memory, **ours),
        "Penstock, in memory, 4 workers": partial(
            penstock.DataLoader, in_memory, num_workers=4, **ours
        ),
        "Penstock, mapped file, 8 workers": partial(
            penstock.DataLoader, mapped, num_workers=8, **ours
        ),
    }
    title = f"{model}, bf16, channels_last, batch {TRAIN_BATCH}, from uint8 in memory"
    return _training(key, title, model, makers, pace, Target(bound=0.97))


def train_from_jpeg(pace: Pace, key: str, model: str) -> Case:
    """JPEG files of 500 x 375, decoded and cropped to 224."""
    files = make_photographs()
    data = Photographs(files)
    ours: dict[str, Any] = {"batch_size": TRAIN_BATCH, "shuffle": True, **_ours()}
    makers = {
        f"PyTorch, JPEG, {NUM_WORKERS} workers": _theirs(data, NUM_WORKERS),
        f"PyTorch, JPEG, {NUM_WORKERS + 1} workers": _theirs(data, NUM_WORKERS + 1),
        f"Penstock, JPEG, {NUM_WORKERS} workers": partial(
            penstock.DataLoader, data, num_workers=NUM_WORKERS, persistent_workers=True, **ours
        ),
    }
    title = f"{model}, bf16, channels_last, batch {TRAIN_BATCH}, from JPEG files"
    return _training(key, title, model, makers, pace, Target(bound=0.95))


def _ours() -> dict[str, Any]:
    finish = penstock.finish(
        mean=MEAN, std=STD, dtype=torch.bfloat16, memory_format=torch.channels_last
    )
    return {"device": "cuda", "finish": finish, "drop_last": True}


def _theirs(data: Any, num_workers: int) -> Callable[[], Any]:
    """PyTorch at its best: pinned, kept workers, the copy asked for early, finished on the GPU."""
    keywords: dict[str, Any] = {}
    if num_workers:
        keywords = {"num_workers": num_workers, "prefetch_factor": 4, "persistent_workers": True}
    loader = partial(
        TorchDataLoader,
        data,
        TRAIN_BATCH,
        shuffle=True,
        pin_memory=True,
        drop_last=True,
        **keywords,
    )
    return lambda: _moved(loader())


def _moved(loader: Iterable[Any]) -> Iterator[Any]:
    mean = torch.tensor(MEAN, device="cuda", dtype=torch.bfloat16)[:, None, None]
    std = torch.tensor(STD, device="cuda", dtype=torch.bfloat16)[:, None, None]
    for images, labels in loader:
        moved = images.cuda(non_blocking=True).to(memory_format=torch.channels_last)
        yield (moved.to(torch.bfloat16) / 255 - mean) / std, labels.cuda(non_blocking=True)


def _training(
    key: str,
    title: str,
    model: str,
    makers: Mapping[str, Callable[[], Any]],
    pace: Pace,
    target: Target,
) -> Case:
    step = make_step(model)
    resident = "already on the GPU"
    contenders = [Contender(name=resident, turn=partial(_resident, step, pace, model))]
    for name, make in makers.items():
        is_ours = name.startswith("Penstock")
        contenders.append(
            Contender(
                name=name,
                turn=partial(_trained, step, make, pace, f"{model}, {name}"),
                against=(resident,),
                target=target if is_ours else None,
            )
        )
    return Case(key=key, title=title, unit="images/s", contenders=contenders)


def make_step(model_name: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """One training step of a torchvision model: forward, loss, backward, SGD."""
    import torchvision

    make: Any = getattr(torchvision.models, model_name)
    model = make(num_classes=1000).cuda().to(torch.bfloat16).to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
    torch.backends.cudnn.benchmark = True

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimiser.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def _resident(step: Callable[..., None], pace: Pace, model: str) -> float:
    images = torch.randn(TRAIN_BATCH, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(TRAIN_BATCH, device="cuda")
    with _watched(f"{model}, already on the GPU"):
        return TRAIN_BATCH * _rate(lambda: step(images, labels), pace)


def _trained(step: Callable[..., None], make: Callable[[], Any], pace: Pace, name: str) -> float:
    with _fresh():
        batches = _endless(make())
        with _watched(name):
            rate = _rate(lambda: step(*next(batches)), pace)
        batches.close()  # type: ignore[attr-defined]
    return TRAIN_BATCH * rate


def utilisation(pace: Pace, key: str) -> Case:
    """What nvidia-smi said while the cases before were running."""
    contenders = [
        Contender(name=name, turn=partial(statistics.median, seen))
        for name, seen in _utilisation.items()
    ]
    return Case(
        key=key, title="GPU busy during the training above", unit="%", contenders=contenders
    )


# -- overlap -------------------------------------------------------------------------------------


def hidden(pace: Pace, key: str) -> Case:
    """The share of the copies' time that does not show, when computing takes longer."""
    return Case(
        key=key,
        title="Copy time that is hidden behind longer computing, from events",
        unit="part",
        contenders=[Contender(name="Penstock, device='cuda'", turn=partial(_hidden, pace))],
    )


def _hidden(pace: Pace) -> float:
    with _fresh():
        host = torch.empty(BATCH_SIZE, 3, 224, 224, dtype=torch.uint8).pin_memory()
        copy_s = _timed(lambda: host.cuda(non_blocking=True), 200)
        matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

        def compute() -> None:
            for _ in range(8):
                torch.mm(matrix, matrix)

        resident = host.cuda()
        alone_s = _timed(lambda: (compute(), resident.sum()), 200)
        loader = penstock.DataLoader(
            Stacked(), batch_size=BATCH_SIZE, num_workers=min(8, NUM_WORKERS), device="cuda"
        )
        batches = _endless(loader)
        fed_s = _timed(lambda: (next(batches).sum(), compute()), 200)
        batches.close()  # type: ignore[attr-defined]
    return 1 - max(0.0, fed_s - alone_s) / copy_s


def _timed(call: Callable[[], Any], count: int) -> float:
    """Seconds a call takes on the GPU, between two events."""
    for _ in range(20):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()  # type: ignore[no-untyped-call]
    for _ in range(count):
        call()
    end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count  # type: ignore[no-untyped-call]


# -- what they share -----------------------------------------------------------------------------


def _rate(call: Callable[[], Any], pace: Pace) -> float:
    """Calls per second, the GPU's work included."""
    _run_for(call, max(1.0, pace.warm_up_s))
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    count = _run_for(call, max(pace.window_s, 0.5) * 2)
    torch.cuda.synchronize()
    return count / (time.perf_counter() - start_s)


def _run_for(call: Callable[[], Any], limit_s: float) -> int:
    count, until_s = 0, time.perf_counter() + limit_s
    while time.perf_counter() < until_s:
        call()
        count += 1
    return count


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


@contextmanager
def _fresh() -> Iterator[None]:
    """PyTorch forks: a worker that collects a CUDA tensor of ours dies. So none is left over."""
    gc.collect()
    torch.cuda.empty_cache()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


@contextmanager
def _watched(name: str) -> Iterator[None]:
    """nvidia-smi's own figure while something runs."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as said:
        try:
            process = subprocess.Popen([*command, "-lms", "100"], stdout=said)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            process.terminate()
            process.wait()
        said.seek(0)
        seen = [float(line) for line in said.read().split() if line.isdecimal()]
    late = seen[len(seen) // 3 :]
    if late:
        _utilisation.setdefault(name, []).append(statistics.mean(late))


CASES = MappingProxyType(
    {
        "a": partial(
            deliver, key="a", num_workers=NUM_WORKERS, target=Target(bound=10.0, goal=12.5)
        ),
        "b": partial(deliver, key="b", num_workers=1, target=Target(bound=2.0)),
        "c": partial(train_from_memory, key="c", model="resnet18"),
        "d": partial(train_from_memory, key="d", model="resnet50"),
        "e": partial(train_from_jpeg, key="e", model="resnet50"),
        "f": partial(utilisation, key="f"),
        "g": partial(hidden, key="g"),
    }
)
