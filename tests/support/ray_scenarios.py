"""A program that loads on a Ray cluster of two nodes, and prints what each scenario found.

Each line of its output is a JSON object: the scenario, and its findings or its error. Ray starts
once for all of them. It is a program, because Ray leaves threads and descriptors in its driver.

    PENSTOCK_TEST_CLUSTER=1 python -m support.ray_scenarios [SCENARIO ...]
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray.cluster_utils import Cluster

import penstock
from penstock.engine.parent import in_flight, mixed_pool
from penstock.engine.parent.fork_server import close_fork_server
from penstock.engine.remote import ray_pool
from penstock.integrations.ray_packing import ray_map
from penstock.machine.host import usable_cores
from support.packed_sets import Mixed
from support.packed_sets import digest as digest_of_set

MARK = "PENSTOCK_TEST_CLUSTER"
"""Set by the test. All processes of the cluster inherit it."""
SECOND_NODE = "PENSTOCK_TEST_SECOND_NODE"
"""Set in the processes of the second node only."""
DRIVE, RANK = "--drive", "--rank"
LIMIT_S = 240.0
"""Reached only by a hang."""
STORE_BYTES = 80 << 20
LENGTH = 48
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 would starve beside other tests
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


class Late(Images):
    """On the second node, it cannot be unpickled until a file exists."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        while os.environ.get(SECOND_NODE) and not self.path.exists():
            time.sleep(0.05)


class Uneven(Images):
    """A sample takes longer on the second node. It says where it was loaded."""

    def __init__(self, times: float) -> None:
        super().__init__(pause_s=0.03)
        self.times = times

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        is_second = bool(os.environ.get(SECOND_NODE))
        for _ in range(int(self.times) if is_second else 1):
            image, _, _ = super().__getitem__(index)
        return image, int(is_second)


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
    """Return the actors of Penstock, their fork servers and workers, with their commands.

    Args:
        mark: The value of ``MARK`` in the environment of the cluster that they belong to.
    """
    found = {}
    for process in psutil.process_iter():
        try:
            text = " ".join(process.cmdline())
            is_ours = text.startswith("ray::NodeWorker") or ".fork_server_main(" in text
            if is_ours and process.environ().get(MARK) == mark:
                found[process.pid] = text
        except psutil.Error:
            continue
    return found


