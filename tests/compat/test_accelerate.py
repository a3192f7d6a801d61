"""Loaders prepared by accelerate keep Penstock's engine and save and restore their position."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader
from penstock.errors import BadArgument, BadState
from support.datasets import Draws, Numbers, Samples, Shards

pytestmark = pytest.mark.vision
accelerate: Any = pytest.importorskip("accelerate")

NUM_EPOCHS = 3
STEPS = 5
"""Steps of one rank in an epoch."""


def make(num_workers: int = 0, kind: Any = DataLoader, **keywords: Any) -> Any:
    keywords = {"shuffle": True, "seed": 3, **keywords}
    return kind(Draws(24), batch_size=5, num_workers=num_workers, **keywords)


def accelerator(**configuration: Any) -> Any:
    configured = accelerate.utils.DataLoaderConfiguration(**configuration)
    return accelerate.Accelerator(cpu=True, dataloader_config=configured)


def prepare(loader: Any, **configuration: Any) -> Any:
    return accelerator(**configuration).prepare(loader)


def fields_of(batch: Any) -> list[Any]:
    return [field.tolist() for field in batch]


def epochs(loader: Any, count: int = NUM_EPOCHS) -> list[Any]:
    return [fields_of(batch) for _ in range(count) for batch in loader]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """Batches of the loader without accelerate."""
    return epochs(make())


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_prepared_loader_is_ours_with_the_bits_of_a_plain_one(
    num_workers: int, plain: list[Any]
) -> None:
    prepared = prepare(make(num_workers))
    assert isinstance(prepared, DataLoader)
    assert len(prepared) == STEPS
    assert epochs(prepared) == plain


def test_torch_s_loader_is_prepared_as_ever_and_fails_this() -> None:
    def draws(num_workers: int) -> list[Any]:
        torch.manual_seed(0)
        loader = TorchDataLoader(Draws(24), batch_size=5, num_workers=num_workers)
        prepared = prepare(loader)
        assert type(prepared.base_dataloader) is TorchDataLoader
        return epochs(prepared)

    prepare(make())  # changes for Penstock's loaders must not affect others
    assert draws(0) != draws(2)


def test_every_keyword_and_attribute_of_ours_is_kept(tmp_path: Path) -> None:
    broken = Samples(lambda i: 1 // (i % 4), length=8)
    listed = tmp_path / "bad.jsonl"
    prepared = prepare(
        DataLoader(
            broken, batch_size=4, num_workers=1, seed=7, on_error="skip", bad_samples_file=listed
        )
    )
    assert [len(batch) for batch in prepared] == [3, 3]
    assert [bad.index for bad in prepared.bad_samples] == [0, 4]
    assert len(listed.read_text().splitlines()) == 2
    assert (prepared.seed, prepared.on_error, prepared.num_restarts) == (7, "skip", 0)
    assert prepared.plan.num_workers.source == "asked"


def test_a_killed_worker_costs_a_restart_and_no_bit(plain: list[Any]) -> None:
    prepared, seen = prepare(make(2, prefetch_factor=1, persistent_workers=True)), []
    for batch in prepared:
        if not seen:
            os.kill(prepared._iterator._workers[0].pid, signal.SIGKILL)
        seen.append(fields_of(batch))
    assert seen == plain[:STEPS]
    assert prepared.num_restarts == 1
    prepared.close()


def test_gradients_are_summed_up_as_many_steps_as_asked_and_at_the_end() -> None:
    summing = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = summing.prepare(model, optimizer, make())
    syncs = []
    for batch in loader:
        with summing.accumulate(model):
            syncs.append(summing.sync_gradients)
            summing.backward(model(batch[1].float().reshape(-1, 1)).sum())
    assert syncs == [False, True, False, True, True]
    assert summing.gradient_state.remainder == -1  # the loader is exhausted


def test_a_batch_that_was_looked_at_before_does_not_shorten_the_epoch(plain: list[Any]) -> None:
    loader = make()
    next(iter(loader))
    prepared = prepare(loader)
    assert epochs(prepared, 2) == plain[STEPS:]  # continues like the unprepared loader


def test_a_place_that_was_restored_before_is_where_the_prepared_one_begins(
    plain: list[Any],
) -> None:
    loader, batches = make(), iter(make())
    next(batches)
    other = make()
    next(iter(other))
    loader.load_state_dict(other.state_dict())
    assert epochs(prepare(loader), 1) == plain[1:STEPS]


def test_without_a_seed_the_loader_is_ours_too() -> None:
    def seen(num_workers: int) -> list[Any]:
        torch.manual_seed(5)
        return epochs(prepare(make(num_workers, seed=None)))

    assert seen(0) == seen(2)


@pytest.mark.parametrize("is_seedable", [False, True])
def test_an_epoch_is_as_long_as_it_was_and_each_is_another(is_seedable: bool) -> None:
    seen = epochs(prepare(make(seed=None), use_seedable_sampler=is_seedable))
    indices = [[i for batch in seen[k : k + STEPS] for i in batch[0]] for k in (0, STEPS)]
    assert sorted(indices[0]) == sorted(indices[1]) == list(range(24))
    assert indices[0] != indices[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_prepared_too(num_workers: int) -> None:
    prepared = prepare(DataLoader(Shards(12), batch_size=2, num_workers=num_workers))
    assert isinstance(prepared, DataLoader)
    assert sorted(n for batch in prepared for n in batch.tolist()) == list(range(12))


def test_samples_without_batches_keep_their_order() -> None:
    """accelerate drops the sampler when there are no batches."""
    loader = DataLoader(Draws(24), batch_size=None, shuffle=True, seed=3)
    order = [sample[0] for sample in DataLoader(Draws(24), batch_size=None, shuffle=True, seed=3)]
    assert [sample[0] for sample in prepare(loader)] == order


def test_a_loader_of_torch_s_over_the_dataset_of_one_of_ours_stays_torch_s() -> None:
    stream = Shards(12)
    ours, theirs = prepare(DataLoader(stream, batch_size=2)), prepare(TorchDataLoader(stream))
    assert isinstance(ours, DataLoader)
    assert type(theirs.base_dataloader) is TorchDataLoader


def test_a_loader_of_a_class_of_one_s_own_stays_one_and_can_be_pickled(plain: list[Any]) -> None:
    for kind in (DataLoader, Own):
        prepared = prepare(make(kind=kind))
        assert isinstance(prepared, kind)
        again = pickle.loads(pickle.dumps(prepared))
        assert isinstance(again.base_dataloader, kind)
        assert epochs(again) == plain


class Own(DataLoader[Any]):
    pass


def test_accelerate_s_stateful_loader_is_ours_because_ours_has_a_state(plain: list[Any]) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    prepared = prepare(make(), use_stateful_dataloader=True)
    assert isinstance(prepared, DataLoader)
    assert epochs(prepared) == plain


# -- epochs ----------------------------------------------------------------------------------------


def test_set_epoch_is_obeyed(plain: list[Any]) -> None:
    prepared = prepare(make())
    prepared.set_epoch(2)
    assert epochs(prepared, 1) == plain[2 * STEPS :]
    for _ in range(2):
        prepared.set_epoch(1)
        assert epochs(prepared, 1) == plain[STEPS : 2 * STEPS]


def test_an_epoch_that_is_left_early_is_not_begun_again(plain: list[Any]) -> None:
    prepared, seen = prepare(make()), []
    for _ in range(NUM_EPOCHS):
        for batch in prepared:
            seen.append(fields_of(batch))
            break
    assert seen == plain[::STEPS]


# -- resuming --------------------------------------------------------------------------------------


def skipping(training: Any, loader: Any, num_done: int) -> Any:
    return training.skip_first_batches(loader, num_done % STEPS)


def as_saved(training: Any, loader: Any, num_done: int) -> Any:
    return loader


def as_registered(training: Any, loader: Any, num_done: int) -> Any:
    return loader


def train(
    folder: Path,
    way: Callable[[Any, Any, int], Any] = as_saved,
    *,
    num_workers: int = 0,
    num_done: int | None = None,
    stop_at: int | None = None,
    kind: Any = DataLoader,
    **keywords: Any,
) -> list[Any]:
    """Train like a typical accelerate script. An earlier call saved ``num_done`` steps."""
    training, loader, seen = accelerate.Accelerator(cpu=True), None, []
    loader = make(num_workers, kind, **keywords)
    if way is as_registered:
        training.register_for_checkpointing(loader)
    else:
        loader = training.prepare(loader)
    if num_done is not None:
        training.load_state(str(folder))
    for epoch in range((num_done or 0) // STEPS, NUM_EPOCHS):
        is_first = num_done is not None and epoch == num_done // STEPS
        active = way(training, loader, num_done or 0) if is_first else loader
        for batch in active:
            seen.append(fields_of(batch))
            if (num_done or 0) + len(seen) == stop_at:
                training.save_state(str(folder))
                return seen
    return seen


@pytest.mark.parametrize("stop_at", [1, 5, 7])
@pytest.mark.parametrize("way", [as_saved, skipping, as_registered])
def test_a_training_goes_on_with_the_batches_that_were_missing(
    way: Any, stop_at: int, tmp_path: Path, plain: list[Any]
) -> None:
    before = train(tmp_path, way, num_workers=2, stop_at=stop_at)
    assert len(before) == stop_at
    assert before + train(tmp_path, way, num_workers=1, num_done=stop_at) == plain


@pytest.mark.parametrize("way", [as_saved, skipping])
def test_a_training_that_is_stopped_twice_goes_on_twice(
    way: Any, tmp_path: Path, plain: list[Any]
) -> None:
    """The second stop is at the end of the epoch that the first resume continued."""
    first = train(tmp_path, way, stop_at=3)
    second = train(tmp_path, way, num_done=3, stop_at=STEPS)
    assert first + second + train(tmp_path, way, num_done=STEPS) == plain


def test_torch_s_loader_begins_the_epoch_anew(tmp_path: Path) -> None:
    def run(**more: Any) -> list[Any]:
        loader = TorchDataLoader(Draws(24), batch_size=5)
        training = accelerate.Accelerator(cpu=True)
        prepared, seen = training.prepare(loader), []
        if more.get("is_second"):
            training.load_state(str(tmp_path))
        for batch in prepared:
            seen.append(batch[0].tolist())
            if len(seen) == more.get("stop_at"):
                training.save_state(str(tmp_path))
                break
        return seen

    assert run(stop_at=2) + run(is_second=True) != run()


def test_a_checkpoint_of_another_training_is_a_warning_and_where_the_place_was_asked_for_an_error(
    tmp_path: Path, plain: list[Any]
) -> None:
    train(tmp_path, stop_at=2, seed=4)
    match = r"restarts its epoch from the beginning.*seed of SeededOrder: 4 in the state, 3 here"
    with pytest.warns(UserWarning, match=match):
        assert train(tmp_path, num_done=0) == plain
    prepared = prepare(make(), use_stateful_dataloader=True)
    state = prepare(make(seed=4)).state_dict()
    with pytest.raises(BadState, match="seed"):
        prepared.load_state_dict(state)


def test_without_a_seed_the_epoch_that_was_under_way_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = train(tmp_path, seed=None)
    torch.manual_seed(5)
    before = train(tmp_path, seed=None, stop_at=7)
    torch.manual_seed(99)
    after = train(tmp_path, seed=None, num_done=7)
    assert before + after[:3] == whole[:10]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_batches_are_not_loaded(num_workers: int, plain: list[Any]) -> None:
    training, loader = accelerator(), make(num_workers)
    rest = training.skip_first_batches(training.prepare(loader), 3)
    assert isinstance(rest, DataLoader)
    assert len(rest) == 2
    assert epochs(rest, 1) == plain[3:STEPS]


# -- ranks, without processes ----------------------------------------------------------------------


def rank_of(loader: Any, rank: int, world_size: int = 2, **options: Any) -> Any:
    """Return the loader as the accelerator of this rank prepares it."""
    assert not loader._is_accelerate_prepared  # accelerate checks this first
    return accelerate.data_loader.prepare_data_loader(
        loader, num_processes=world_size, process_index=rank, **options
    )


def rows_of(seen: list[Any]) -> list[tuple[Any, ...]]:
    return [row for batch in seen for row in zip(*map(map_tuples, batch), strict=True)]


def map_tuples(field: list[Any]) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in field]


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"even_batches": False}])
def test_ranks_together_have_the_rows_of_one_process(
    options: dict[str, Any], plain: list[Any]
) -> None:
    """Order and augmentation are the same. Samples that pad the last batch are extra."""
    size = 4 if "split_batches" in options else 5
    ranks = [
        rank_of(DataLoader(Draws(24), batch_size=size, shuffle=True, seed=3), rank, **options)
        for rank in (0, 1)
    ]
    found = [row for rank in ranks for row in rows_of(epochs(rank, 1))]
    wanted = rows_of(plain[:STEPS])
    assert set(wanted) <= set(found)
    assert len(found) == (30 if options == {} else 24)


def test_ranks_of_torch_s_loader_fail_this(plain: list[Any]) -> None:
    ranks = [rank_of_torch(rank) for rank in (0, 1)]
    torch.manual_seed(0)
    one = rows_of(epochs(TorchDataLoader(Draws(24), batch_size=5), 1))
    torch.manual_seed(0)
    assert not set(one) <= {row for rank in ranks for row in rows_of(epochs(rank, 1))}


def rank_of_torch(rank: int) -> Any:
    loader = TorchDataLoader(Draws(24), batch_size=5)
    return accelerate.data_loader.prepare_data_loader(loader, num_processes=2, process_index=rank)


@pytest.mark.parametrize("num_done", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_goes_on_where_it_was_with_the_state_of_the_other(num_done: int, rank: int) -> None:
    whole = epochs(rank_of(make(), rank), 2)
    other = rank_of(make(), 1 - rank)
    for number, _ in enumerate(other, 1):
        if number == num_done:
            state = other.state_dict()
            break
    fresh = rank_of(make(2), rank)
    fresh.load_state_dict(state)
    assert epochs(fresh, 2)[: 6 - num_done] == whole[num_done:]


def test_one_process_goes_on_with_twice_the_batch_of_two() -> None:
    two = rank_of(make(), 0)
    for _ in two:
        break
    one = prepare(DataLoader(Draws(24), batch_size=10, shuffle=True, seed=3))
    one.load_state_dict(two.state_dict())
    whole = rows_of(epochs(make(), 1))
    assert rows_of(epochs(one, 1)) == whole[10:]


def test_a_loader_that_takes_its_rank_s_part_already_is_refused_by_two_ranks() -> None:
    loader = make(rank=0, world_size=2)
    with pytest.raises(BadArgument, match="already"):
        rank_of(loader, 0)
    assert len(epochs(prepare(make(rank=0, world_size=2)), 1)) == 3  # allowed with one process


# -- unknown versions ------------------------------------------------------------------------------


def test_an_accelerate_that_is_built_otherwise_gets_a_line_and_torch_s_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.integrations import accelerate as ours

    monkeypatch.setattr(ours, "_is_hooked", False)
    monkeypatch.delattr(accelerate.data_loader, "SkipBatchSampler")
    with pytest.warns(UserWarning, match="this accelerate has no SkipBatchSampler"):
        assert make()._is_accelerate_prepared is False


def test_a_version_outside_the_tested_range_gets_a_line_and_works(
    monkeypatch: pytest.MonkeyPatch, plain: list[Any]
) -> None:
    from penstock.integrations import accelerate as ours
    from penstock.integrations import tested_versions as libraries

    monkeypatch.setattr(accelerate, "__version__", "9.0")
    monkeypatch.setattr(libraries, "_told", set())
    monkeypatch.setattr(ours, "_is_hooked", False)
    monkeypatch.setattr(
        accelerate.data_loader.DataLoaderAdapter,
        "__init__",
        accelerate.data_loader.DataLoaderAdapter.__init__,
    )
    with pytest.warns(UserWarning, match=r"accelerate 9\.0 is untested .*pip install"):
        prepared = prepare(make())
    assert epochs(prepared) == plain


def test_nothing_is_asked_of_a_loader_whose_user_has_no_accelerate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(__import__("sys").modules, "accelerate.data_loader")
    assert DataLoader(Numbers(4))._is_accelerate_prepared is False
