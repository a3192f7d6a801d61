"""A program that loads on a Ray cluster of two nodes, and prints what each scenario found.

Each line of its output is a JSON object: the scenario, and its findings or its error. Ray starts
once for all of them. It is a program, because Ray leaves threads and descriptors in its driver.

    PENSTOCK_TEST_CLUSTER=1 python -m support.ray_scenarios [SCENARIO ...]
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

import penstock
from penstock.engine.remote import ray_pool
from penstock.integrations.ray_packing import ray_map
from penstock.machine.host import usable_cores
from support.packed_sets import Mixed
from support.packed_sets import digest as digest_of_set

MARK = "PENSTOCK_TEST_CLUSTER"
"""Set by the test. All processes of the cluster inherit it."""
DRIVE = "--drive"
STORE_BYTES = 80 << 20
LENGTH = 48
NODE: dict[str, Any] = {"object_store_memory": STORE_BYTES, "include_dashboard": False}


class Images(torch.utils.data.Dataset):
    """Random tensors, with an action at some samples."""

    def __init__(self, file: str = "", **actions: Any) -> None:
        self.file, self.actions = file, actions

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, str]:
        action = self.actions
        if index in action.get("bad", ()):
            raise ValueError(f"sample {index} is truncated")
        if index == action.get("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if index == action.get("hang"):
            time.sleep(3600)
        time.sleep(action.get("pause_s", 0.0))
        return torch.rand(3, 32, 32) + index, index, f"image {index}"


class Stuck(Images):
    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(3600)


class Unreadable(Images):
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OSError("this file is not on the node")


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        yield from range(info.id if info else 0, LENGTH, info.num_workers if info else 1)


def named(samples: list[Any]) -> dict[str, Any]:
    """Collate to a payload: a layout cannot hold it."""
    return {
        "images": torch.stack([one[0] for one in samples]),
        "names": {one[2] for one in samples},
    }


def make(dataset: Any, **options: Any) -> Any:
    options = {"batch_size": 4, "num_workers": 2, "seed": 3, "pool": "ray", **options}
    if not isinstance(dataset, torch.utils.data.IterableDataset):
        options.setdefault("shuffle", True)
    return penstock.DataLoader(dataset, **options)


def digest(batches: Any, on_batch: Callable[[int], None] = lambda number: None) -> str:
    """Return a hash of all batches. ``on_batch`` is called after each."""
    found = hashlib.sha256()
    for number, batch in enumerate(batches):
        values = batch.items() if isinstance(batch, dict) else enumerate(batch)
        for name, value in values:
            is_tensor = isinstance(value, torch.Tensor)
            content = value.numpy().tobytes() if is_tensor else repr(sorted(value)).encode()
            found.update(f"{name} {len(content)} ".encode() + content)
        on_batch(number)
    return found.hexdigest()


def inline(dataset: Any, **options: Any) -> str:
    return digest(make(dataset, pool="inline", num_workers=0, **options))


def error_of(load: Callable[[], Any]) -> str:
    try:
        load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def actor_pids(mark: str) -> dict[int, str]:
    """Return the actors of Penstock and their workers, with their commands.

    Args:
        mark: The value of ``MARK`` in the environment of the cluster that they belong to.
    """
    found = {}
    for process in psutil.process_iter():
        try:
            text = " ".join(process.cmdline())
            is_ours = text.startswith("ray::NodeWorker") or "main.spawned_main(" in text
            if is_ours and process.environ().get(MARK) == mark:
                found[process.pid] = text
        except psutil.Error:
            continue
    return found


def nodes_of(loader: Any) -> set[str]:
    texts = [text for text in loader.plan.notes if "runs on node" in text]
    return {text.partition("runs on node ")[2].partition(";")[0] for text in texts}


# -- scenarios -------------------------------------------------------------------------------------


def same_bits(cluster: Cluster) -> dict[str, Any]:
    loader, start = make(Images(file=__file__), persistent_workers=True), time.perf_counter()
    first_s: list[float] = []

    def note(number: int) -> None:
        first_s.append(time.perf_counter() - start)

    epochs = [digest(loader, note), digest(loader)]
    loader.close()
    lanes = loader.timeline().lanes
    workers = [lane for lane in lanes if lane.role == "worker"]
    main = next(lane for lane in lanes if lane.role == "main")
    here = make(Images(), pool="inline", num_workers=0)
    return {
        "ray": epochs,
        "inline": [digest(here), digest(here)],
        "other": inline(Images(), seed=4),
        "nodes": len(nodes_of(loader)),
        "notes": list(loader.plan.notes),
        "first_s": first_s[0],
        "lanes": len(workers),
        "num_parts": sum(span.rows > 0 for lane in workers for span in lane.spans),
        "earliest_s": min(s.start_ns for w in workers for s in w.spans) / 1e9
        - min(s.start_ns for s in main.spans) / 1e9,
    }


def streams(cluster: Cluster) -> dict[str, Any]:
    def load(**options: Any) -> list[int]:
        return [int(x) for batch in make(Numbers(), **options) for x in batch]

    return {"ray": load(), "process": load(pool="process")}


def resumed(cluster: Cluster) -> dict[str, Any]:
    """Load payloads with bad samples in them, and resume with another number of workers."""
    options: dict[str, Any] = {"collate_fn": named, "on_error": "replace"}
    dataset = Images(bad=(5, 17))
    loader = make(dataset, num_workers=1, **options)
    batches = iter(loader)
    parts = [next(batches) for _ in range(5)]
    state = json.loads(json.dumps(loader.state_dict()))
    del batches
    other = make(dataset, **options)
    other.load_state_dict(state)
    loaded = digest([*parts, *other])
    bad = {one.index for one in [*loader.bad_samples, *other.bad_samples]}
    return {"ray": loaded, "inline": inline(dataset, **options), "bad": sorted(bad)}


def bad_sample(cluster: Cluster) -> dict[str, Any]:
    return {"error": error_of(lambda: digest(make(Images(bad=(5, 17)), num_workers=1)))}


def crash(cluster: Cluster) -> dict[str, Any]:
    loader = make(Images(crash=11), num_workers=1, on_error="skip")
    return {
        "ray": digest(loader),
        "inline": inline(Images(bad=(11,)), on_error="skip"),
        "bad": [(bad.index, bad.error) for bad in loader.bad_samples],
        "num_restarts": loader.num_restarts,
    }


def hang(cluster: Cluster) -> dict[str, Any]:
    dataset, options = Images(hang=7), {"num_workers": 1, "sample_timeout_s": 2.0}
    return {"error": error_of(lambda: digest(make(dataset, **options)))}


def killed(cluster: Cluster) -> dict[str, Any]:
    """Kill a node in the middle of an epoch, and an actor on another node."""
    node = cluster.add_node(num_cpus=1, **NODE)
    cluster.wait_for_nodes()
    loader = make(Images(pause_s=0.02), num_workers=3, prefetch_factor=1)
    num_nodes: list[int] = []

    def kill(number: int) -> None:
        if number == 2:
            num_nodes.append(len(nodes_of(loader)))
            for _, process in node.live_processes():
                os.kill(process.pid, signal.SIGKILL)
        if number == 6:
            found = actor_pids(os.environ[MARK])
            actors = [pid for pid, text in found.items() if "NodeWorker" in text]
            os.kill(actors[0], signal.SIGKILL)

    loaded = digest(loader, kill)
    cluster.remove_node(node, allow_graceful=False)
    return {
        "ray": loaded,
        "inline": inline(Images()),
        "nodes": num_nodes[0],
        "num_restarts": loader.num_restarts,
        "notes": list(loader.plan.notes),
    }


def stuck(cluster: Cluster) -> dict[str, Any]:
    limit_s, ray_pool.READY_LIMIT_S = ray_pool.READY_LIMIT_S, 5.0
    try:
        return {"error": error_of(lambda: digest(make(Stuck(), num_workers=1)))}
    finally:
        ray_pool.READY_LIMIT_S = limit_s


def unreadable(cluster: Cluster) -> dict[str, Any]:
    return {"error": error_of(lambda: digest(make(Unreadable(), num_workers=1)))}


def local_path(cluster: Cluster) -> dict[str, Any]:
    number = 900
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), number)
        try:  # the file exists in this process only
            dataset = Images(file=f"/proc/self/fd/{number}")
            return {"error": error_of(lambda: digest(make(dataset, num_workers=1)))}
        finally:
            os.close(number)


def full(cluster: Cluster) -> dict[str, Any]:
    """Load with more workers than CPUs, while the object stores are full."""
    kept = [ray.put(bytes(8 << 20)) for _ in range(STORE_BYTES // (8 << 20))]
    wait_s, ray_pool.FREE_CPU_S = ray_pool.FREE_CPU_S, 2.0
    try:
        loader = make(Images(), num_workers=3)
        found: dict[str, Any] = {"ray": digest(loader), "inline": inline(Images())}
        return {**found, "notes": list(loader.plan.notes), "kept": len(kept)}
    finally:
        ray_pool.FREE_CPU_S = wait_s
        del kept


def task_cpus(cluster: Cluster) -> dict[str, Any]:
    def count() -> int:
        return usable_cores()

    given = {num: ray.get(ray.remote(num_cpus=num)(count).remote()) for num in (0, 1)}
    loader = make(Images(), num_workers="auto")
    return {"cores": given, "here": usable_cores(), "auto": loader.num_workers}


def version_skew(cluster: Cluster) -> dict[str, Any]:
    """Add a node where another version of NumPy seems to be installed."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "numpy-0.1.dist-info")
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": path}, **NODE)
        cluster.wait_for_nodes()
        error = error_of(lambda: digest(make(Images(), num_workers=3)))
        cluster.remove_node(node)
    return {"error": error}