def mapping_of(array: Any) -> tuple[str, int] | None:
    """Return the mapped file that holds an array, by its inode, and the offset in the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, offset, _, inode, *_ = line.split()
        first, last = (int(one, 16) for one in bounds.split("-"))
        if first <= array.ctypes.data < last and inode != "0":
            return inode, int(offset, 16) + array.ctypes.data - first
    return None


def nodes_of(loader: Any) -> set[str]:
    texts = [text for text in loader.plan.notes if "runs on node" in text]
    return {text.partition("runs on node ")[2].partition(";")[0] for text in texts}


def gather(loader: Any, num_nodes: int) -> int:
    """Load epochs until workers on this many nodes have joined. Returns the number of epochs."""
    limit, num_epochs = time.monotonic() + LIMIT_S, 0
    while len(nodes_of(loader)) < num_nodes and time.monotonic() < limit:
        num_epochs += 1
        for _ in loader:
            time.sleep(0.05)
    return num_epochs


def skip(loader: Any, num_epochs: int) -> Any:
    for _ in range(num_epochs):
        for _ in loader:
            pass
    return loader


def digests_until_restart(loader: Any, kill: Callable[[int], None]) -> list[str]:
    """Return the hashes of epochs. ``kill`` is called in the first, and the last has its effect."""
    limit, found = time.monotonic() + LIMIT_S, [digest(loader, kill)]
    while not loader.num_restarts and time.monotonic() < limit:
        found.append(digest(loader))
    return found


def await_free_cpus() -> None:
    """Wait until Ray has freed the CPUs of earlier actors."""
    limit = time.monotonic() + LIMIT_S
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < limit
        time.sleep(0.1)


# -- scenarios -------------------------------------------------------------------------------------


def same_bits(cluster: Cluster) -> dict[str, Any]:
    loader, start = make(Images(file=__file__), persistent_workers=True), time.perf_counter()
    first_s: list[float] = []

    def note(number: int) -> None:
        first_s.append(time.perf_counter() - start)

    epochs = [digest(loader, note)]
    num_skipped = gather(loader, 2)
    epochs.append(digest(loader))
    loader.close()
    lanes = loader.timeline().lanes
    workers = [lane for lane in lanes if lane.role == "worker"]
    main = next(lane for lane in lanes if lane.role == "main")
    here = make(Images(), pool="inline", num_workers=0)
    return {
        "ray": epochs,
        "inline": [digest(here), digest(skip(here, num_skipped))],
        "other": inline(Images(), seed=4),
        "nodes": len(nodes_of(loader)),
        "notes": list(loader.plan.notes),
        "first_s": first_s[0],
        "lanes": sum(bool(lane.spans) for lane in workers),
        "num_epochs": num_skipped + 2,
        "num_parts": sum(span.rows > 0 for lane in workers for span in lane.spans),
        "earliest_s": min(s.start_ns for w in workers for s in w.spans) / 1e9
        - min(s.start_ns for s in main.spans) / 1e9,
    }


def mixed(cluster: Cluster) -> dict[str, Any]:
    """Load with a local worker and one on another node, then with the local one alone."""
    options: dict[str, Any] = {"pool": "process", "num_workers": 1, "persistent_workers": True}
    options["prefetch_factor"] = 1  # the worker that is lost must get a lease after that
    loader = make(Images(pause_s=0.02), remote_workers=1, **options)
    epochs = [digest(loader)]
    num_skipped, num_spans = gather(loader, 1), [0]
    limit = time.monotonic() + LIMIT_S
    while not all(num_spans) and time.monotonic() < limit:  # nodes report once a second
        lanes = [lane for lane in skip(loader, 1).timeline().lanes if lane.role == "worker"]
        num_spans, num_skipped = [len(lane.spans) for lane in lanes], num_skipped + 1
    epochs.append(digest(loader))

    def kill(number: int) -> None:
        found = actor_pids(os.environ[MARK]) if number == 2 else {}
        for pid in [pid for pid, text in found.items() if "NodeWorker" in text]:
            os.kill(pid, signal.SIGKILL)

    epochs += digests_until_restart(loader, kill)
    nodes, num_restarts = nodes_of(loader), loader.num_restarts
    loader.close()
    here = make(Images(), pool="inline", num_workers=0)
    return {
        "ray": epochs,
        "inline": [
            digest(here),
            digest(skip(here, num_skipped)),
            *(digest(here) for _ in epochs[2:]),
        ],
        "nodes": list(nodes),
        "here": ray.get_runtime_context().get_node_id()[:8],
        "num_spans": num_spans,
        "num_restarts": num_restarts,
        "notes": list(loader.plan.notes),
        "refused": error_of(lambda: digest(make(Numbers(), remote_workers=1, **options))),
        "without": error_of(
            lambda: digest(make(Images(), pool="auto", num_workers=0, remote_workers=1))
        ),
    }


def mixed_auto(cluster: Cluster) -> dict[str, Any]:
    """Load with remote workers on demand: a slow dataset needs them, a fast one does not."""
    found: dict[str, Any] = {}
    share, mixed_pool.WAITED_SHARE = mixed_pool.WAITED_SHARE, 0.5  # this machine may be busy
    for name, pause_s, step_s in (("slow", 0.02, 0.0), ("fast", 0.0, 0.25)):
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "pool": "auto"}
        loader = make(Images(pause_s=pause_s), remote_workers="auto", **options)
        limit, num_epochs = time.monotonic() + LIMIT_S, 0
        while time.monotonic() < limit and not nodes_of(loader):
            digest(loader, lambda number, step_s=step_s: time.sleep(step_s))
            num_epochs += 1
            if name == "fast" and num_epochs == 3:
                break
        found[name] = len(nodes_of(loader))
        found[f"{name}_notes"] = list(loader.plan.notes)
        last = digest(loader)
        here = make(Images(), pool="inline", num_workers=0)
        found[f"{name}_bits"] = last == digest(skip(here, num_epochs))
        loader.close()
    mixed_pool.WAITED_SHARE = share
    return found


class Heavy(Images):
    """A dataset with an array, whose batches are too large for the answer of an actor."""

    def __init__(self, folder: str, limit_s: float = LIMIT_S) -> None:
        super().__init__()
        self.array, self.folder, self.limit_s = np.arange(1 << 20), folder, limit_s

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in (0, 1):
            # Batch 1 is not loaded before a second message has arrived.
            limit = time.monotonic() + self.limit_s
            while len(list(Path(self.folder).glob("enqueued-*"))) <= index:
                assert time.monotonic() < limit, f"message {index} did not arrive"
                time.sleep(0.01)
        return torch.full((3, 128, 128), float(self.array[index])), index


def copies(cluster: Cluster) -> dict[str, Any]:
    """Record where the dataset is on each node, where batches are, and when messages arrive."""
    node = cluster.add_node(num_cpus=2, **NODE)
    cluster.wait_for_nodes()
    await_free_cpus()
    folder = tempfile.mkdtemp()

    class Recorded(ray_pool.NodeWorker):
        def start(self, number: int, num_workers: int, task: Any, pickled: Any, *rest: Any) -> Any:
            place = mapping_of(max(pickled[1], key=len))
            node = ray.get_runtime_context().get_node_id()
            Path(folder, f"started-{number}").write_text(json.dumps([node, place]))
            return super().start(number, num_workers, task, pickled, *rest)

        def enqueue(self, *arguments: Any) -> None:
            Path(folder, f"enqueued-{time.monotonic_ns()}").touch()
            super().enqueue(*arguments)

    class Blocked(Recorded):
        def enqueue(self, *arguments: Any) -> None:
            while self._places:  # leases that were not answered
                time.sleep(0.01)
            super().enqueue(*arguments)

    written: list[tuple[Any, Any]] = []
    write, worker = ray_pool.RayPool._write, ray_pool.NodeWorker

    def recorded_write(self: Any, lease: Any, content: Any) -> None:
        written.append((mapping_of(content), mapping_of(content.copy())))
        write(self, lease, content)

    options: dict[str, Any] = {"batch_size": 1, "persistent_workers": True, "shuffle": False}
    options["prefetch_factor"] = 2
    wait_s, ray_pool.FREE_CPU_S = ray_pool.FREE_CPU_S, LIMIT_S
    ray_pool.RayPool._write, ray_pool.NodeWorker = recorded_write, Recorded  # type: ignore
    try:
        one = make(Heavy(folder), num_workers=1, **options)
        loaded = [int(indices[0]) for _, indices in one]
        one.close()
        num_messages = len(list(Path(folder).glob("enqueued-*")))
        num_written = len(written)
        for path in Path(folder).glob("*-*"):
            path.unlink()
        await_free_cpus()
        ray_pool.NodeWorker = Blocked  # type: ignore
        late = make(Heavy(folder, limit_s=3.0), num_workers=1, **options)
        late_error = error_of(lambda: skip(late, 1))
        late.close()
        ray_pool.NodeWorker = Recorded  # type: ignore
        for path in Path(folder).glob("started-*"):
            path.unlink()
        await_free_cpus()
        all_of_them = make(Heavy(folder), num_workers=4, **options)
        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit:
            skip(all_of_them, 1)
            if sum(" runs on node " in text for text in all_of_them.plan.notes) == 4:
                break
        all_of_them.close()
        started = [json.loads(path.read_text()) for path in Path(folder).glob("started-*")]
    finally:
        ray_pool.RayPool._write, ray_pool.NodeWorker = write, worker  # type: ignore
        ray_pool.FREE_CPU_S = wait_s
        shutil.rmtree(folder)
        cluster.remove_node(node)
    places: dict[str, list[Any]] = {}
    for name, place in started:
        places.setdefault(name, []).append(place)
    return {
        "loaded": loaded,
        "num_messages": num_messages,
        "late_error": late_error,
        "num_written": num_written,
        "are_views": all(place is not None for place, _ in written),
        "are_copies": any(place is not None for _, place in written),
        "places": sorted(places.values(), key=len),
    }


def ranks(cluster: Cluster) -> dict[str, Any]:
    """Load with two ranks, each with a local and a remote worker, and kill one of the nodes."""
    node = cluster.add_node(num_cpus=1, **NODE)
    cluster.wait_for_nodes()
    await_free_cpus()
    options: dict[str, Any] = {"batch_size": 2, "world_size": 2}
    remote: dict[str, Any] = {"pool": "process", "num_workers": 1, "persistent_workers": True}
    remote["prefetch_factor"] = 1  # the worker that is lost must get a lease after that
    loaders = [
        make(Images(pause_s=0.02), rank=rank, remote_workers=1, **options, **remote)
        for rank in (0, 1)
    ]
    num_epochs = [gather(loader, 1) for loader in loaders]
    num_skipped = max(num_epochs)
    for loader, num in zip(loaders, num_epochs, strict=True):
        skip(loader, num_skipped - num)
    nodes = sorted(set().union(*map(nodes_of, loaders)))
    found: list[list[Any]] = [[], []]
    for number, batches in enumerate(zip(*loaders, strict=True)):
        for rank, batch in enumerate(batches):
            found[rank].append([part.clone() if hasattr(part, "clone") else part for part in batch])
        if number == 2:
            ends = [psutil.Process(process.pid) for _, process in node.live_processes()]
            for process in [*ends, *(child for one in ends for child in one.children(True))]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    limit, later = time.monotonic() + LIMIT_S, []
    while not any(loader.num_restarts for loader in loaders) and time.monotonic() < limit:
        later.append([digest(loader) for loader in loaders])
    for loader in loaders:
        loader.close()
    cluster.remove_node(node, allow_graceful=False)
    here = [
        make(Images(), rank=rank, pool="inline", **{**options, "num_workers": 0}) for rank in (0, 1)
    ]
    return {
        "nodes": nodes,
        "killed": node.node_id[:8],
        "ray": [digest(batches) for batches in found],
        "inline": [digest(skip(one, num_skipped)) for one in here],
        "later": later,
        "later_inline": [[digest(one) for one in here] for _ in later],
        "samples": [[int(x) for batch in batches for x in batch[1]] for batches in found],
        "num_restarts": sum(loader.num_restarts for loader in loaders),
    }


def rank_processes(cluster: Cluster) -> dict[str, Any]:
    """Load with 2 and with 3 ranks. Each is a process of its own with a worker on the cluster."""
    node = cluster.add_node(num_cpus=1, **NODE)
    cluster.wait_for_nodes()
    found: dict[str, Any] = {}
    for num_ranks in (2, 3):
        await_free_cpus()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "support.ray_scenarios", RANK, cluster.address]
            command += [str(Path(folder, "store")), str(num_ranks)]
            processes = [
                subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(num_ranks)
            ]
            try:
                said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
            finally:
                for process in processes:
                    process.kill()
        loaded = [json.loads(text.splitlines()[-1]) for text in said]
        options: dict[str, Any] = {"world_size": num_ranks, "pool": "inline", "num_workers": 0}
        here = [make(Images(), batch_size=2, rank=rank, **options) for rank in range(num_ranks)]
        found[str(num_ranks)] = {
            "ray": [one["epochs"] for one in loaded],
            "inline": [[digest(loader), digest(loader)] for loader in here],
            "samples": [one["samples"] for one in loaded],
            "nodes": [one["nodes"] for one in loaded],
            "pids": [one["pid"] for one in loaded],
        }
    await_free_cpus()
    cluster.remove_node(node)
    return found


def load_rank(address: str, store: str, num_ranks: int, rank: int) -> None:
    """Load two epochs of a rank, and print what was loaded."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
    )
    loader = make(Images(), batch_size=2, num_workers=1, persistent_workers=True, shard=True)
    samples: list[int] = []

    def recorded() -> Any:
        for batch in loader:
            samples.extend(batch[1].tolist())
            yield batch

    epochs = [digest(recorded()), digest(loader)]
    found = {"epochs": epochs, "samples": samples, "nodes": sorted(nodes_of(loader))}
    loader.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print(json.dumps({**found, "pid": os.getpid()}), flush=True)


