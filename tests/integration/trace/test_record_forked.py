"""Trace buffers in a process that the user forks."""

from __future__ import annotations

import os

import pytest

import penstock
from penstock.trace import record as tracing
from penstock.trace.record import read_records

pytestmark = pytest.mark.legacy


def own_spans() -> list[tracing.Record]:
    buffer = tracing.process_buffer()
    return [] if buffer is None else read_records(buffer.memory, 0)[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_the_user_forks_does_not_write_into_the_parent_s_buffer() -> None:
    with penstock.span("before the fork"):
        pass
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with penstock.span("in the child"):
            pass
        os.write(writing, str([span.name for span in own_spans()]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 1000) == b"['in the child']"
    os.close(reading)
    os.close(writing)
    assert not any(span.name == "in the child" for span in own_spans())
