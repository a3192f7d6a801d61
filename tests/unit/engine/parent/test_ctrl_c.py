"""Ctrl-C is delayed while a process starts, and handled normally afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.parent.ctrl_c import deferred_ctrl_c

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="POSIX signals"),
]


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def is_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_ctrl_c_is_raised_at_the_end_of_the_block() -> None:
    reached = []

    def work() -> None:
        with deferred_ctrl_c():
            signal.raise_signal(signal.SIGINT)
            reached.append("end of the block")
        reached.append("after it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["end of the block"]
    assert not is_blocked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_the_block_it_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_that_another_thread_takes_waits_as_well() -> None:
    reached = []

    def take() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def work() -> None:
        with deferred_ctrl_c():
            thread = threading.Thread(target=take)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for the new thread
            thread.start()
            thread.join()
            reached.append("end of the block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["end of the block"]


def test_a_handler_of_the_user_s_is_called_once() -> None:
    calls: list[Any] = []
    signal.signal(signal.SIGINT, lambda *given: calls.append(given))
    with deferred_ctrl_c():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert calls == []
    assert [number for number, _ in calls] == [signal.SIGINT]


@pytest.mark.parametrize("action", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_setting_that_is_no_function_stays(action: Any) -> None:
    signal.signal(signal.SIGINT, action)
    with deferred_ctrl_c():
        assert is_blocked()
        assert signal.getsignal(signal.SIGINT) is action
    assert not is_blocked()
    assert signal.getsignal(signal.SIGINT) is action


def test_an_exception_in_the_block_is_the_one_that_is_seen() -> None:
    with pytest.raises(ValueError, match="of the block"), deferred_ctrl_c():
        raise ValueError("of the block")
    assert not is_blocked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_not_lost_where_the_block_fails() -> None:
    def work() -> None:
        with deferred_ctrl_c():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_another_thread_than_the_main_one_may_start_processes() -> None:
    seen = []

    def start() -> None:
        with deferred_ctrl_c():
            seen.append(is_blocked())
        seen.append(is_blocked())

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert seen == [True, False]