def late_node(cluster: Cluster) -> dict[str, Any]:
    """Load while one node does not start its worker, and then with both."""
    await_free_cpus()
    with tempfile.TemporaryDirectory() as folder:
        go_on = Path(folder, "go on")
        loader = make(Late(str(go_on)), persistent_workers=True)
        epochs = [digest(loader)]
        num_before = len(nodes_of(loader))
        go_on.touch()
        num_skipped = gather(loader, 2)
        epochs.append(digest(loader))
        loader.close()
    here = make(Images(), pool="inline", num_workers=0)
    return {
        "ray": epochs,
        "inline": [digest(here), digest(skip(here, num_skipped))],
        "nodes": [num_before, len(nodes_of(loader))],
        "num_restarts": loader.num_restarts,
    }


def slow_node(cluster: Cluster) -> dict[str, Any]:
    """Count the batches of the second node: as fast as the first, slower, and slower unnoticed."""
    found: dict[str, Any] = {}
    slow = in_flight.SLOW
    for name, times, limit in (("equal", 1, slow), ("slow", 10, slow), ("unnoticed", 10, 1e9)):
        await_free_cpus()
        in_flight.SLOW = limit
        options: dict[str, Any] = {"prefetch_factor": 2, "persistent_workers": True}
        loader = make(Uneven(times), **options)
        gather(loader, 2)
        skip(loader, 1)
        found[name] = [int(second[0]) for _ in range(3) for _, second in loader]
        found[f"{name}_nodes"] = len(nodes_of(loader))
        loader.close()
    in_flight.SLOW = slow
    return found


