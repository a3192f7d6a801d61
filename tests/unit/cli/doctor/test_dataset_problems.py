"""Saved results of a dataset check become problems. A correct dataset has none."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.doctor.dataset_problems import find_dataset_problems

pytestmark = pytest.mark.legacy

TIMING = {
    "num_samples": 100,
    "median_s": 0.002,
    "p10_s": 0.0018,
    "p90_s": 0.003,
    "slowest_s": 0.004,
    "slowest_index": 7,
    "first_s": 0.01,
    "busy_share": 1.0,
    "sample_bytes": 100,
}
GOOD: dict[str, Any] = {
    "target": "train.py:ds",
    "failure": None,
    "kind": "map",
    "length": 1000,
    "length_error": None,
    "loader": None,
    "travel": {"is_ok": True, "took_s": 0.1, "private_bytes": 1000, "shared_bytes": 10},
    "containers": [],
    "tensors_on_gpu": [],
    "samples": TIMING,
    "errors": [],
    "forms": [{"index": 0, "form": "Tensor float32 [3]"}],
    "stacks_by_default": True,
    "draws": ["python"],
    "held_generators": [],
    "goes_on_after_end": False,
    "repeats": True,
    "batch": {"is_ok": True, "first_s": 0.1, "form": "", "worker_bytes": 1},
    "plan": {"num_workers": {"value": 4, "source": "measured", "reason": "why"}},
}


def found(**results: Any) -> dict[str, Any]:
    return {problem.code: problem for problem in find_dataset_problems({**GOOD, **results})}


def test_a_dataset_in_order_has_no_problem() -> None:
    assert found() == {}


@pytest.mark.parametrize(
    ("code", "severity", "said", "results"),
    [
        ("empty", "harm", "is 0", {"length": 0}),
        ("length-lies", "harm", "1,000, but the dataset has 60", {"num_reachable": 60}),
        (
            "length-lies",
            "harm",
            "yields 3",
            {"kind": "iterable", "num_yielded": 3},
        ),
        ("no-end", "note", "dataset[1000] returns a sample", {"goes_on_after_end": True}),
        (
            "no-length",
            "harm",
            "no __len__",
            {"length": None, "length_error": {"what": "", "where": None, "is_absent": True}},
        ),
        (
            "no-length",
            "harm",
            "raises ValueError",
            {"length_error": {"what": "ValueError: -1", "where": "a.py:1", "is_absent": False}},
        ),
        (
            "cannot-travel",
            "harm",
            "dataset.lock",
            {"travel": {"is_ok": False, "what": "dataset.lock ...", "path": "p", "cure": "open"}},
        ),
        (
            "tensor-on-gpu",
            "harm",
            "dataset.table is a tensor on cuda:0",
            {"tensors_on_gpu": [{"path": "dataset.table", "device": "cuda:0"}]},
        ),
        ("sample-on-gpu", "harm", "cuda:0", {"devices": ["cuda:0"]}),
        (
            "forms-differ",
            "harm",
            "dataset[1] is b",
            {"forms": [{"index": 0, "form": "a"}, {"index": 1, "form": "b"}]},
        ),
        (
            "sample-none",
            "harm",
            "dataset[7] is None",
            {"forms": [{"index": 0, "form": "int"}, {"index": 7, "form": "None"}]},
        ),
        (
            "batch-fails",
            "harm",
            "boom",
            {"batch": {"is_ok": False, "what": "boom", "where": None}},
        ),
        (
            "batch-fails",
            "harm",
            "loading a batch failed: boom",
            {"batch": {"is_ok": False, "what": "boom", "where": None, "fails_alone": True}},
        ),
        (
            "held-generator",
            "harm",
            "samples draw from it",
            {"held_generators": [{"path": "dataset.rng", "type": "Random", "has_moved": True}]},
        ),
        (
            "held-generator",
            "note",
            "dataset.rng",
            {"held_generators": [{"path": "dataset.rng", "type": "Random", "has_moved": False}]},
        ),
        ("unrepeatable", "note", "with the same seeds differs", {"repeats": False}),
        ("uneven", "note", "30 ms", {"samples": {**TIMING, "p90_s": 0.03}}),
        (
            "no-workers",
            "slow",
            "num_workers=0",
            {"loader": {"num_workers": 0, "made_by": "torch", "start_method": None}},
        ),
        (
            "heavy",
            "slow",
            "Python objects",
            {"travel": {"is_ok": True, "private_bytes": 1 << 30, "shared_bytes": 0}},
        ),
        (
            "trial-limit",
            "harm",
            "not done",
            {"failure": {"kind": "limit", "what": "not done", "where": None, "cure": "x"}},
        ),
    ],
)
def test_each_fault_is_one_problem(
    code: str, severity: str, said: str, results: dict[str, Any]
) -> None:
    problems = found(**results)
    assert set(problems) == {code}
    assert problems[code].severity == severity
    assert said in problems[code].what
    assert problems[code].cure


def test_a_large_container_comes_with_a_line_to_paste() -> None:
    item = {
        "path": "dataset.samples",
        "kind": "list",
        "num_items": 200_000,
        "num_bytes": 20 << 20,
        "shared_as": "SharedList",
    }
    problem = found(containers=[item])["large-container"]
    assert problem.cure == "dataset.samples = penstock.SharedList(dataset.samples)"
    assert "200,000" in problem.what


def test_exceptions_alike_are_one_problem_and_a_lying_length_explains_its_own() -> None:
    def error(index: int, what: str) -> dict[str, Any]:
        is_index = what.startswith("IndexError")
        return {"index": index, "what": what, "where": "d.py:3", "is_index_error": is_index}

    errors = [error(i, "ValueError: bad") for i in (1, 2, 3, 4)]
    problem = found(errors=errors)["sample-raises"]
    assert "dataset[1], dataset[2], dataset[3] and 1 more raised ValueError" in problem.what
    assert problem.where == "d.py:3"
    torn = [{**error(i, "OSError: torn"), "path": f"cat/{i}.jpg"} for i in (4, 7)]
    what = found(errors=torn)["sample-raises"].what
    assert what == "dataset[4] (cat/4.jpg), dataset[7] (cat/7.jpg) raised OSError: torn"
    lies = found(errors=[error(99, "IndexError: 99")], num_reachable=60, length=100)
    assert set(lies) == {"length-lies"}


def test_an_iterable_dataset_needs_no_length() -> None:
    absent = {"what": "TypeError", "where": None, "is_absent": True}
    assert found(kind="iterable", length=None, length_error=absent) == {}


def test_shapes_may_differ_under_a_collate_fn_of_one_s_own() -> None:
    forms = [{"index": 0, "form": "a"}, {"index": 1, "form": "b"}]
    assert found(forms=forms, stacks_by_default=False) == {}
