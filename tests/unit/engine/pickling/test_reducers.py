"""What pickle refuses, and yet has a meaning in a worker: made anew there."""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.pickling import reducers
from support import scripts
from support.datasets import Numbers
from support.pickling import round_trip

pytestmark = pytest.mark.legacy


def sent(value: Any) -> Any:
    back, pickle_file = round_trip(value)
    pickle_file.close()
    return back


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_lock_between_threads_is_a_new_one_that_is_free(make: Any) -> None:
    lock = make()
    with lock:
        back = sent(lock)
    assert type(back) is type(lock)
    assert back is not lock
    assert back.acquire(blocking=False)


def test_a_context_variable_keeps_its_name_and_default() -> None:
    variable = contextvars.ContextVar("depth", default=3)
    back = sent(variable)
    assert (back.name, back.get()) == ("depth", 3)
    with pytest.raises(LookupError):
        sent(contextvars.ContextVar("bare")).get()


def test_what_belongs_to_a_thread_starts_empty() -> None:
    local = threading.local()
    local.seen = 1
    assert vars(sent(local)) == {}


def test_weak_dictionaries_keep_what_somebody_holds() -> None:
    held = Numbers(2)
    back = sent({"held": held, "weak": weakref.WeakValueDictionary(one=held)})
    assert back["weak"]["one"] is back["held"]
    assert len(sent(weakref.WeakValueDictionary(one=held))) == 0  # nobody there holds it
    keyed = sent({"held": held, "weak": weakref.WeakKeyDictionary({held: 5})})
    assert keyed["weak"][keyed["held"]] == 5


def test_a_cached_function_of_a_module_goes_by_name() -> None:
    from penstock.conv.algorithms.implicit_gemm import num_merged

    assert sent(num_merged) is num_merged


def local_fibonacci() -> Any:
    @functools.lru_cache(maxsize=7)
    def fibonacci(n: int) -> int:
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    return fibonacci


def test_a_cached_function_that_calls_itself_comes_back_with_an_empty_cache() -> None:
    ours = local_fibonacci()
    ours(10)
    back = sent(ours)
    assert back.cache_info().currsize == 0
    assert back(30) == 832040
    assert back.cache_parameters() == {"maxsize": 7, "typed": False}
    assert back.__name__ == "fibonacci"


def test_other_objects_are_not_ours_to_remake() -> None:
    assert reducers.reduce(Numbers(1)) is None


SCRIPT = """
import functools
from penstock import DataLoader

@functools.lru_cache
def cached(n):
    return n * n

@functools.singledispatch
def shown(value):
    return -1

@shown.register
def _(value: int):
    return value + 1

class Data:
    def __len__(self): return 4
    @functools.cached_property
    def one(self): return 1
    @functools.lru_cache(maxsize=None)
    def own(self, i): return cached(i) * self.one
    def __getitem__(self, i): return self.own(i) + shown(i)

for workers in (0, 2):
    print([batch.tolist() for batch in DataLoader(Data(), batch_size=4, num_workers=workers)])
"""


def test_a_script_with_caches_of_its_own_loads_in_workers(tmp_path: Path) -> None:
    ended = scripts.run(SCRIPT, tmp_path)
    assert ended.stdout.splitlines() == ["[[1, 3, 7, 13]]"] * 2, ended.stderr
