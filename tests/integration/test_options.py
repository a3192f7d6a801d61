"""Arguments have torch's names, meanings and errors, which are raised before any worker starts."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader, patched
from penstock.errors import BadArgument
from support import leftovers, scripts
from support.datasets import Numbers, Shards, collect, differences

legacy = pytest.mark.legacy

WRONG: dict[str, dict[str, Any]] = {
    "a negative number of workers": {"num_workers": -1},
    "a negative timeout": {"timeout": -1},
    "prefetch without workers": {"prefetch_factor": 3, "num_workers": 0},
    "negative prefetch": {"prefetch_factor": -1, "num_workers": 1},
    "persistent without workers": {"persistent_workers": True},
    "a sampler and a shuffle": {"shuffle": True, "sampler": SequentialSampler(range(3))},
    "a batch sampler and a batch size": {"batch_sampler": [[1]], "batch_size": 3},
    "a batch sampler and a shuffle": {"batch_sampler": [[1]], "shuffle": True},
    "a batch sampler and drop_last": {"batch_sampler": [[1]], "drop_last": True},
    "drop_last without batches": {"batch_size": None, "drop_last": True},
    "no sample in a batch": {"batch_size": 0},
    "a negative batch": {"batch_size": -2},
    "drop_last of text": {"batch_size": 2, "drop_last": "yes"},
    "an unknown start method": {"num_workers": 1, "multiprocessing_context": "teleport"},
    "a start method of another type": {"num_workers": 1, "multiprocessing_context": 5},
    "a start method without workers": {"multiprocessing_context": "spawn"},
    "a generator of another type": {"shuffle": True, "generator": 5},
}
WRONG_FOR_ITERABLES: dict[str, dict[str, Any]] = {
    "a shuffle": {"shuffle": True},
    "a sampler": {"sampler": SequentialSampler(range(3))},
    "a batch sampler": {"batch_sampler": BatchSampler(SequentialSampler(range(3)), 2, False)},
}
OURS: dict[str, dict[str, Any]] = {
    "an unknown pool": {"pool": "swimming"},
    "an unknown randomness": {"randomness": "dice"},
    "workers in words": {"num_workers": "two"},
    "no pool": {"pool": None},
    "a batch size of text": {"batch_size": "3"},
}


def refusal(kind: Any, dataset: Any, arguments: dict[str, Any]) -> BaseException | None:
    try:
        next(iter(kind(dataset, **arguments)))
    except Exception as error:
        return error
    return None


@legacy
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_raises_torch_s_type_before_any_worker_starts(name: str) -> None:
    before = leftovers.look().children
    theirs = refusal(TorchDataLoader, Numbers(), WRONG[name])
    ours = refusal(DataLoader, Numbers(), WRONG[name])
    assert theirs is not None
    assert isinstance(ours, type(theirs)), f"{theirs!r} against {ours!r}"
    assert leftovers.look().children == before


@legacy
@pytest.mark.parametrize("name", WRONG_FOR_ITERABLES)
def test_a_wrong_argument_for_an_iterable_dataset_raises_torch_s_type(name: str) -> None:
    theirs = refusal(TorchDataLoader, Shards(), WRONG_FOR_ITERABLES[name])
    ours = refusal(DataLoader, Shards(), WRONG_FOR_ITERABLES[name])
    assert theirs is not None
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)


@legacy
@pytest.mark.parametrize("name", OURS)
def test_a_wrong_argument_of_our_own_is_refused_with_what_is_known(name: str) -> None:
    with pytest.raises(BadArgument, match="Try: DataLoader") as info:
        DataLoader(Numbers(), **OURS[name])
    assert isinstance(info.value, ValueError)


def test_right_arguments_are_not_refused() -> None:
    assert refusal(DataLoader, Numbers(), {"batch_size": 2, "timeout": 5}) is None
    assert refusal(DataLoader, Shards(), {"batch_size": 2}) is None


# -- attributes ------------------------------------------------------------------------------------


def our_arguments() -> list[str]:
    return [name for name in inspect.signature(DataLoader.__init__).parameters if name != "self"]


@legacy
def test_every_argument_is_an_attribute_of_the_same_name() -> None:
    loader = DataLoader(Numbers())
    assert [name for name in our_arguments() if not hasattr(loader, name)] == []


@legacy
def test_the_attributes_are_what_was_given() -> None:
    generator = torch.Generator()
    given: dict[str, Any] = {
        "dataset": Numbers(),
        "batch_size": 7,
        "num_workers": 2,
        "collate_fn": list,
        "drop_last": True,
        "timeout": 3.5,
        "worker_init_fn": print,
        "generator": generator,
        "prefetch_factor": 5,
        "persistent_workers": True,
        "in_order": False,
        "shuffle": True,
        "pool": "thread",
        "randomness": "worker",
    }
    loader = DataLoader(**given)
    assert {name: getattr(loader, name) for name in given} == given


@legacy
def test_attributes_that_torch_also_has_have_torch_s_values() -> None:
    names = [n for n in inspect.signature(TorchDataLoader.__init__).parameters if n != "self"]
    names = [
        name for name in names if name not in ("dataset", "sampler", "batch_sampler", "shuffle")
    ]
    for arguments in (
        {},
        {"num_workers": 1},
        {"batch_size": None},
        {"num_workers": 1, "timeout": 3},
    ):
        ours, theirs = DataLoader(Numbers(), **arguments), TorchDataLoader(Numbers(), **arguments)
        different = {
            name: (getattr(ours, name), getattr(theirs, name))
            for name in names
            if hasattr(theirs, name) and getattr(ours, name) != getattr(theirs, name)
        }
        assert different == {}


@legacy
def test_a_loader_can_be_rebuilt_from_its_attributes_as_lightning_does() -> None:
    loader = DataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=2, randomness="worker")
    arguments = {name: getattr(loader, name) for name in our_arguments()}
    arguments.update(shuffle=False, batch_sampler=None)
    arguments["sampler"] = DistributedSampler(Numbers(), num_replicas=2, rank=1, shuffle=False)
    again = type(loader)(**arguments)
    assert torch.cat([labels for _, labels in again]).tolist() == list(range(1, 20, 2))
    assert again.randomness == "worker"


@legacy
def test_it_is_a_dataloader_of_torch_s() -> None:
    loader = DataLoader(Numbers(), batch_size=3, shuffle=True)
    assert isinstance(loader, TorchDataLoader)
    assert isinstance(loader.sampler, RandomSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert len(loader) == 7
    assert DataLoader[int] is not None  # subscriptable, like torch's


@legacy
@pytest.mark.parametrize("name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset"])
def test_what_torch_forbids_to_change_later_stays_forbidden(name: str) -> None:
    for kind in (DataLoader, TorchDataLoader):
        with pytest.raises(ValueError, match=name):
            setattr(kind(Numbers()), name, 5)


def test_more_workers_than_cores_is_warned_about_as_torch_warns() -> None:
    loader = DataLoader(Numbers(2), num_workers=1)
    loader.num_workers = 4 * (os.cpu_count() or 1)
    with pytest.warns(UserWarning, match="This DataLoader will create"):
        loader.check_worker_number_rationality()
    with pytest.warns(UserWarning, match="This DataLoader will create"):
        DataLoader(Numbers(2), num_workers=4 * (os.cpu_count() or 1))


TOO_MANY = """
import os, sys, warnings
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch.utils.data
import penstock
count = int(sys.argv[1])
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    if sys.argv[2] == "swap":
        loader = penstock.DataLoader(range(4), num_workers=count)
    else:  # as by: penstock run --workers
        penstock.patch(num_workers=count)
        loader = torch.utils.data.DataLoader(range(4))
    assert len([*loader, *loader]) == 8
