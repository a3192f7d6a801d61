"""Threads of native libraries are counted and limited."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from penstock.machine import native_threads

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_a_thread_is_counted() -> None:
    before = native_threads.count_threads()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert native_threads.count_threads() == before + 1
    finally:
        stop.set()
        thread.join()


def test_openblas_has_one_thread_in_the_block_and_its_own_number_after_it() -> None:
    assert np.ones(3).sum() == 3  # NumPy, and with it OpenBLAS, is loaded
    before = native_threads.count_openblas_threads()
    with native_threads.single_threaded_openblas():
        assert native_threads.count_openblas_threads() == 0
    assert native_threads.count_openblas_threads() == before
