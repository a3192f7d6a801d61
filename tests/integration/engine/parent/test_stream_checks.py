"""Workers and ranks that deliver the same samples of an iterable dataset are named beforehand."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from penstock import DataLoader

pytestmark = pytest.mark.legacy


class Whole(IterableDataset):
    """Every worker yields all numbers."""

    def __init__(self, length: int = 12) -> None:
        self.first = 0
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.first, self.length))


class ByWorker(Whole):
    """Divides the numbers, and begins with the same sample in each worker."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        number, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield -1
        yield from range(number, self.length, step)


class FromQueue(Whole):
    """Workers take numbers from one queue, and never ask which worker they are in."""

    def __init__(self, queue: Any) -> None:
        super().__init__()
        self.queue = queue

    def __iter__(self) -> Any:
        while (number := self.queue.get()) is not None:
            yield number


class Random(Whole):
    """Workers generate samples at random. The bits of a sample may be equal by chance."""

    def __iter__(self) -> Any:
        for _ in range(self.length):
            yield int(torch.randint(1, ()).item())


def divided(worker: int) -> None:
    """Divides the dataset without reading the number in get_worker_info()."""
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.first, dataset.length = 6 * worker, 6 * worker + 6


def messages(loader: Any) -> list[str]:
    """Return the warnings until the first batch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(loader))
    return [str(one.message) for one in caught if "begin with the same" in str(one.message)]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_every_worker_reads_whole_is_named_before_the_first_batch(
    persistent: bool,
) -> None:
    loader = DataLoader(Whole(), batch_size=4, num_workers=3, persistent_workers=persistent)
    (text,) = messages(loader)
    assert text.startswith("workers ")
    assert "begin with the same samples" in text
    assert "Whole does not ask which worker it is in" in text
    assert "each of the 3 workers delivers all samples" in text
    assert "info = torch.utils.data.get_worker_info(); yield from itertools.islice(samples" in text
    assert any("begin with the same" in note for note in loader.plan.notes)
    assert messages(loader) == []  # said once
    loader.close()


def test_the_line_to_paste_divides_the_dataset() -> None:
    class Cured(Whole):
        def __iter__(self) -> Any:
            import itertools

            samples = super().__iter__()
            info = get_worker_info()
            yield from itertools.islice(
                samples, info.id if info else 0, None, info.num_workers if info else 1
            )

    loader = DataLoader(Cured(), batch_size=4, num_workers=3)
    assert messages(loader) == []
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(12))


def test_datasets_that_divide_themselves_are_not_mentioned() -> None:
    assert messages(DataLoader(ByWorker(), batch_size=1, num_workers=2)) == []
    assert messages(DataLoader(Whole(), batch_size=4, num_workers=1)) == []
    assert messages(DataLoader(Whole(), batch_size=4, num_workers=0)) == []
    assert messages(DataLoader(Random(), batch_size=1, num_workers=2)) == []
    by_init = DataLoader(Whole(), batch_size=8, num_workers=2, worker_init_fn=divided)
    assert messages(by_init) == []


def test_workers_that_share_a_queue_are_not_mentioned() -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    for number in [*range(40), None, None]:
        queue.put(number)
    loader = DataLoader(FromQueue(queue), batch_size=2, num_workers=2)
    assert messages(loader) == []
    queue.close()
    queue.join_thread()


def test_workers_without_samples_do_not_stop_the_first_batch() -> None:
    class OnlyFirst(Whole):
        def __iter__(self) -> Any:
            info = get_worker_info()
            return iter(range(self.length if info is not None and info.id == 0 else 0))

    loader = DataLoader(OnlyFirst(), batch_size=4, num_workers=3)
    assert messages(loader) == []
    assert torch.cat(list(loader)).tolist() == list(range(12))


_RANKS = """
import sys, warnings, torch, torch.distributed as dist
from torch.utils.data import IterableDataset
from penstock import DataLoader

rank, is_divided, store, num_workers = int(sys.argv[1]), sys.argv[2] == "1", *sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

class Numbers(IterableDataset):
    def __iter__(self):
        first = rank if is_divided else 0
        return (torch.full((16,), float(n)) for n in range(first, 24, 2))

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    next(iter(DataLoader(Numbers(), batch_size=4, num_workers=int(num_workers))))
print([str(one.message) for one in caught if "ranks" in str(one.message)])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_with_the_same_samples_are_named_and_divided_ones_are_not(
    tmp_path: Path, num_workers: int
) -> None:
    if not hasattr(torch.distributed.Store, "check"):
        pytest.skip("this torch cannot check a key of a store without waiting")
    for is_divided in ("0", "1"):
        store = str(tmp_path / f"store{is_divided}")
        command = [sys.executable, "-c", _RANKS]
        running = [
            subprocess.Popen(
                [*command, str(rank), is_divided, store, str(num_workers)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0]
        found = [text for text in outputs if "ranks 0 and 1 begin with the same samples" in text]
        assert bool(found) == (is_divided == "0")