print(sum("This DataLoader will create" in str(one.message) for one in seen))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="sets the usable cores")
@pytest.mark.parametrize("way", ["swap", "patch"])
@pytest.mark.parametrize(("num_workers", "num_warnings"), [("2", "1"), ("1", "0")])
def test_more_workers_than_cores_are_warned_about_once(
    num_workers: str, num_warnings: str, way: str, tmp_path: Path
) -> None:
    result = scripts.run(TOO_MANY, tmp_path, num_workers, way)
    assert result.stdout.strip() == num_warnings, result.stderr


def test_pin_memory_without_an_accelerator_does_what_torch_does() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    outcomes = []
    for kind in (DataLoader, TorchDataLoader):
        with pytest.warns(UserWarning, match="pin_memory"):
            outcomes.append(collect(kind(Numbers(4), batch_size=2, pin_memory=True)))
    assert not differences(*outcomes)


# -- the plan --------------------------------------------------------------------------------------


@legacy
def test_auto_takes_the_usable_cores_and_says_why() -> None:
    loader = DataLoader(Numbers(), batch_size=4, num_workers="auto")
    cores = len(os.sched_getaffinity(0))
    assert 1 <= loader.num_workers <= cores
    assert loader.plan.num_workers.value == loader.num_workers
    assert loader.plan.num_workers.source == "rule"
    assert "usable core" in loader.plan.num_workers.reason
    assert len(collect(loader)) == 5


