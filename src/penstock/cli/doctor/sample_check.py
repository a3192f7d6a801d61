"""Sample check of ``penstock doctor``: time, structure, exceptions, randomness, and last index.

It runs in the child process.

Tested by ``tests/integration/cli/doctor/test_command.py``.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.cli.doctor.sample_form import devices_in, form_of, skeleton_of
from penstock.cli.user_code import describe_error, place_of
from penstock.engine.loading.sample_path import find_path
from penstock.order.event_loop import sample_getter
from penstock.planning.sample_timing import (
    SampleTiming,
    TimedSample,
    summarize_timings,
    time_samples,
)
from penstock.verify.hashing import digest

SAMPLES_S = 2.0
AT_LEAST = 3
MAX_SAMPLES = 10_000
MAX_ERRORS = 5
MAX_FORMS = 2
WATCHED = 64
"""Number of samples for which the generators are compared, which takes about 0.1 ms each."""


@dataclass(kw_only=True)
class SampleCheck:
    """Loads samples of one dataset and records the results.

    Args:
        length: ``len(dataset)``, or None.
        indices: The samples to load. For a stream, only their number matters.
        doing: Called with each next step, which is reported if loading hangs.
    """

    dataset: Any
    is_iterable: bool
    length: int | None
    indices: Iterable[Any]
    doing: Callable[[str], None]
    good: list[Any] = field(default_factory=list)
    timing: SampleTiming | None = None
    num_yielded: int | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    forms: dict[str, dict[str, Any]] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)

    def run(self) -> dict[str, Any]:
        """Load samples for about two seconds and return the results."""
        watch = _GeneratorWatch()
        self.timing = summarize_timings(self._recorded(watch))
        return {
            "samples": asdict(self.timing) if self.timing is not None else None,
            "errors": self.errors,
            "forms": list(self.forms.values()),
            "devices": sorted(self.devices),
            "draws": sorted(watch.moved),
            "num_yielded": self.num_yielded,
        }

    def _recorded(self, watch: _GeneratorWatch) -> Iterator[TimedSample]:
        loaded = time_samples(
            self._loader(), watch.before_each(self.indices), SAMPLES_S, at_least=AT_LEAST
        )
        for timed in loaded:
            watch.compare()
            if isinstance(timed.error, StopIteration) and self.is_iterable:
                self.num_yielded = timed.index
                return
            if timed.error is None:
                self.good.append(timed.index)
                self._record_form(timed)
            elif len(self.errors) < MAX_ERRORS:
                self.errors.append(self._describe_failure(timed))
            yield timed
            if timed.error is not None and self.is_iterable:
                return  # a stream does not continue after an exception

    def _loader(self) -> Callable[[Any], Any]:
        stream = iter(self.dataset) if self.is_iterable else None

        def load(index: Any) -> Any:
            self.doing(f"loading {self.name_of(index)}")
            return sample_getter(self.dataset)(index) if stream is None else next(stream)

        return load

    def name_of(self, index: Any) -> str:
        return f"sample {index} of the stream" if self.is_iterable else f"dataset[{index!r}]"

    def _record_form(self, timed: TimedSample) -> None:
        skeleton = repr(skeleton_of(timed.sample))
        if skeleton not in self.forms and len(self.forms) < MAX_FORMS:
            self.forms[skeleton] = {"index": timed.index, "form": form_of(timed.sample)}
            self.devices |= devices_in(timed.sample)

    def _describe_failure(self, timed: TimedSample) -> dict[str, Any]:
        assert timed.error is not None
        path = None if self.is_iterable else find_path(self.dataset, timed.index, timed.error)
        return {
            "index": timed.index,
            "what": describe_error(timed.error),
            "where": place_of(timed.error),
            "path": path,
            "is_index_error": isinstance(timed.error, (IndexError, KeyError)),
        }

    # -- the last index ----------------------------------------------------------------------------

    def try_ends(self) -> dict[str, Any]:
        """Compare the length with the dataset: the last sample exists, and none after it."""
        if self.is_iterable or not self.length:
            return {}
        found: dict[str, Any] = {}
        if not self._is_there(self.length - 1):
            found["num_reachable"] = self._count_reachable(self.length)
        found["goes_on_after_end"] = self._is_there(self.length, is_surely=True)
        return found

    def _is_there(self, index: int, *, is_surely: bool = False) -> bool:
        """Return True if the sample exists. A sample that raises other errors exists but is bad."""
        if index in self.good:
            return True
        self.doing(f"loading {self.name_of(index)}")
        try:
            sample_getter(self.dataset)(index)
        except (IndexError, KeyError):
            return False
        except Exception:
            return not is_surely
        return True

    def _count_reachable(self, length: int) -> int:
        """Count samples by bisection. Assumes that no sample exists after the first missing one."""
        return bisect.bisect_left(range(length - 1), True, key=lambda i: not self._is_there(i))

    # -- randomness --------------------------------------------------------------------------------

    def try_twice(self) -> dict[str, Any]:
        """Load a sample twice with the same seeds of all three global generators."""
        if self.is_iterable or not self.good:
            return {}
        index = self.good[0]
        self.doing(f"loading {self.name_of(index)} twice")
        hashes = set()
        for _ in range(2):
            random.seed(0)
            np.random.seed(0)
            torch.default_generator.manual_seed(0)
            try:
                hashes.add(digest(sample_getter(self.dataset)(index)))
            except Exception:  # for example, it counts its calls or cannot be hashed
                return {}
        return {"repeats": len(hashes) == 1}


class _GeneratorWatch:
    """Finds the global generators that samples draw from, using the first samples."""

    def __init__(self) -> None:
        self.moved: set[str] = set()
        self._before: dict[str, Any] | None = None

    def before_each(self, indices: Iterable[Any]) -> Iterator[Any]:
        for place, index in enumerate(indices):
            self._before = _states() if place < WATCHED else None
            yield index

    def compare(self) -> None:
        if self._before is not None:
            after = _states()
            self.moved |= {name for name, state in after.items() if state != self._before[name]}


def _states() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": (numpy_state["state"]["pos"], numpy_state["state"]["key"].tobytes()),
        "torch": torch.default_generator.get_state().numpy().tobytes(),
    }
