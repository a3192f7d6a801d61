"""Workers on a real Ray cluster of two nodes in this machine.

One program runs all scenarios, because a cluster takes seconds to start. A test reads what the
program found in one of them.
"""

from __future__ import annotations

import importlib.util

import pytest

from support.ray_cluster import Findings, run_scenarios

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(2700),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
LIMIT_S = 2400.0
"""Reached only by a hang."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return run_scenarios(tmp_path_factory.mktemp("ray"), LIMIT_S)


def test_batches_from_two_nodes_are_those_of_this_process(found: Findings) -> None:
    loaded = found("same_bits")
    assert loaded["ray"] == loaded["inline"]
    assert len({*loaded["ray"], loaded["other"]}) == 3  # two epochs, and another seed
    assert loaded["nodes"] == 2


def test_the_timeline_has_the_workers_of_the_nodes_on_the_clock_of_this_process(
    found: Findings,
) -> None:
    loaded = found("same_bits")
    assert loaded["lanes"] == 2
    assert loaded["num_parts"] == 12 * loaded["num_epochs"]  # each batch is one lease
    assert 0 < loaded["earliest_s"] < 1000  # an unaligned clock may start at any time
    assert any("its clock is exact to" in note for note in loaded["notes"])


def test_local_and_remote_workers_together_give_the_same_batches(found: Findings) -> None:
    loaded = found("mixed")
    assert loaded["ray"] == loaded["inline"]
    assert len(set(loaded["ray"])) == len(loaded["ray"]) >= 3
    assert all(loaded["num_spans"])
    assert len(loaded["num_spans"]) == 2


def test_remote_workers_join_on_other_nodes_and_their_loss_costs_a_retry(found: Findings) -> None:
    loaded = found("mixed")
    assert len(loaded["nodes"]) == 1
    assert loaded["here"] not in loaded["nodes"][0]
    assert loaded["num_restarts"] == 1
    assert any("lost remote workers: 1" in note for note in loaded["notes"])


def test_remote_workers_without_local_ones_or_an_index_are_refused(found: Findings) -> None:
    loaded = found("mixed")
    assert loaded["refused"].startswith("BadArgument: [A01] remote_workers=1 needs local worker")
    assert loaded["without"].startswith("BadArgument: [A01] remote_workers=1 needs local worker")


def test_automatic_remote_workers_join_only_if_the_loop_waits(found: Findings) -> None:
    loaded = found("mixed_auto")
    assert loaded["slow"] == 1
    assert any("because the training loop waited" in note for note in loaded["slow_notes"])
    assert loaded["fast"] == 0
    assert loaded["slow_bits"]
    assert loaded["fast_bits"]


def test_a_node_that_answers_late_joins_while_the_others_load(found: Findings) -> None:
    loaded = found("late_node")
    assert loaded["nodes"] == [1, 2]
    assert loaded["ray"] == loaded["inline"]
    assert loaded["num_restarts"] == 0


def test_a_slow_node_gets_fewer_batches(found: Findings) -> None:
    loaded = found("slow_node")
    num_batches = len(loaded["equal"])
    assert num_batches == len(loaded["slow"]) == len(loaded["unnoticed"]) == 36
    for name in ("equal", "slow", "unnoticed"):
        assert loaded[f"{name}_nodes"] == 2
    # The controls: a node that is as fast, and one whose slowness is not taken into account.
    assert sum(loaded["equal"]) > num_batches / 5
    assert sum(loaded["unnoticed"]) > num_batches / 5
    assert sum(loaded["slow"]) < num_batches / 8


def test_an_actor_that_does_not_answer_is_replaced(found: Findings) -> None:
    loaded = found("frozen")
    assert loaded["num_stopped"] == 3  # an actor, its fork server and its worker
    assert loaded["ray"] == loaded["inline"]
    assert loaded["num_restarts"] >= 1
    assert any("its actor did not answer for 3 s" in note for note in loaded["notes"])


def test_an_iterable_dataset_is_divided_as_among_processes(found: Findings) -> None:
    loaded = found("streams")
    assert loaded["ray"] == loaded["process"]
    assert sorted(loaded["ray"]) == list(range(48))
    assert loaded["one"] != loaded["ray"]


def test_a_resumed_run_with_bad_samples_has_the_same_batches(found: Findings) -> None:
    loaded = found("resumed")
    assert loaded["ray"] == loaded["inline"]
    assert loaded["bad"] == [5, 17]


def test_a_bad_sample_is_named_with_its_node(found: Findings) -> None:
    error = found("bad_sample")["error"]
    assert error.startswith("ValueError: Caught ValueError in DataLoader worker process 0 on node")
    assert "is truncated" in error


def test_a_sample_that_crashes_workers_is_skipped_and_named(found: Findings) -> None:
    loaded = found("crash")
    assert loaded["ray"] == loaded["inline"]
    assert [index for index, _ in loaded["bad"]] == [11]
    assert "SIGSEGV" in loaded["bad"][0][1]
    assert " on node " in loaded["bad"][0][1]
    assert loaded["num_restarts"] >= 2


def test_a_sample_that_hangs_is_named_with_its_stack(found: Findings) -> None:
    error = found("hang")["error"]
    assert error.startswith("SampleTimeout")
    assert "sample 7" in error
    assert "__getitem__" in error


def test_a_lost_node_and_a_lost_actor_cost_only_retries(found: Findings) -> None:
    loaded = found("killed")
    assert loaded["nodes"] == 3
    assert loaded["ray"] == loaded["inline"]
    assert loaded["num_restarts"] >= 1  # the actor may be one of the lost node
    assert sum("lost remote workers: " in note for note in loaded["notes"]) == 1
    assert sum("worker 0 runs on node" in note for note in loaded["notes"]) == 1


def test_the_dataset_is_once_in_the_object_store_of_each_node(found: Findings) -> None:
    places = found("copies")["places"]
    assert [len(workers) for workers in places] == [1, 1, 2]
    assert places[2][0] == places[2][1] != places[0][0]
    assert places[2][0] is not None


def test_a_batch_is_copied_once_from_the_object_store_to_its_slot(found: Findings) -> None:
    loaded = found("copies")
    assert loaded["num_written"] == len(loaded["loaded"]) == 48
    assert loaded["are_views"]  # of the object store
    assert not loaded["are_copies"]


def test_a_worker_has_its_next_lease_before_it_answers(found: Findings) -> None:
    loaded = found("copies")
    assert loaded["loaded"] == list(range(48))  # sample 1 waits for the second message
    assert loaded["num_messages"] >= 2
    # The control: the actor does not pass leases on before it has answered the earlier ones.
    assert "message 1 did not arrive" in loaded["late_error"]


def test_ranks_that_lose_a_node_load_each_sample_once(found: Findings) -> None:
    loaded = found("ranks")
    assert len(loaded["nodes"]) == 2
    assert any(loaded["killed"] in node for node in loaded["nodes"])
    assert loaded["num_restarts"] >= 1
    assert loaded["ray"] == loaded["inline"]
    assert loaded["later"] == loaded["later_inline"]
    assert len(set(loaded["ray"])) == 2
    assert [len(samples) for samples in loaded["samples"]] == [24, 24]
    assert sorted(loaded["samples"][0] + loaded["samples"][1]) == list(range(48))


def test_ranks_in_processes_of_their_own_load_what_local_ranks_load(found: Findings) -> None:
    loaded = found("rank_processes")
    for num_ranks in (2, 3):
        ranks = loaded[str(num_ranks)]
        assert ranks["ray"] == ranks["inline"]
        assert len({epoch for epochs in ranks["ray"] for epoch in epochs}) == 2 * num_ranks
        assert [len(samples) for samples in ranks["samples"]] == [48 // num_ranks] * num_ranks
        assert sorted(one for part in ranks["samples"] for one in part) == list(range(48))
        assert all(ranks["nodes"])
        assert len(set(ranks["pids"])) == num_ranks
    assert loaded["3"]["ray"][0] != loaded["2"]["ray"][0]  # the control: another part


def test_a_dataset_that_is_never_unpickled_is_an_error(found: Findings) -> None:
    error = found("stuck")["error"]
    assert error.startswith("StartFailed")
    assert "did not unpickle the dataset within 5 s" in error


def test_a_dataset_that_cannot_be_opened_on_a_node_is_an_error(found: Findings) -> None:
    error = found("unreadable")["error"]
    assert error.startswith("OSError")
    assert "this file is not on the node" in error
    assert " on node " in error


def test_a_file_that_exists_only_here_is_named_before_the_first_batch(found: Findings) -> None:
    error = found("local_path")["error"]
    assert error.startswith("StartFailed")
    assert "/proc/self/fd/900 exists here, but not on node" in error


def test_without_free_cpus_and_with_a_full_object_store_the_bits_stay(found: Findings) -> None:
    loaded = found("full")
    assert loaded["ray"] == loaded["inline"]
    assert any("which shares one" in note for note in loaded["notes"])


def test_automatic_numbers_of_workers_follow_the_cpus_of_ray(found: Findings) -> None:
    loaded = found("task_cpus")
    assert loaded["cores"] == {"0": 1, "1": 1}
    assert loaded["auto"] == 2  # one for each CPU of the cluster


def test_other_versions_on_a_node_are_named(found: Findings) -> None:
    error = found("version_skew")["error"]
    assert error.startswith("StartFailed")
    assert "has NumPy 0.1 instead of" in error


@pytest.mark.parametrize("scenario", ["driver_killed", "driver_interrupted"])
def test_a_driver_that_ends_leaves_nothing_on_the_nodes(found: Findings, scenario: str) -> None:
    loaded = found(scenario)
    assert loaded["said"] == "loading\n"
    assert loaded["num_started"] == 3  # an actor, its fork server and its worker
    assert loaded["left"] == []
    assert loaded["is_interrupted"] == (scenario == "driver_interrupted")


def test_packing_on_a_cluster_that_loses_a_node_gives_the_same_bytes(found: Findings) -> None:
    loaded = found("packing")
    assert "raylet" in loaded["killed"]
    assert loaded["length"] == 120
    assert loaded["ray"] == loaded["inline"]


def test_nothing_is_left_on_the_nodes(found: Findings) -> None:
    assert found("left")["left"] == []