def streams(cluster: Cluster) -> dict[str, Any]:
    def load(**options: Any) -> list[int]:
        return [int(x) for batch in make(Numbers(), **options) for x in batch]

    return {
        "ray": load(),
        "process": load(pool="process"),
        "one": load(pool="process", num_workers=1),
    }


def resumed(cluster: Cluster) -> dict[str, Any]:
    """Load payloads with bad samples in them, and resume with another number of workers."""
    options: dict[str, Any] = {"collate_fn": named, "on_error": "replace"}
    dataset = Images(bad=(5, 17))
    loader = make(dataset, num_workers=1, **options)
    batches = iter(loader)
    parts = [next(batches) for _ in range(5)]
    state = json.loads(json.dumps(loader.state_dict()))
    del batches
    other = make(dataset, num_workers=3, **options)  # one waits for a CPU
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
    options: dict[str, Any] = {"prefetch_factor": 1, "persistent_workers": True}
    loader = make(Images(pause_s=0.02), num_workers=3, **options)
    num_skipped = gather(loader, 3)
    num_nodes = len(nodes_of(loader))

    def kill(number: int) -> None:
        if number == 2:
            for _, process in node.live_processes():
                os.kill(process.pid, signal.SIGKILL)
        if number == 6:
            found = actor_pids(os.environ[MARK])
            actors = [pid for pid, text in found.items() if "NodeWorker" in text]
            os.kill(actors[0], signal.SIGKILL)

    loaded = digests_until_restart(loader, kill)
    loader.close()
    cluster.remove_node(node, allow_graceful=False)
    here = skip(make(Images(), pool="inline", num_workers=0), num_skipped)
    return {
        "ray": loaded,
        "inline": [digest(here) for _ in loaded],
        "nodes": num_nodes,
        "num_restarts": loader.num_restarts,
        "notes": list(loader.plan.notes),
    }


