"""An exception that crosses a process boundary keeps its class and attributes."""

from __future__ import annotations

import builtins
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.pickling.exceptions import ErrorReport, WorkerTraceback, describe, rebuild

pytestmark = pytest.mark.legacy


class TwoArguments(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code


class NoArgumentsKept(ValueError):
    """Its args do not match its constructor, so pickle cannot rebuild it."""

    def __init__(self, path: str, *, line: int) -> None:
        super().__init__(f"{path}:{line}")
        self.path = path
        self.line = line


class BrokenText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class BrokenRepr(Exception):
    __slots__ = ()

    def __repr__(self) -> str:
        raise RuntimeError("no repr for you")


class HoldsALock(LookupError):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class LockInArguments(LookupError):
    def __init__(self, message: str, lock: Any) -> None:
        super().__init__(message, lock)


class RefusesPickling(OSError):
    def __reduce__(self) -> Any:
        raise TypeError("never")


class OwnNew(ValueError):
    def __new__(cls, *, code: int) -> OwnNew:
        return super().__new__(cls, code)

    def __init__(self, *, code: int) -> None:
        super().__init__(code)


def caught(raise_it: Callable[[], Any]) -> BaseException:
    try:
        raise_it()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def throw(error: BaseException) -> Any:
    raise error


def across(raise_it: Callable[[], Any], index: Any = 7) -> BaseException:
    """Raise, describe, send as bytes and rebuild an exception, as between two processes."""
    report = describe(
        caught(raise_it), worker=3, where="in DataLoader worker process 3", index=index
    )
    sent: ErrorReport = pickle.loads(pickle.dumps(report))
    return rebuild(sent)


ERRORS: dict[str, BaseException] = {
    "one argument": ValueError("bad pixel"),
    "no argument": ValueError(),
    "many arguments": ValueError("a", 2, [3.0]),
    "a key": KeyError("missing key"),
    "a constructor of two": TwoArguments(5, "five"),
    "a constructor with keywords": NoArgumentsKept("a.jpg", line=3),
    "a broken __str__": BrokenText("x"),
    "a broken __repr__": BrokenRepr("x"),
    "an attribute that cannot be pickled": HoldsALock("held"),
    "an argument that cannot be pickled": LockInArguments("held", threading.Lock()),
    "pickling refused": RefusesPickling("no"),
    "a stop": StopIteration(5),
    "an assertion": AssertionError(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_type_survives(name: str) -> None:
    error = ERRORS[name]
    assert isinstance(across(lambda: throw(error)), type(error))


@pytest.mark.parametrize("name", ERRORS)
def test_the_text_has_the_worker_the_sample_and_its_traceback(name: str) -> None:
    error = ERRORS[name]
    text = str(across(lambda: throw(error)))
    assert f"Caught {type(error).__name__} in DataLoader worker process 3" in text
    assert "sample 7" in text
    assert "Traceback (most recent call last)" in text
    assert "in throw" in text


@pytest.mark.parametrize(
    "name",
    ["one argument", "no argument", "many arguments", "a key", "a constructor of two", "a stop"],
)
def test_the_arguments_survive(name: str) -> None:
    assert across(lambda: throw(ERRORS[name])).args == ERRORS[name].args


def test_own_attributes_survive() -> None:
    error = across(lambda: throw(NoArgumentsKept("a.jpg", line=3)))
    assert (error.path, error.line) == ("a.jpg", 3)  # type: ignore[attr-defined]


def test_what_the_parent_adds_says_where() -> None:
    error: Any = across(lambda: throw(ValueError("x")), index=("shard", 4))
    assert error.sample_index == ("shard", 4)
    assert error.worker_id == 3


def test_an_index_that_cannot_be_sent_is_left_out_and_not_fatal() -> None:
    error: Any = across(lambda: throw(ValueError("x")), index=threading.Lock())
    assert error.sample_index is None
    assert isinstance(error, ValueError)


def test_the_cause_is_the_traceback_of_the_worker() -> None:
    error = across(lambda: throw(ValueError("bad pixel")))
    assert isinstance(error.__cause__, WorkerTraceback)
    assert "in throw" in str(error.__cause__)
    assert "ValueError: bad pixel" in str(error.__cause__)


def test_a_chain_of_causes_is_in_the_text() -> None:
    def chained() -> None:
        try:
            throw(KeyError("inner"))
        except KeyError as inner:
            raise ValueError("outer") from inner

    text = str(across(chained))
    assert "inner" in text
    assert "outer" in text
    assert "direct cause" in text


def test_a_missing_file_still_has_its_name_and_number() -> None:
    error: Any = across(lambda: Path("/no/such/file.jpg").read_bytes())
    assert isinstance(error, FileNotFoundError)
    assert error.filename == "/no/such/file.jpg"
    assert error.errno == 2
    assert error.strerror == "No such file or directory"


def test_a_decoding_error_still_has_its_fields() -> None:
    error: Any = across(lambda: b"ab\xff".decode("utf-8"))
    assert isinstance(error, UnicodeDecodeError)
    assert (error.encoding, error.object, error.start, error.end) == ("utf-8", b"ab\xff", 2, 3)


def test_a_missing_module_still_has_its_name() -> None:
    error: Any = across(lambda: __import__("no_such_module"))
    assert isinstance(error, ModuleNotFoundError)
    assert error.name == "no_such_module"


def test_a_class_that_is_known_here_only_is_caught_as_itself() -> None:
    class Local(ValueError):
        pass

    with pytest.raises(Local):
        throw(across(lambda: throw(Local("x"))))


def test_a_class_that_cannot_be_sent_becomes_a_runtime_error_with_the_same_text() -> None:
    lock = threading.Lock()

    class Unsendable(Exception):
        held = lock

    error = across(lambda: throw(Unsendable("bad pixel")))
    assert isinstance(error, RuntimeError)
    assert "Caught Unsendable" in str(error)
    assert "bad pixel" in str(error)


def test_a_class_with_its_own_new_keeps_its_type() -> None:
    error = across(lambda: throw(OwnNew(code=5)))
    assert isinstance(error, OwnNew)
    assert "Caught OwnNew" in str(error)


def test_the_rebuilt_exception_can_be_pickled_again() -> None:
    error = pickle.loads(pickle.dumps(across(lambda: throw(TwoArguments(5, "five")))))
    assert type(error) is TwoArguments
    assert error.args == (5, "five")
    assert error.code == 5


def test_the_frames_of_penstock_are_not_in_the_traceback() -> None:
    text = str(across(lambda: throw(ValueError("x"))))
    assert "penstock/engine" not in text


def test_a_traceback_of_another_error_would_not_pass() -> None:
    text = str(across(lambda: throw(ValueError("other"))))
    assert "bad pixel" not in text
    assert "sample 8" not in text


# -- groups, and classes that forbid subclasses ----------------------------------------------------


groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="groups exist from Python 3.11 on")


def make_group(*members: BaseException) -> Any:
    return builtins.ExceptionGroup("several", list(members))  # type: ignore[attr-defined]


@groups
@pytest.mark.parametrize(
    "name", [name for name in ERRORS if name not in ("a broken __str__", "a broken __repr__")]
)
def test_a_group_keeps_its_type_and_the_types_of_its_members(name: str) -> None:
    member = ERRORS[name]
    error: Any = across(lambda: throw(make_group(ValueError("plain"), member)))
    assert isinstance(error, builtins.ExceptionGroup)  # type: ignore[attr-defined]
    assert [type(one) for one in error.exceptions] == [ValueError, type(member)]
    assert "Caught ExceptionGroup" in str(error)


@groups
def test_a_member_keeps_its_arguments_and_attributes_also_two_groups_deep() -> None:
    inner = make_group(NoArgumentsKept("a.jpg", line=3), OwnNew(code=5))
    error: Any = across(lambda: throw(make_group(inner)))
    first, second = error.exceptions[0].exceptions
    assert (type(first), first.path, first.line) == (NoArgumentsKept, "a.jpg", 3)
    assert (type(second), second.args) == (OwnNew, (5,))


@groups
def test_pickle_alone_would_lose_such_a_group() -> None:
    """Negative control: plain pickle cannot restore this group."""
    packed = pickle.dumps(make_group(NoArgumentsKept("a.jpg", line=3)))
    with pytest.raises(TypeError):
        pickle.loads(packed)


@groups
def test_a_member_that_cannot_be_sent_costs_the_others_nothing() -> None:
    lock = threading.Lock()

    class Unsendable(Exception):
        held = lock

    group = make_group(Unsendable("bad pixel"), KeyError("k"))
    error: Any = across(lambda: throw(group))
    assert [type(one) for one in error.exceptions] == [RuntimeError, KeyError]
    assert str(error.exceptions[0]) == "Unsendable: bad pixel"


class Final(ValueError):
    """Forbids subclasses."""

    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


class NeedsKeyword(ValueError):
    """Requires a keyword argument from its subclasses."""

    def __init_subclass__(cls, *, code: int) -> None:
        pass


@pytest.mark.parametrize("kind", [Final, NeedsKeyword])
def test_a_class_that_forbids_subclasses_keeps_its_type(kind: Any) -> None:
    error = across(lambda: throw(kind("bad pixel")))
    assert type(error) is kind
    assert error.args == ("bad pixel",)
    assert "in throw" in str(error.__cause__)
    if sys.version_info >= (3, 11):
        assert f"Caught {kind.__name__} in DataLoader worker process 3" in error.__notes__[0]


def test_such_a_class_has_no_subclasses() -> None:
    """Negative control: the usual approach, a subclass, is impossible."""
    for kind in (Final, NeedsKeyword):
        with pytest.raises(TypeError):
            type("Other", (kind,), {})


def test_the_file_of_the_sample_is_named() -> None:
    told = str(
        rebuild(describe(OSError("truncated"), worker=0, where="here", index=7, path="cat/7.jpg"))
    )
    assert told.startswith("Caught OSError here while loading sample 7 (cat/7.jpg).")
    without = str(rebuild(describe(OSError("truncated"), worker=0, where="here", index=7)))
    assert without.startswith("Caught OSError here while loading sample 7.")
    packed = OSError("truncated")
    packed.sample_index = 300  # type: ignore[attr-defined]
    other = str(rebuild(describe(packed, worker=0, where="here", index=7, path="cat/7.jpg")))
    assert other.startswith("Caught OSError here while loading sample 300.")
