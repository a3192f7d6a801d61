"""Cases of device.py, each with its contenders and target ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, TensorDataset

import penstock
from device_clock import busy_percent, endless, fresh, rate_of
from device_datasets import (
    BATCH_SIZE,
    NUM_WORKERS,
    Mapped,
    Photographs,
    Stacked,
    make_arrays,
    make_photographs,
)
from device_overlap import hidden
from measure import Case, Contender, Pace, Target

TRAIN_BATCH = 256
IMAGE_BYTES = 3 * 224 * 224
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NUM_IMAGES = 8_192
"""1.2 GB, which exceeds every cache and takes less than a second to make."""

# -- delivery ------------------------------------------------------------------------------------


def deliver(pace: Pace, key: str, num_workers: int, target: Target) -> Case:
    """(a), (b) Deliver batches of 64 x 150 KB to the GPU, without using them."""
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
    """Return GB/s, measured until the last copy is complete."""
    with fresh():
        batches = iter(endless(make()))

        def take() -> torch.Tensor:
            batch = next(batches)
            return batch.cuda(non_blocking=True) if copies else batch  # type: ignore[no-any-return]

        rate = rate_of(take, pace)
        batches.close()  # type: ignore[attr-defined]
    return rate * BATCH_SIZE * IMAGE_BYTES / 1e9


# -- training ------------------------------------------------------------------------------------


def train_from_memory(pace: Pace, key: str, model: str) -> Case:
    """(c), (d) Train from uint8 tensors in memory and in mapped files."""
    images = torch.randint(0, 256, (NUM_IMAGES, 3, 224, 224), dtype=torch.uint8)
    labels = torch.arange(NUM_IMAGES) % 1000
    in_memory = TensorDataset(images, labels)
    files = make_arrays(images, labels)
    mapped, opened = Mapped(files[0], labels), penstock.open_tensors(*files)
    makers = {
        "PyTorch, in memory, 8 workers": _theirs(in_memory, 8),
        f"PyTorch, in memory, {NUM_WORKERS} workers": _theirs(in_memory, NUM_WORKERS),
        "PyTorch, in memory, 0 workers": _theirs(in_memory, 0),
        "Penstock, in memory, 0 workers": _ours(in_memory, 0),
        "Penstock, in memory, 4 workers": _ours(in_memory, 4),
        "Penstock, mapped file, 8 workers": _ours(mapped, 8),
        "Penstock, open_tensors, 4 workers": _ours(opened, 4),
    }
    title = f"{model}, bf16, channels_last, batch {TRAIN_BATCH}, from uint8 in memory"
    return _training(key, title, model, makers, pace, Target(bound=0.97))


def train_from_jpeg(pace: Pace, key: str, model: str) -> Case:
    """(e) Train from JPEG files of 500 x 375, decoded and cropped to 224."""
    folder = make_photographs()
    data = Photographs(folder)
    own = penstock.ImageFolder(folder, transform=penstock.RandomResizedCrop(224))
    makers = {
        f"PyTorch, JPEG, {NUM_WORKERS} workers": _theirs(data, NUM_WORKERS),
        f"PyTorch, JPEG, {NUM_WORKERS + 1} workers": _theirs(data, NUM_WORKERS + 1),
        f"Penstock, JPEG, the same dataset, {NUM_WORKERS} workers": _ours(data, NUM_WORKERS),
        f"Penstock, JPEG, its ImageFolder, {NUM_WORKERS} workers": _ours(own, NUM_WORKERS),
    }
    title = f"{model}, bf16, channels_last, batch {TRAIN_BATCH}, from JPEG files"
    return _training(key, title, model, makers, pace, Target(bound=0.95))


def _ours(data: Any, num_workers: int) -> Callable[[], Any]:
    finish = penstock.finish(
        mean=MEAN, std=STD, dtype=torch.bfloat16, memory_format=torch.channels_last
    )
    keywords: dict[str, Any] = {"device": "cuda", "finish": finish, "num_workers": num_workers}
    loader = partial(penstock.DataLoader, data, TRAIN_BATCH, drop_last=True, **keywords)
    return lambda: loader(sampler=_long_epoch(data))


def _theirs(data: Any, num_workers: int) -> Callable[[], Any]:
    """Return PyTorch's fastest setup: pinned, deep queue, early copies, finishing on the GPU."""
    keywords: dict[str, Any] = {"pin_memory": True, "num_workers": num_workers}
    if num_workers:
        keywords["prefetch_factor"] = 4
    loader = partial(TorchDataLoader, data, TRAIN_BATCH, drop_last=True, **keywords)
    return lambda: _moved(loader(sampler=_long_epoch(data)))


def _long_epoch(data: Any) -> RandomSampler:
    """Return a sampler as long as ImageNet, so that no epoch ends during a turn."""
    return RandomSampler(data, replacement=True, num_samples=1_281_167)


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
    """Training step of a torchvision model: forward, loss, backward, SGD."""
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
    name = f"{model}, already on the GPU"
    return TRAIN_BATCH * rate_of(lambda: step(images, labels), pace, name)


def _trained(step: Callable[..., None], make: Callable[[], Any], pace: Pace, name: str) -> float:
    with fresh():
        batches = endless(make())
        rate = rate_of(lambda: step(*next(batches)), pace, name)
        batches.close()  # type: ignore[attr-defined]
    return TRAIN_BATCH * rate


def utilisation(pace: Pace, key: str) -> Case:
    """(f) GPU utilization reported by nvidia-smi during the preceding cases."""
    contenders = [
        Contender(name=name, turn=partial(statistics.median, seen))
        for name, seen in busy_percent.items()
    ]
    return Case(
        key=key, title="GPU busy during the training above", unit="%", contenders=contenders
    )


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