def freeze_second_node(limit_s: float | None) -> dict[str, Any]:
    """Load while the actor and the worker of the second node are stopped.

    Args:
        limit_s: How long. None: until the actor has been replaced.
    """
    await_free_cpus()
    options: dict[str, Any] = {"prefetch_factor": 1, "persistent_workers": True}
    loader = make(Images(pause_s=0.02), max_restarts=1000, **options)
    num_skipped, stopped = gather(loader, 2), []

    def resume() -> None:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    timer = threading.Timer(limit_s or 0.0, resume)

    def stop(number: int) -> None:
        for pid in actor_pids(os.environ[MARK]) if number == 2 else ():
            process = psutil.Process(pid)
            if process.environ().get(SECOND_NODE):
                process.suspend()
                stopped.append(process)
        if number == 2 and limit_s is not None:
            timer.start()

    begin = time.monotonic()
    if limit_s is None:
        loaded = digests_until_restart(loader, stop)
    else:
        loaded = [digest(loader, stop), digest(loader)]
    waited_s = time.monotonic() - begin
    timer.cancel()
    resume()
    loader.close()
    here = skip(make(Images(), pool="inline", num_workers=0), num_skipped)
    return {
        "ray": loaded,
        "inline": [digest(here) for _ in loaded],
        "num_stopped": len(stopped),
        "num_restarts": loader.num_restarts,
        "notes": list(loader.plan.notes),
        "waited_s": waited_s,
    }


