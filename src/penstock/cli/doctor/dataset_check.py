"""Dataset check of ``penstock doctor``: length, pickling, contents, samples, one batch, the plan.

It runs in the child process. Each step saves plain values.
:mod:`penstock.cli.doctor.dataset_problems` evaluates them.

Tested by ``tests/integration/cli/doctor/test_command.py``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.cli.child_check import CheckResults
from penstock.cli.doctor import contents
from penstock.cli.doctor.sample_check import AT_LEAST, MAX_SAMPLES, SampleCheck
from penstock.cli.doctor.sample_form import form_of
from penstock.cli.script_object import ScriptObject
from penstock.cli.user_code import describe_error, place_of
from penstock.engine.loading.default_collate import is_default_collate
from penstock.engine.loading.fetch import expected_in_flight, in_flight_of
from penstock.engine.loading.gather import is_sliced
from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import CannotTravel, PenstockError
from penstock.loader import DataLoader
from penstock.machine.collect import machine
from penstock.planning.decisions import make_plan
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.sample_timing import is_iterable_only, spread_indices

DEFAULT_BATCH_SIZE = 32
BATCH_LIMIT_S = 30.0
MAX_PATHS = 3


@dataclass(kw_only=True)
class DatasetCheck:
    """Checks one dataset step by step.

    Args:
        loader: The script's loader, or None. Its arguments are used for the check.
        options: ``batch_size`` and ``num_workers`` of the command. None if not given.
        deadline: When the command terminates this process, on the monotonic clock.
    """

    results: CheckResults
    target: ScriptObject
    dataset: Any
    loader: Any
    options: dict[str, Any]
    deadline: float

    def run(self) -> None:
        self._save_kind()
        length = self._try_length()
        travels = self._try_travel()
        generators = self._look_inside()
        samples = SampleCheck(
            dataset=self.dataset,
            is_iterable=self.is_iterable,
            length=length,
            indices=self._indices(length),
            doing=self.results.doing,
        )
        self.results.save(**samples.run())
        self.results.save(held_generators=[_held(*generator) for generator in generators])
        self.results.save(**samples.try_ends())
        self.results.save(**samples.try_twice())
        self._save_plan(samples, length)  # before the batch, which may reach the time limit
        self._try_batch(samples.good if travels else [])

    # -- properties --------------------------------------------------------------------------------

    @property
    def is_iterable(self) -> bool:
        return is_iterable_only(self.dataset)

    @property
    def batch_size(self) -> int | None:
        if self.options["batch_size"] is not None:
            return int(self.options["batch_size"])
        if self.loader is None:
            return DEFAULT_BATCH_SIZE
        sizes = (self.loader.batch_size, getattr(self.loader.batch_sampler, "batch_size", None))
        return next((size for size in sizes if isinstance(size, int)), None)

    @property
    def stacks_by_default(self) -> bool:
        if self.loader is None:
            return True
        return self.batch_size is not None and is_default_collate(self.loader.collate_fn)

    def _save_kind(self) -> None:
        kind = type(self.dataset)
        loader = None
        if self.loader is not None:
            context = self.loader.multiprocessing_context
            loader = {
                "made_by": type(self.loader).__module__.partition(".")[0],
                "num_workers": self.loader.num_workers,
                "start_method": context.get_start_method() if context is not None else None,
            }
        self.results.save(
            target=str(self.target),
            type=kind.__qualname__,
            module=kind.__module__,
            kind="iterable" if self.is_iterable else "map",
            loader=loader,
            batch_size=self.batch_size,
            stacks_by_default=self.stacks_by_default,
            machine=machine().to_dict(),
        )

    def _try_length(self) -> int | None:
        self.results.doing("calling len(dataset)")
        length, error = None, None
        try:
            length = len(self.dataset)
        except Exception as raised:
            error = {
                "what": describe_error(raised),
                "where": place_of(raised),
                "is_absent": not hasattr(type(self.dataset), "__len__"),
            }
        self.results.save(length=length, length_error=error)
        return length

    def _indices(self, length: int | None) -> Iterable[Any]:
        sampler = getattr(self.loader, "sampler", None)
        usual = (torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler)
        if self.is_iterable:
            return range(MAX_SAMPLES)
        if sampler is not None and not isinstance(sampler, usual):
            return itertools.islice(iter(sampler), MAX_SAMPLES)  # its keys can have any type
        if length is None:
            return range(AT_LEAST)
        return spread_indices(length, MAX_SAMPLES)

    # -- pickling and contents ---------------------------------------------------------------------

    def _try_travel(self) -> bool:
        """Pickle the dataset before the first sample is loaded, like a loader.

        Files that the dataset opens on first use are therefore not pickled.
        """
        self.results.doing("sending the dataset to a worker (pickling it)")
        objects = {"dataset": self.dataset}
        if self.loader is not None:
            objects["collate_fn"] = self.loader.collate_fn
        start_s = time.perf_counter()
        try:
            sent = PickledObjects(objects)
        except CannotTravel as error:
            lines = [line.strip() for line in str(error).splitlines()]
            cure = next((line for line in lines if line.startswith("Try: ")), "")
            path = error.facts.get("path")
            self.results.save(
                travel={
                    "is_ok": False,
                    "what": error.what,
                    "path": path,
                    "cure": cure.removeprefix("Try: "),
                }
            )
            return False
        self.results.save(
            travel={
                "is_ok": True,
                "took_s": time.perf_counter() - start_s,
                "private_bytes": len(sent.stream.getvalue()),
                "shared_bytes": sum(buffer.raw().nbytes for buffer in sent.buffers),
                "notes": list(sent.notes),
            }
        )
        return True

    def _look_inside(self) -> list[tuple[str, Any, Any]]:
        """Save large containers, GPU tensors and paths. Returns generators with their states."""
        self.results.doing("inspecting the contents of the dataset")
        found: dict[str, list[Any]] = {"containers": [], "tensors_on_gpu": [], "folders": []}
        generators: list[tuple[str, Any, Any]] = []
        for path, value in contents.walk_contents(self.dataset):
            try:
                self._check_content(path, value, found, generators)
            except Exception:  # an object that raises when it is inspected
                continue
        self.results.save(**found)
        return generators

    def _check_content(
        self,
        path: str,
        value: Any,
        found: dict[str, list[Any]],
        generators: list[tuple[str, Any, Any]],
    ) -> None:
        if contents.is_large(value):
            container = {
                "path": path,
                "kind": type(value).__name__,
                "num_items": len(value),
                "num_bytes": contents.estimate_bytes(value),
                "shared_as": "SharedDict" if isinstance(value, dict) else "SharedList",
            }
            found["containers"].append(container)
        device = contents.device_of(value)
        if device is not None:
            found["tensors_on_gpu"].append({"path": path, "device": device})
        state = contents.generator_state(value)
        if state is not None:
            generators.append((path, value, state))
        folder = contents.folder_of(value) if len(found["folders"]) < MAX_PATHS else None
        if folder is not None and folder not in found["folders"]:
            found["folders"].append(folder)

    # -- a batch, and the plan ---------------------------------------------------------------------

    def _try_batch(self, good: list[Any]) -> None:
        """Load one batch in a real worker, from samples that loaded in this process."""
        if not good or not machine().can_start_python:
            self.results.save(batch=None)
            return
        self.results.doing("loading a batch through one worker process")
        limit_s = max(1.0, min(BATCH_LIMIT_S, self.deadline - time.monotonic() - 2.0))
        arguments: dict[str, Any] = {"batch_size": self.batch_size, "timeout": limit_s}
        if not self.is_iterable:
            arguments["sampler"] = good[: self.batch_size or 1]
        if self.loader is not None:
            arguments["collate_fn"] = self.loader.collate_fn
            arguments["worker_init_fn"] = self.loader.worker_init_fn
        start_s = time.perf_counter()
        try:
            iterator: Any = iter(DataLoader(self.dataset, num_workers=1, **arguments))
            batch = next(iterator)
        except Exception as error:
            note = {"is_ok": False, "what": _first_lines(error), "where": place_of(error)}
            if isinstance(error, PenstockError):
                note |= {"what": " ".join(error.what.split()), "cure": error.remedy}
            note["fails_alone"] = self._fails_alone(arguments)
            self.results.save(batch=note)
            return
        self.results.save(
            batch={
                "is_ok": True,
                "first_s": time.perf_counter() - start_s,
                "form": form_of(batch),
                "worker_bytes": _private_bytes(iterator._workers),
            }
        )
        iterator._shutdown_workers()

    def _fails_alone(self, arguments: dict[str, Any]) -> bool:
        """Return whether the batch cannot be loaded without workers either."""
        self.results.doing("loading the same batch without workers")
        try:
            next(iter(DataLoader(self.dataset, **{**arguments, "timeout": 0})))
        except Exception:
            return True
        return False

    def _save_plan(self, samples: SampleCheck, length: int | None) -> None:
        self.results.doing("making the plan")
        asked, loader = self.options["num_workers"], self.results.values["loader"]
        if asked is None and loader and loader["num_workers"] > 0:
            asked = loader["num_workers"]  # 0 is torch's default, so it does not count as requested
        travel, timing = self.results.values["travel"], samples.timing
        request = LoaderRequest(
            num_workers="auto" if asked is None else asked,
            start_method=loader["start_method"] if loader else None,
            batch_size=self.batch_size,
        )
        work = Workload(
            sample_s=timing.mean_s if timing else None,
            busy_share=timing.busy_share if timing else None,
            sample_bytes=timing.sample_bytes if timing else None,
            num_samples=length,
            is_iterable=self.is_iterable,
            in_flight=expected_in_flight(in_flight_of(self.dataset, "auto")),
            is_in_memory=is_sliced(
                self.dataset,
                self.loader.batch_sampler if self.loader is not None else "default",
                getattr(self.loader, "collate_fn", torch.utils.data.default_collate),
            ),
            stays_because=None if travel["is_ok"] else travel["what"],
        )
        self.results.save(plan=make_plan(machine(), request, work).to_dict())


def _held(path: str, generator: Any, before: Any) -> dict[str, Any]:
    has_moved = contents.generator_state(generator) != before
    return {"path": path, "type": type(generator).__name__, "has_moved": has_moved}


def _first_lines(error: Exception) -> str:
    """Return the error text without the worker's traceback, which torch includes."""
    text = str(error)
    if "Original Traceback" in text:
        text = text[: text.index("Original Traceback")] + text.splitlines()[-1]
    return " ".join(text.split())[:600]


def _private_bytes(workers: list[Any]) -> int | None:
    """Return the private memory of a worker after one batch."""
    import psutil

    try:
        return int(psutil.Process(workers[0].pid).memory_full_info().uss)
    except (psutil.Error, IndexError, AttributeError, OSError):
        return None