def driver_killed(cluster: Cluster) -> dict[str, Any]:
    """Kill a second driver while it loads, and wait until its actors and workers are gone."""
    command = [sys.executable, "-m", "support.ray_scenarios", DRIVE, cluster.address]
    before = set(actor_pids(os.environ[MARK]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        said = driver.stdout.readline()
        started = set(actor_pids(os.environ[MARK])) - before
        driver.kill()
    limit = time.monotonic() + 120.0
    while started & set(actor_pids(os.environ[MARK])) and time.monotonic() < limit:
        time.sleep(0.2)
    left = [text for pid, text in actor_pids(os.environ[MARK]).items() if pid in started]
    return {"said": said, "num_started": len(started), "left": left}


def drive(address: str) -> None:
    """Load without end."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    loader = make(Images(pause_s=0.05), num_workers=1, persistent_workers=True)
    while True:
        for _ in loader:
            print("loading", flush=True)


def packing(cluster: Cluster) -> dict[str, Any]:
    """Pack on the cluster, and kill a node meanwhile."""
    node = cluster.add_node(num_cpus=2, **NODE)
    cluster.wait_for_nodes()
    inner, killed = ray_map(), []

    def map_and_kill(function: Any, numbers: Any) -> Any:
        for done, record in enumerate(inner(function, numbers)):
            if done == 2:
                for name, process in node.live_processes():
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(name)
            yield record

    with tempfile.TemporaryDirectory() as folder:
        there, here = Path(folder, "there"), Path(folder, "here")
        packed = penstock.pack(Mixed(120), there, map=map_and_kill, shard_bytes=1500)
        penstock.pack(Mixed(120), here, workers=0, shard_bytes=1500)
        found = {"ray": digest_of_set(there), "inline": digest_of_set(here)}
        cluster.remove_node(node, allow_graceful=False)
        return {**found, "killed": killed, "length": len(packed)}


SCENARIOS: list[Callable[[Cluster], dict[str, Any]]] = [
    *(task_cpus, same_bits, resumed, bad_sample, streams, crash, hang, stuck, unreadable),
    *(local_path, full, driver_killed),
    *(version_skew, packing, killed),  # these add nodes
]


def start_cluster() -> Cluster:
    """Start two nodes with one CPU each, and connect."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **NODE})
    cluster.add_node(num_cpus=1, **NODE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    cluster = start_cluster()
    for scenario in SCENARIOS:
        if names and scenario.__name__ not in names:
            continue
        start = time.perf_counter()
        try:
            found = scenario(cluster)
        except BaseException:
            found = {"failure": traceback.format_exc()}
        found["took_s"] = round(time.perf_counter() - start, 1)
        print(json.dumps({"scenario": scenario.__name__, **found}), flush=True)
    limit = time.monotonic() + 60.0
    while actor_pids(os.environ[MARK]) and time.monotonic() < limit:
        time.sleep(0.2)
    left = list(actor_pids(os.environ[MARK]).values())
    print(json.dumps({"scenario": "left", "left": left}), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == [DRIVE]:
        drive(sys.argv[2])
    main(sys.argv[1:])