def frozen(cluster: Cluster) -> dict[str, Any]:
    lost_s, ray_pool.LOST_S = ray_pool.LOST_S, 3.0
    try:
        return freeze_second_node(None)
    finally:
        ray_pool.LOST_S = lost_s


def late_answer(cluster: Cluster) -> dict[str, Any]:
    return freeze_second_node(30.0)


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
    """Load while all CPUs are taken and the object stores are full."""
    kept = [ray.put(bytes(8 << 20)) for _ in range(STORE_BYTES // (8 << 20))]
    takers = [ray.remote(num_cpus=1)(Taker).remote() for _ in range(2)]
    ray.get([taker.ping.remote() for taker in takers])
    wait_s, ray_pool.FREE_CPU_S = ray_pool.FREE_CPU_S, 1.0
    try:
        options = {"batch_size": 16}  # too large for the answer of an actor
        loader = make(Images(), num_workers=1, **options)
        found: dict[str, Any] = {"ray": digest(loader), "inline": inline(Images(), **options)}
        return {**found, "notes": list(loader.plan.notes), "kept": len(kept)}
    finally:
        ray_pool.FREE_CPU_S = wait_s
        for taker in takers:
            ray.kill(taker)
        del kept


class Taker:
    """An actor that holds a CPU."""

    def ping(self) -> None:
        return None


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
        await_free_cpus()
        wait_s, ray_pool.GATHER_S = ray_pool.GATHER_S, LIMIT_S
        error = error_of(lambda: digest(make(Images(), num_workers=3)))
        ray_pool.GATHER_S = wait_s
        cluster.remove_node(node)
    return {"error": error}


def driver_killed(cluster: Cluster) -> dict[str, Any]:
    return end_driver(cluster, signal.SIGKILL)


def driver_interrupted(cluster: Cluster) -> dict[str, Any]:
    return end_driver(cluster, signal.SIGINT)


def end_driver(cluster: Cluster, number: signal.Signals) -> dict[str, Any]:
    """Send a signal to a second driver that loads. Wait until its actors and workers are gone."""
    command = [sys.executable, "-m", "support.ray_scenarios", DRIVE, cluster.address]
    before = set(actor_pids(os.environ[MARK]))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as driver:
        assert driver.stdout is not None
        said = driver.stdout.readline()
        started = set(actor_pids(os.environ[MARK])) - before
        driver.send_signal(number)
        try:
            _, errors = driver.communicate(timeout=LIMIT_S)
        finally:
            driver.kill()
    limit = time.monotonic() + LIMIT_S
    while started & set(actor_pids(os.environ[MARK])) and time.monotonic() < limit:
        time.sleep(0.2)
    left = [text for pid, text in actor_pids(os.environ[MARK]).items() if pid in started]
    is_interrupted = "KeyboardInterrupt" in errors
    found = {"said": said, "num_started": len(started), "left": left}
    return {**found, "is_interrupted": is_interrupted, "code": driver.returncode}


def drive(address: str) -> None:
    """Load without end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
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


def train_rank(config: dict[str, Any]) -> None:
    """Load a part of an epoch in a worker of Ray Train, and write what was loaded to a file."""
    from ray import train

    rank = train.get_context().get_world_rank()
    ranks = train.get_context().get_world_size()
    loader = make(Images(), batch_size=4 // ranks, pool="auto", num_workers=1, shard=True)
    if config["state"] is not None:
        loader.load_state_dict(config["state"])
    found, batches = {}, iter(loader)
    for images, indices, _ in itertools.islice(batches, config["num_batches"]):
        for image, index in zip(images, indices.tolist(), strict=True):
            found[index] = hashlib.sha256(image.numpy().tobytes()).hexdigest()
    state = loader.state_dict()
    text = json.dumps({"state": state, "found": found, "cores": usable_cores()})
    Path(config["folder"], f"{config['name']}-{rank}.json").write_text(text)


def ray_train(cluster: Cluster) -> dict[str, Any]:
    """Train on two workers, and resume on one."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    state, parts = None, []
    with tempfile.TemporaryDirectory() as folder:
        for num_workers, num_batches in ((2, 3), (1, None)):
            await_free_cpus()
            config = {"folder": folder, "name": str(num_workers), "state": state}
            TorchTrainer(
                train_rank,
                train_loop_config={**config, "num_batches": num_batches},
                scaling_config=ScalingConfig(num_workers=num_workers),
                run_config=RunConfig(storage_path=folder, name=str(num_workers)),
            ).fit()
            for rank in range(num_workers):
                text = Path(folder, f"{num_workers}-{rank}.json").read_text()
                parts.append(json.loads(text))
            state = parts[0]["state"]
    expected = {}
    for images, indices, _ in make(Images(), pool="inline", num_workers=0):
        for image, index in zip(images, indices.tolist(), strict=True):
            expected[str(index)] = hashlib.sha256(image.numpy().tobytes()).hexdigest()
    return {
        "num_samples": [len(part["found"]) for part in parts],
        "ray": {index: one for part in parts for index, one in part["found"].items()},
        "inline": expected,
        "cores": [part["cores"] for part in parts],
    }


def ray_data(cluster: Cluster) -> dict[str, Any]:
    """Write a dataset of Ray Data as Parquet, and load it with workers on the cluster."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.range(LENGTH).map(lambda row: {"id": row["id"], "square": row["id"] ** 2})
    with tempfile.TemporaryDirectory() as folder:
        rows.write_parquet(folder)
        dataset = penstock.open_dataset(f"{folder}/*.parquet")
        await_free_cpus()
        loader = make(dataset, num_workers=1)
        loaded = {int(i): int(s) for b in loader for i, s in zip(b["id"], b["square"], strict=True)}
    return {"num_rows": len(dataset), "is_right": loaded == {n: n * n for n in range(LENGTH)}}


def node_kills(cluster: Cluster) -> dict[str, Any]:
    """Load with local and remote workers while nodes are killed at random places."""
    num_kills, chosen = 50, random.Random(5)
    options: dict[str, Any] = {"pool": "process", "num_workers": 1, "persistent_workers": True}
    loader = make(Images(pause_s=0.01), remote_workers=2, max_restarts=1000, **options)
    here = make(Images(), pool="inline", num_workers=0)
    wrong, num_killed, num_epochs, limit = [], 0, 0, time.monotonic() + 3000.0
    while num_killed < num_kills and time.monotonic() < limit:
        node = cluster.add_node(num_cpus=1, **NODE)
        cluster.wait_for_nodes()
        joined = nodes_of(loader)
        while time.monotonic() < limit and num_epochs:
            if nodes_of(loader) - joined:
                break
            skip(loader, 1)
            skip(here, 1)
        at = chosen.randrange(LENGTH // 4)

        def kill(number: int, node: Any = node, at: int = at) -> None:
            if number == at:
                for _, process in node.live_processes():
                    os.kill(process.pid, signal.SIGKILL)

        loaded = digest(loader, kill)
        if loaded != digest(here):
            wrong.append(num_epochs)
        num_epochs, num_killed = num_epochs + 1, num_killed + 1
        cluster.remove_node(node, allow_graceful=False)
    loader.close()
    found = {"wrong": wrong, "num_killed": num_killed, "num_restarts": loader.num_restarts}
    return {**found, "notes": len(loader.plan.notes)}


def slow_link(cluster: Cluster) -> dict[str, Any]:
    """Load with a node behind a link of 10 Mbit/s, in a network namespace."""
    name = f"penstock{os.getpid()}"
    ours, theirs, network = f"pa{os.getpid()}", f"pb{os.getpid()}", "10.77.0"
    inside, rate = ["ip", "netns", "exec", name], "tbf rate 10mbit burst 32kbit latency 400ms"
    commands = [
        f"ip netns add {name}",
        f"ip link add {ours} type veth peer name {theirs}",
        f"ip link set {theirs} netns {name}",
        f"ip addr add {network}.1/24 dev {ours}",
        f"ip link set {ours} up",
        f"ip -n {name} addr add {network}.2/24 dev {theirs}",
        f"ip -n {name} link set {theirs} up",
        f"ip -n {name} link set lo up",
        f"ip -n {name} route add default via {network}.1",
        f"tc qdisc add dev {ours} root {rate}",
        f"ip netns exec {name} tc qdisc add dev {theirs} root {rate}",
    ]
    start = [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    start += [f"--address={cluster.address}", f"--node-ip-address={network}.2", "--num-cpus=1"]
    node: Any = None
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=60)
            if done.returncode:
                return {"skipped": f"{command}: {done.stderr.strip()}"}
        node = subprocess.Popen(
            [*start, f"--object-store-memory={STORE_BYTES}"], stdout=subprocess.DEVNULL
        )
        options: dict[str, Any] = {"pool": "process", "num_workers": 1, "persistent_workers": True}
        loader = make(Images(pause_s=0.02), remote_workers=2, **options)
        limit, num_skipped = time.monotonic() + LIMIT_S, 0
        while time.monotonic() < limit and not any(network in one for one in nodes_of(loader)):
            skip(loader, 1)
            num_skipped += 1
        start_s = time.perf_counter()
        loaded = [digest(loader) for _ in range(5)]
        took_s = time.perf_counter() - start_s
        nodes = sorted(nodes_of(loader))
        loader.close()
        here = skip(make(Images(), pool="inline", num_workers=0), num_skipped)
        expected = [digest(here) for _ in range(5)]
        return {"ray": loaded, "inline": expected, "nodes": nodes, "epochs_s": took_s}
    finally:
        if node is not None:
            node.terminate()
            node.wait(LIMIT_S)
        for command in (f"ip netns del {name}", f"ip link del {ours}"):
            subprocess.run(command.split(), capture_output=True)


SCENARIOS: list[Callable[[Cluster], dict[str, Any]]] = [
    *(task_cpus, same_bits, resumed, bad_sample, streams, crash, hang, stuck, unreadable),
    *(local_path, full, mixed, mixed_auto, late_node, slow_node, frozen),
    *(driver_killed, driver_interrupted),
    *(version_skew, packing, copies, ranks, rank_processes, killed),  # these add nodes
]


ON_REQUEST: list[Callable[[Cluster], dict[str, Any]]] = [
    *(ray_data, ray_train, late_answer, slow_link, node_kills)
]
"""Scenarios of ``tests/soak/test_ray_soak.py``, which run only if they are named."""


def start_cluster() -> Cluster:
    """Start two nodes with one CPU each, and connect."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **NODE})
    cluster.add_node(num_cpus=1, env_vars={SECOND_NODE: "1"}, **NODE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    cluster = start_cluster()
    for scenario in [*SCENARIOS, *ON_REQUEST]:
        if scenario.__name__ not in names if names else scenario in ON_REQUEST:
            continue
        start = time.perf_counter()
        try:
            found = scenario(cluster)
        except BaseException:
            found = {"failure": traceback.format_exc()}
        found["took_s"] = round(time.perf_counter() - start, 1)
        print(json.dumps({"scenario": scenario.__name__, **found}), flush=True)
    close_fork_server()  # of this process
    limit = time.monotonic() + LIMIT_S
    while actor_pids(os.environ[MARK]) and time.monotonic() < limit:
        time.sleep(0.2)
    left = list(actor_pids(os.environ[MARK]).values())
    print(json.dumps({"scenario": "left", "left": left}), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == [DRIVE]:
        drive(sys.argv[2])
    elif sys.argv[1:2] == [RANK]:
        load_rank(*sys.argv[2:4], *map(int, sys.argv[4:]))
    else:
        main(sys.argv[1:])
