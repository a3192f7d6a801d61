"""torch's own loaders with Penstock's engine: unchanged behavior and documented differences."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import penstock
from penstock.engine.parent.iterator import LoaderIterator
from penstock.errors import TooManyBad
from penstock.integrations import patched_loader
from penstock.machine.collect import quick_facts
from support.datasets import Numbers, Samples, Shards, assert_same, collect
from support.library_loaders import (
    ImportedBefore,
    InfiniteLoader,
    MultiEpochsLoader,
    epochs,
    make,
    seeded,
)

pytestmark = pytest.mark.legacy


# -- the same bits ---------------------------------------------------------------------------------


def test_a_seed_gives_the_same_bits_for_0_1_and_2_workers_in_torch_s_order() -> None:
    seen = []
    for num_workers in (0, 1, 2):
        with penstock.patched(seed=0):
            seen.append(seeded(num_workers))
    assert_same(seen[1], seen[0])
    assert_same(seen[2], seen[0])
    order = [batch[0].tolist() for batch in seen[0]]
    assert order == [batch[0].tolist() for batch in seeded(2)]  # unpatched
    with penstock.patched(seed=1):
        assert seeded(0)[0][1].tolist() != seen[0][0][1].tolist()


@pytest.mark.parametrize("kind", [InfiniteLoader, MultiEpochsLoader])
def test_loaders_that_never_end_give_the_same_bits_for_any_number_of_workers(kind: Any) -> None:
    def stream(num_workers: int) -> list[Any]:
        torch.manual_seed(3)
        with penstock.patched(seed=0):
            loader = make(kind, num_workers)
            assert type(loader.iterator).__module__.startswith("penstock.")
            seen = epochs(loader, 3)
            loader.iterator._shutdown_workers()
        return seen

    inline = stream(0)
    assert len(inline) == 15
    for num_workers in (1, 2):
        assert_same(stream(num_workers), inline)
    draws = [batch[1].tolist() for batch in inline]
    assert len({tuple(draw) for draw in draws}) == 15  # all epochs differ


def test_an_endless_loader_that_is_reset_half_way_has_the_order_of_none() -> None:
    """The loader draws ahead from its generator, further ahead with more workers."""

    def stream(num_workers: int) -> list[Any]:
        generator = torch.Generator()
        generator.manual_seed(1)
        with penstock.patched(seed=0):
            loader = make(InfiniteLoader, num_workers, generator=generator)
            first = collect(loader)
            loader.iterator._shutdown_workers()
            loader.reset()
            second = collect(loader)
            loader.iterator._shutdown_workers()
        return first + second

    assert_same(stream(2), stream(0))


def test_torch_s_own_loader_differs_between_2_and_4_workers() -> None:
    """Control: unpatched, the augmentations change with the number of workers."""
    assert [batch[4].tolist() for batch in seeded(2)] != [batch[4].tolist() for batch in seeded(4)]


def test_without_a_seed_torch_s_seed_decides() -> None:
    with penstock.patched():
        first = seeded(2)
        assert_same(seeded(0), first)
        torch.manual_seed(4)
        assert epochs(make())[0][1].tolist() != first[0][1].tolist()


def test_a_loader_made_anew_for_each_epoch_draws_anew() -> None:
    def draws() -> list[Any]:
        return [batch[1].tolist() for _ in range(3) for batch in make(shuffle=False, batch_size=24)]

    with penstock.patched(seed=0):
        first = draws()
    assert len({tuple(draw) for draw in first}) == 3
    with penstock.patched(seed=0):
        assert draws() == first


def test_loaders_with_generators_of_their_own_draw_apart() -> None:
    """Ultralytics, for example, gives each rank its own generator."""

    def draws(seed: int) -> list[float]:
        generator = torch.Generator()
        generator.manual_seed(seed)
        with penstock.patched(seed=0):
            (batch,) = make(shuffle=False, batch_size=24, generator=generator)
        return batch[1].tolist()  # type: ignore[no-any-return]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def seed_everything(number: int) -> None:
    torch.manual_seed(100 + number)


def test_a_worker_init_fn_that_seeds_torch_does_not_count_beside_a_seed() -> None:
    with penstock.patched(seed=0):
        inline = seeded(0)
    with penstock.patched(seed=0):
        assert_same(seeded(2, worker_init_fn=seed_everything), inline)
    with penstock.patched(), pytest.warns(UserWarning, match="set torch's seed"):
        seeded(1, worker_init_fn=seed_everything)


def test_a_sampler_that_draws_as_it_goes_is_asked_as_far_ahead_as_torch_asks() -> None:
    """Otherwise draws of the training code in between would depend on how fast batches arrive."""

    class Lazy:
        def __init__(self) -> None:
            self.num_asked = 0

        def __iter__(self) -> Iterator[Any]:
            for number in range(40):
                self.num_asked += 1
                yield [number]

    def asked(depth: dict[str, int]) -> list[int]:
        sampler = Lazy()
        loader = ImportedBefore(Numbers(40), batch_sampler=sampler, num_workers=2, **depth)
        with penstock.patched():
            return [sampler.num_asked for _ in zip(range(20), loader, strict=False)]

    assert asked({}) == [4 + number for number in range(1, 21)]
    assert max(asked({"prefetch_factor": 3})) == 26


def test_the_ranks_of_a_launcher_do_not_share_samples_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with penstock.patched(seed=0):
        batches = list(ImportedBefore(Numbers(8), batch_size=4, num_workers=2))
    assert [batch[1].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- engine behavior -------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_counted() -> None:
    with penstock.patched(seed=0):
        calm = seeded(2)
    with penstock.patched(seed=0) as report:
        torch.manual_seed(3)
        loader, seen = make(num_workers=2, prefetch_factor=1), []
        for _ in range(2):
            batches = iter(loader)
            seen.append(next(batches))
            os.kill(batches._workers[0].pid, signal.SIGKILL)
            seen += list(batches)
    assert_same(seen, calm)
    assert report.num_restarts == 2
    assert (report.num_loaders, report.num_epochs) == (1, 2)


def test_persistent_workers_stay_and_have_the_bits_of_none() -> None:
    with penstock.patched(seed=0) as report:
        torch.manual_seed(3)
        loader = make(num_workers=2, persistent_workers=True)
        first = epochs(loader, 1)
        pids = [worker.pid for worker in loader._iterator._workers]
        again = epochs(loader, 1)
        assert [worker.pid for worker in loader._iterator._workers] == pids
        assert report.num_epochs == 2
        loader._iterator._shutdown_workers()
    with penstock.patched(seed=0, num_workers=0):
        torch.manual_seed(3)
        inline = make(num_workers=2, persistent_workers=True)
        assert_same(epochs(inline), [*first, *again])


def test_workers_are_kept_where_the_patch_says_so_and_the_code_does_not() -> None:
    def stream(is_asked: bool, **options: Any) -> tuple[list[Any], list[int]]:
        with penstock.patched(seed=0, **options):
            torch.manual_seed(3)
            loader, seen, pids = make(num_workers=2, persistent_workers=is_asked), [], []
            for _ in range(2):
                batches = iter(loader)
                pids += [worker.pid for worker in batches._workers]
                seen += list(batches)
            assert loader.persistent_workers is is_asked
        return seen, pids

    kept, pids = stream(False, persistent_workers=True)
    plain, others = stream(False)
    assert (len(set(pids)), len(set(others))) == (2, 4)
    assert_same(kept, plain)
    # With persistent workers in the user's code, torch draws no base seed for the second epoch.
    with pytest.raises(AssertionError):
        assert_same(kept, stream(True)[0])


def test_workers_that_are_kept_are_replaced_when_the_dataset_is_another() -> None:
    with penstock.patched(persistent_workers=True):
        loader = make(num_workers=1)
        assert len(epochs(loader, 1)) == 5
        object.__setattr__(loader, "dataset", Numbers(24, shape=(7,)))
        assert [batch[0].shape[1:] for batch in epochs(loader, 1)] == [(7,)] * 5
        assert len(collect(make(num_workers=0))) == 5


def test_spawned_workers_that_are_not_kept_are_a_note_from_the_second_epoch_on() -> None:
    with penstock.patched(multiprocessing_context="spawn") as report:
        loader = make()
        assert len(epochs(loader, 1)) == 5  # without workers, which is fast
        assert report.notes == []
        loader.num_workers = 1
        with pytest.warns(UserWarning, match="spawned again for each epoch.*persistent-workers"):
            assert len(epochs(loader, 1)) == 5
    assert report.notes == [patched_loader.SPAWNED_ANEW]
    assert report.changes == []


def test_an_iterable_dataset_is_shared_out_by_its_own_code() -> None:
    def numbers() -> list[Any]:
        loader = ImportedBefore(Shards(10), batch_size=2, num_workers=2)
        return [batch.tolist() for batch in loader]

    plain = numbers()
    with penstock.patched():
        assert numbers() == plain


def test_options_reach_the_engine() -> None:
    broken = Samples(lambda i: 1 // (i % 4), length=8)
    with penstock.patched(on_error="skip", num_workers=1) as report:
        loader = ImportedBefore(broken, batch_size=4)
        iterator = iter(loader)
        assert isinstance(iterator, LoaderIterator)
        assert len(iterator._workers) == 1
        assert [len(batch) for batch in iterator] == [3, 3]
        assert loader.num_workers == 0  # the user's setting stays visible
    assert report.num_bad == 2


def test_max_bad_holds_for_a_loader_that_nobody_keeps(tmp_path: Any) -> None:
    broken = Samples(lambda i: 1 // (i % 2), length=8)
    listed = tmp_path / "bad.jsonl"
    with (
        penstock.patched(on_error="skip", max_bad=2, bad_samples_file=listed),
        pytest.raises(TooManyBad),
    ):
        for _ in ImportedBefore(broken, batch_size=2):
            pass
    assert len(listed.read_text().splitlines()) == 3


def test_workers_auto_is_measured_with_the_code_s_own_loader() -> None:
    with penstock.patched(num_workers="auto", seed=0):
        auto = seeded(0)
    with penstock.patched(seed=0):
        assert_same(seeded(0), auto)


# -- cases that would hang or crash ----------------------------------------------------------------


def test_five_hundred_workers_become_what_the_machine_bears_with_one_line() -> None:
    with penstock.patched() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = make(num_workers=500)
        for _ in range(2):
            assert len(iter(loader)._workers) < 500
    lines = [str(one.message) for one in caught if "penstock:" in str(one.message)]
    assert len(lines) == 1
    assert "num_workers=500 becomes" in lines[0]
    assert len(report.changes) == 1


def test_fork_after_a_gpu_context_becomes_the_fork_server_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = quick_facts()._replace(has_gpu_context=True)
    monkeypatch.setattr(patched_loader, "quick_facts", lambda: facts)
    with penstock.patched() as report:
        loader = make(num_workers=1, multiprocessing_context="fork")
        with pytest.warns(UserWarning, match="hangs or crashes"):
            iterator = iter(loader)
        assert iterator._settings.start_method == "forkserver"
        assert len(list(iterator)) == 5
        assert len(list(loader)) == 5  # no second warning
    assert len(report.changes) == 1


def test_fork_without_a_gpu_context_is_obeyed() -> None:
    with penstock.patched() as report:
        iterator = iter(make(num_workers=1, multiprocessing_context="fork"))
        assert iterator._settings.start_method == "fork"
        assert len(list(iterator)) == 5
    assert report.changes == []
