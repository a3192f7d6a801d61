"""What is said about a dead worker."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from penstock.engine.obituary import write_obituary

pytestmark = pytest.mark.legacy


def test_a_signal_is_named_with_its_likely_cause() -> None:
    error: Any = write_obituary(2, 4181, -int(signal.SIGKILL), 90412)
    text = str(error)
    assert "SIGKILL" in text
    assert "sample 90412" in text
    assert "pid 4181" in text
    assert "memory" in text
    assert "dataset[90412]" in text
    assert (error.worker, error.pid, error.exit_code, error.sample_index) == (2, 4181, -9, 90412)


def test_an_exit_code_is_given_as_it_was() -> None:
    error: Any = write_obituary(0, 1, 3, None)
    assert "exit code 3" in str(error)
    assert "SIG" not in str(error)
    assert error.sample_index is None


def test_a_signal_without_a_name_is_given_by_number() -> None:
    assert "40" in str(write_obituary(0, 1, -40, None))


def test_torch_s_words_are_kept_so_that_scripts_that_look_for_them_go_on() -> None:
    assert "DataLoader worker (pid 7) is killed by signal: " in str(write_obituary(0, 7, -11, 0))
    assert isinstance(write_obituary(0, 7, -11, 0), RuntimeError)
