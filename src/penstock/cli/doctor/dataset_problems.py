"""Finds problems in the results of a dataset check, each with a line that fixes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.planning.plan import Problem
from penstock.planning.quantities import count, duration, size

UNEVEN = 5.0
"""Report a problem if a tenth of the samples take this many times the median."""
UNEVEN_FROM_S = 1e-3
HEAVY_BYTES = 256 << 20
"""Limit for the private copy sent to each worker. It exceeds the memory of the worker itself."""
_SHOWN_INDICES = 3

DatasetResults = Mapping[str, Any]
"""The results saved by :mod:`penstock.cli.doctor.dataset_check`."""


def find_dataset_problems(results: DatasetResults) -> list[Problem]:
    """Return the problems in the results.

    Example:
        >>> for problem in find_dataset_problems({"length": 0, "kind": "map"}):
        ...     print(problem.code, problem.severity)
        empty harm
    """
    checks = (
        _check_failure,
        _check_length,
        _check_ends,
        _check_errors,
        _check_travel,
        _check_containers,
        _check_forms,
        _check_batch,
        _check_randomness,
        _check_timing,
        _check_workers,
    )
    return [problem for check in checks for problem in check(results)]


def _check_failure(results: DatasetResults) -> Iterator[Problem]:
    failure = results.get("failure")
    if failure:
        yield Problem(
            code=f"trial-{failure['kind']}",
            severity="harm",
            what=failure["what"],
            why="the check of the dataset stopped there",
            cure=failure["cure"],
            where=failure["where"],
        )


# -- length ----------------------------------------------------------------------------------------


def _check_length(results: DatasetResults) -> Iterator[Problem]:
    error = results.get("length_error")
    if error and not (error["is_absent"] and results.get("kind") == "iterable"):
        yield Problem(
            code="no-length",
            severity="harm",
            what="the dataset has no __len__"
            if error["is_absent"]
            else f"len(dataset) raises {error['what']}",
            why="without it, a loader needs a sampler to determine the order",
            cure="def __len__(self): return len(self.samples)",
            where=error["where"],
        )
    if results.get("length") == 0:
        yield Problem(
            code="empty",
            severity="harm",
            what="len(dataset) is 0",
            why="there is nothing to load. A path or a filter may be wrong",
            cure="assert len(dataset) > 0",
        )


def _check_ends(results: DatasetResults) -> Iterator[Problem]:
    length = results.get("length")
    found = results.get("num_reachable")
    if found is None and results.get("kind") == "iterable":
        found = results.get("num_yielded")
    is_short = length is not None and found is not None and 0 < found != length
    if is_short:
        how = "yields" if results.get("kind") == "iterable" else "has"
        yield Problem(
            code="length-lies",
            severity="harm",
            what=f"len(dataset) is {length:,}, but the dataset {how} {found:,}",
            why="an epoch raises an exception, or has the wrong number of batches",
            cure=f"def __len__(self): return {found}",
        )
    elif results.get("goes_on_after_end"):
        yield Problem(
            code="no-end",
            severity="note",
            what=f"dataset[{length}] returns a sample, although len(dataset) is {length:,}",
            why="samples past the length are never loaded. `for sample in dataset` does not end",
            cure="if not 0 <= index < len(self): raise IndexError(index)",
        )


# -- failures --------------------------------------------------------------------------------------


def _check_errors(results: DatasetResults) -> Iterator[Problem]:
    reachable = results.get("num_reachable") or 0
    alike: dict[tuple[str, str | None], list[tuple[Any, str | None]]] = {}
    for error in results.get("errors", ()):
        is_past = error["is_index_error"] and 0 < reachable <= _as_int(error["index"])
        if not is_past:  # otherwise the length is wrong, which _check_ends reports
            same = alike.setdefault((error["what"], error["where"]), [])
            same.append((error["index"], error.get("path")))
    for (what, where), failed in alike.items():
        shown = ", ".join(
            f"dataset[{index!r}]" + (f" ({path})" if path else "")
            for index, path in failed[:_SHOWN_INDICES]
        )
        if results.get("kind") == "iterable":
            shown = f"sample {failed[0][0]} of the stream"
        more = f" and {len(failed) - _SHOWN_INDICES} more" * (len(failed) > _SHOWN_INDICES)
        yield Problem(
            code="sample-raises",
            severity="harm",
            what=f"{shown}{more} raised {what}",
            why="the epoch stops there",
            cure=f"if index == {failed[0][0]!r}: breakpoint()  # in __getitem__",
            where=where,
        )


def _as_int(index: Any) -> int:
    return index if isinstance(index, int) else -1


def _check_travel(results: DatasetResults) -> Iterator[Problem]:
    on_gpu = {item["path"]: item["device"] for item in results.get("tensors_on_gpu", ())}
    for path, device in on_gpu.items():
        yield Problem(
            code="tensor-on-gpu",
            severity="harm",
            what=f"{path} is a tensor on {device}",
            why="it cannot be sent to a worker process. Move batches to the GPU in the training "
            "loop",
            cure=f"{path} = {path}.cpu()",
        )
    for device in results.get("devices", ()):
        yield Problem(
            code="sample-on-gpu",
            severity="harm",
            what=f"samples are tensors on {device}",
            why="every worker would open the GPU, and GPU memory cannot be sent to the parent",
            cure=f"batch = batch.to({device!r}, non_blocking=True)  # in the loop, not __getitem__",
        )
    travel = results.get("travel")
    if travel and not travel["is_ok"] and travel.get("path") not in on_gpu:
        yield Problem(
            code="cannot-travel",
            severity="harm",
            what=travel["what"],
            why="worker processes cannot be used. num_workers='auto' loads in the training process",
            cure=travel["cure"] or "DataLoader(..., pool='thread')",
        )


def _check_containers(results: DatasetResults) -> Iterator[Problem]:
    for item in results.get("containers", ()):
        yield Problem(
            code="large-container",
            severity="slow",
            what=f"{item['path']} is a {item['kind']} of {item['num_items']:,} Python objects, "
            f"about {size(item['num_bytes'])}",
            why="every worker gets its own copy",
            cure=f"{item['path']} = penstock.{item['shared_as']}({item['path']})",
        )
    travel = results.get("travel") or {}
    if not results.get("containers") and travel.get("private_bytes", 0) > HEAVY_BYTES:
        yield Problem(
            code="heavy",
            severity="slow",
            what=f"{size(travel['private_bytes'])} of the dataset are Python objects",
            why="every worker gets its own copy. Arrays and tensors are shared",
            cure="self.table = numpy.asarray(self.table)",
        )


def _check_forms(results: DatasetResults) -> Iterator[Problem]:
    forms = results.get("forms", ())
    if len(forms) < 2 or not results.get("stacks_by_default"):
        return
    empty = next((one["index"] for one in forms if one["form"] == "None"), None)
    if empty is not None:
        yield Problem(
            code="sample-none",
            severity="harm",
            what=f"dataset[{empty!r}] is None",
            why="None cannot be stacked into a batch",
            cure='DataLoader(..., on_error="skip")  # or return a value for every index',
        )
        return
    one, other = forms[:2]
    yield Problem(
        code="forms-differ",
        severity="harm",
        what=f"dataset[{one['index']!r}] is {one['form']}, dataset[{other['index']!r}] is "
        f"{other['form']}",
        why="samples that differ in shape cannot be stacked into one batch",
        cure="DataLoader(..., collate_fn=list)  # or resize in __getitem__",
    )


def _check_batch(results: DatasetResults) -> Iterator[Problem]:
    batch = results.get("batch")
    if not batch or batch["is_ok"] or len(results.get("forms", ())) >= 2:
        return
    if batch.get("fails_alone"):
        yield Problem(
            code="batch-fails",
            severity="harm",
            what=f"loading a batch failed: {batch['what']}",
            why="the samples load one by one, but they do not make a batch",
            cure=batch.get("cure") or "DataLoader(..., collate_fn=list)  # lists of samples",
            where=batch["where"],
        )
    else:
        yield Problem(
            code="batch-fails",
            severity="harm",
            what=f"loading a batch in a worker failed: {batch['what']}",
            why="the same samples load one by one in a single process",
            cure="DataLoader(..., num_workers=0)  # to debug without a worker",
            where=batch["where"],
        )


# -- randomness and speed --------------------------------------------------------------------------


def _check_randomness(results: DatasetResults) -> Iterator[Problem]:
    held = results.get("held_generators", ())
    for item in held:
        yield Problem(
            code="held-generator",
            severity="harm" if item["has_moved"] else "note",
            what=f"{item['path']} is a {item['type']} held by the dataset"
            + (", and samples draw from it" if item["has_moved"] else ""),
            why="each worker gets the same copy, so samples repeat random numbers, and they change "
            "with the number of workers",
            cure="random.random(), numpy.random.rand() or torch.rand() in __getitem__",
        )
    if results.get("repeats") is False and not any(item["has_moved"] for item in held):
        yield Problem(
            code="unrepeatable",
            severity="note",
            what="a sample loaded twice with the same seeds differs",
            why="it draws from an unseeded source (a new numpy.random.default_rng(), the clock) or "
            "counts its calls",
            cure="random.random(), numpy.random.rand() or torch.rand() in __getitem__",
        )


def _check_timing(results: DatasetResults) -> Iterator[Problem]:
    timing = results.get("samples")
    if not timing or timing["p90_s"] < UNEVEN_FROM_S:
        return
    if timing["p90_s"] > UNEVEN * timing["median_s"]:
        yield Problem(
            code="uneven",
            severity="note",
            what=f"a tenth of the samples take {duration(timing['p90_s'])} or more, the median is "
            f"{duration(timing['median_s'])}",
            why="one slow sample delays its batch. Penstock splits a batch among all workers",
            cure=f"dataset[{timing['slowest_index']!r}]  # {duration(timing['slowest_s'])}",
        )


def _check_workers(results: DatasetResults) -> Iterator[Problem]:
    loader, plan = results.get("loader"), results.get("plan")
    if not loader or not plan or loader["num_workers"] != 0:
        return
    choice = plan["num_workers"]
    if choice["source"] == "measured" and choice["value"] > 0:
        yield Problem(
            code="no-workers",
            severity="slow",
            what="the loader has num_workers=0, but the plan is "
            f"{count(choice['value'], 'worker')}",
            why=choice["reason"],
            cure=f"DataLoader(..., num_workers={choice['value']})",
        )
