"""Objects that pickle rejects but that make sense in a worker are recreated there."""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from typing import Any

import pytest

from penstock.engine.pickling import reducers
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
    assert len(sent(weakref.WeakValueDictionary(one=held))) == 0  # no other reference in the worker
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
