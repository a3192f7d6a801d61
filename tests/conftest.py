"""What every test must leave behind: nothing.

The fixture below compares the world before and after each test: child processes, descriptors,
shared-memory segments, mappings of ours, and threads of ours. The one fork server of this pytest
process is warm on purpose and may stay; its workers may not.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

from support import leftovers

FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell script that starts us with & or nohup has Ctrl-C ignored, and every program that a
        # test starts would inherit that; the tests of Ctrl-C would wait for nothing.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # its import asks the network otherwise
    # torch says this whenever a test asks for more workers than the machine has cores. How many
    # that is depends on the machine, so it cannot be an error; test_options.py checks that it is
    # said.
    config.addinivalue_line(
        "filterwarnings", "ignore:This DataLoader will create .* worker processes:UserWarning"
    )
    try:
        from hypothesis import settings
    except ImportError:  # the vision leg's folder needs none
        return
    # A deadline says something about the machine, not about the product; two shared cores miss any.
    settings.register_profile("penstock", deadline=None, max_examples=60)
    settings.load_profile("penstock")


def pytest_collection_finish() -> None:
    """Leave out of every later collection what is there for good: torch, pytest, all tests.

    The fixture below collects where something is left at first, in a third of the tests, and that
    took 0.1 to 0.2 s each time; now it looks at what the tests made.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something (tests/repo/test_leftovers.py shows that this notices)."""
    if request.node.get_closest_marker("gpu") is not None:
        _open_gpu()
    before = leftovers.look()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps everything alive that the test held; one failure is enough
    left = leftovers.wait_until_clean(before)
    if left:
        pytest.fail("this test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _open_gpu() -> None:
    """Open the GPU before the first look: the driver keeps its descriptors to the end."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