PLANS: list[tuple[dict[str, Any], str, Any, int, str]] = [
    ({}, "inline", None, 0, "sample"),
    ({"num_workers": 2}, "process", "forkserver", 2, "sample"),
    ({"num_workers": 2, "multiprocessing_context": "spawn"}, "process", "spawn", 2, "sample"),
    ({"num_workers": 2, "multiprocessing_context": "fork"}, "process", "fork", 2, "sample"),
    (
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
        "process",
        "forkserver",
        2,
        "sample",
    ),
    ({"num_workers": 2, "pool": "thread"}, "thread", None, 2, "sample"),
    ({"num_workers": 2, "pool": "inline"}, "inline", None, 2, "sample"),
    ({"num_workers": 2, "randomness": "worker"}, "process", "forkserver", 2, "worker"),
]


@legacy
@pytest.mark.skipif(os.name != "posix", reason="the fork server and fork are POSIX")
@pytest.mark.parametrize(("arguments", "pool", "method", "workers", "randomness"), PLANS)
def test_the_plan_says_what_will_be_done(
    arguments: dict[str, Any], pool: str, method: Any, workers: int, randomness: str
) -> None:
    loader = DataLoader(Numbers(), **arguments)
    plan = loader.plan
    assert (plan.pool.value, plan.start_method.value) == (pool, method)
    assert plan.randomness.value == randomness
    if pool != "inline":
        assert plan.num_workers.value == workers
    for line in str(plan).splitlines():
        assert ": " in line  # every choice has a reason
    iterator = iter(loader)
    assert len(getattr(iterator, "_workers", [])) == (0 if pool == "inline" else workers)


def test_the_plan_of_an_iterable_dataset_says_why_its_randomness_is_the_worker_s() -> None:
    plan = DataLoader(Shards(), num_workers=2).plan
    assert plan.randomness.value == "worker"
    assert "position" in plan.randomness.reason


def test_the_plan_of_threads_over_an_iterable_dataset_says_why_there_is_one() -> None:
    plan = DataLoader(Shards(), num_workers=3, pool="thread").plan
    assert plan.num_workers.value == 1
    assert plan.num_workers.source == "rule"


@legacy
def test_no_prefetch_is_refused_instead_of_waiting_for_ever() -> None:
    with pytest.raises(ValueError, match="prefetch_factor=0 would load no batch"):
        DataLoader(Numbers(), num_workers=1, prefetch_factor=0)
    if torch.__version__.startswith("1."):
        return  # torch 1 refuses it when the loader is created
    loader = TorchDataLoader(Numbers(), num_workers=1, prefetch_factor=0)
    with patched(), pytest.raises(BadArgument, match="prefetch_factor=0 would load no batch"):
        iter(loader)


def test_a_dataset_that_is_none_or_a_class_is_named() -> None:
    for options in ({}, {"shuffle": True}, {"seed": 0}, {"num_workers": 2}):
        with pytest.raises(TypeError, match=r"the dataset is None\. Try: DataLoader"):
            DataLoader(None, **options)
        with pytest.raises(TypeError, match=r"the class Numbers, .* Try: DataLoader\(Numbers\("):
            DataLoader(Numbers, **options)
    with pytest.raises(TypeError, match="the class Shards, not an instance"):
        DataLoader(Shards)
    for dataset, sampler in ((None, [0]), (WithLength, None), (iter([1]), None)):
        DataLoader(dataset, sampler=sampler)  # controls: torch's class accepts them too


class Meta(type):
    def __len__(cls) -> int:
        return 3

    def __getitem__(cls, index: int) -> int:
        return index


class WithLength(metaclass=Meta):
    """A class that is a dataset, as an Enum is."""


def test_a_limit_of_bad_samples_without_a_policy_is_warned_about() -> None:
    with pytest.warns(
        UserWarning, match="max_bad=3 has no effect, because on_error='raise'"
    ) as told:
        DataLoader(Numbers(4), max_bad=3)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(Numbers(4), max_bad=3, on_error="skip")
        DataLoader(Numbers(4))


def test_an_unknown_policy_is_answered_with_skip() -> None:
    for given, advice in (("ignore", "skip"), ("warn", "skip"), ("replaced", "replace")):
        with pytest.raises(BadArgument, match=rf"Try: DataLoader\(\.\.\., on_error='{advice}'\)"):
            DataLoader(Numbers(4), on_error=given)
