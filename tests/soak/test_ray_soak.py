"""Ray Train, Ray Data, and 50 killed nodes, on a Ray cluster in this machine."""

from __future__ import annotations

import importlib.util

import pytest

from support.ray_cluster import Findings, run_scenarios

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
LIMIT_S = 5000.0
"""Reached only by a hang."""
HAS_TRAIN = importlib.util.find_spec("pandas") is not None
needs_train = pytest.mark.skipif(not HAS_TRAIN, reason="pip install 'ray[data,train]'")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder = tmp_path_factory.mktemp("ray")
    names = ["ray_data", "ray_train"] if HAS_TRAIN else []
    return run_scenarios(folder, LIMIT_S, "late_answer", "slow_link", "node_kills", *names)


@needs_train
def test_ray_train_resumes_on_another_number_of_workers(found: Findings) -> None:
    loaded = found("ray_train")
    assert loaded["num_samples"] == [6, 6, 36]  # three batches of two ranks, then the rest
    assert loaded["ray"] == loaded["inline"]
    assert loaded["cores"] == [1, 1, 1]  # those that Ray gave


@needs_train
def test_a_dataset_of_ray_data_is_loaded_from_parquet(found: Findings) -> None:
    loaded = found("ray_data")
    assert loaded["num_rows"] == 48
    assert loaded["is_right"]


def test_fifty_killed_nodes_cost_only_retries(found: Findings) -> None:
    loaded = found("node_kills")
    assert loaded["num_killed"] == 50
    assert loaded["wrong"] == []
    assert loaded["num_restarts"] >= 25  # a node may be killed before its worker has joined


def test_a_node_that_answers_after_30_s_costs_time_and_no_bits(found: Findings) -> None:
    loaded = found("late_answer")
    assert loaded["num_stopped"] == 3
    assert loaded["waited_s"] >= 30  # for the batch that it was loading
    assert loaded["ray"] == loaded["inline"]
    assert loaded["num_restarts"] == 0


def test_a_link_of_10_mbit_costs_time_and_no_bits(found: Findings) -> None:
    loaded = found("slow_link")
    if "skipped" in loaded:
        pytest.skip(f"network namespaces cannot be made here: {loaded['skipped']}")
    assert any("10.77.0.2" in node for node in loaded["nodes"])
    assert loaded["ray"] == loaded["inline"]
    assert len(set(loaded["ray"])) == 5
