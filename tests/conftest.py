"""Global test setup, and a fixture that fails tests which leave resources behind.

The fixture compares the state before and after each test: child processes, descriptors,
shared-memory segments, and Penstock's mappings and threads. The fork server of this pytest process
stays warm on purpose and is allowed to remain. Its workers are not.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from support import leftovers
from support.paths import SITE

pytest_plugins = ["support.remote_sets", "support.s3_servers"]
FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell script that starts pytest with & or nohup makes it ignore Ctrl-C. Every program
        # that a test starts would inherit that, and the Ctrl-C tests would wait forever.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)  # for the programs that tests start
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # avoids network access
    # torch emits this warning when a test uses more workers than the machine has cores. The number
    # of cores is platform-dependent, so the warning cannot be an error. test_options.py checks that
    # it is emitted.
    config.addinivalue_line(
        "filterwarnings", "ignore:This DataLoader will create .* worker processes:UserWarning"
    )
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # the vision leg has no Hypothesis
        return
    # Deadlines, and the check for slow data, measure the machine. Two shared cores miss them.
    settings.register_profile(
        "penstock",
        deadline=None,
        max_examples=60,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("penstock")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave threads and workers forked from this process out of the legacy leg.

    They run the same code as the fork server's workers. test_loader.py has them in this leg too.
    """
    if sys.platform == "win32":
        for item in items:  # translated code is slow; only a hang reaches this limit
            item.add_marker(pytest.mark.timeout(1200), append=False)
    if not config.option.markexpr.startswith("legacy"):
        return
    left_out = [item for item in items if _way_of(item) in ("thread", "fork")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _way_of(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    if callspec is None or item.path.name == "test_loader.py":
        return None
    return callspec.params.get("way")


def pytest_collection_finish() -> None:
    _freeze_permanent_objects()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Freeze again after a test that imported a large package, such as torch's compiler."""
    if len(sys.modules) > _num_frozen_modules + 100:
        _freeze_permanent_objects()


def _freeze_permanent_objects() -> None:
    """Exclude permanent objects (torch, pytest, all tests) from later garbage collections.

    The fixture below runs a collection when something is left at first, which happens in a third of
    the tests. A collection of all objects takes 0.1 to 0.3 s.
    """
    global _num_frozen_modules
    gc.collect()
    gc.freeze()
    _num_frozen_modules = len(sys.modules)


_num_frozen_modules = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind. Covered by tests/repo/test_leftovers.py."""
    if request.node.get_closest_marker("gpu") is not None:
        _open_gpu()
    before = leftovers.look()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps the test's objects alive; one failure is enough
    left = leftovers.wait_until_clean(before)
    if left:
        pytest.fail("this test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _open_gpu() -> None:
    """Open the GPU before the first snapshot, because the driver keeps its descriptors open."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
