"""The measurements ("questions") of one contender, run in its own process.

Each function returns a dictionary for JSON, with numbers under the keys that the tables use, and
text under "says".
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clock import time_feed
from contract import SIZE, Contender, Job, NotOffered
from work import WORKS, digest, normalise

Answer = dict[str, Any]


def first_of(batch: Any) -> Any:
    """Return the tensor of a batch, or its first tensor."""
    while not isinstance(batch, (torch.Tensor, np.ndarray)):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch


def family_mb() -> float:
    """Return the memory of this process and its descendants. Shared pages count once.

    PSS leaves out shared memory that no process has touched in its own mapping: batches that wait
    in a queue as open files, and batches that the consumer does not read. So the files are counted
    instead of their mappings.
    """
    import psutil  # here, so that the import of a library that needs it counts

    process, total, files = psutil.Process(), 0, {}
    for member in [process, *process.children(recursive=True)]:
        with suppress(OSError):  # the process has ended
            total += _private_bytes(member.pid)
            for kind in ("fd", "map_files"):  # the second one needs root
                for entry in os.scandir(f"/proc/{member.pid}/{kind}"):
                    with suppress(OSError):  # closed since
                        if os.readlink(entry.path).startswith(("/dev/shm/", "/memfd:")):
                            found = os.stat(entry.path)
                            files[found.st_dev, found.st_ino] = found.st_blocks * 512
    return (total + sum(files.values())) / 1e6


def _private_bytes(pid: int) -> int:
    """Return the PSS of a process without shared memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8")
    return 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|File): *(\d+) kB$", text, re.MULTILINE)))


def family_cpu_s() -> float:
    """Return the CPU time so far of this process and its descendants."""
    import psutil

    process, total = psutil.Process(), 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
            total += times.user + times.system
        except psutil.Error:  # the process has ended
            pass
    return total


def ask_rate(contender: Contender, job: Job, pace: dict[str, float]) -> Answer:
    """Measure samples per second, and the time to the first batch."""
    job = replace(job, is_endless=True)
    use: Callable[[Any], Any] = lambda batch: batch  # noqa: E731
    if job.is_float:
        use = _to_floats

    def check(batch: Any) -> None:
        _check(job, first_of(batch))

    feed: list[Any] = []

    def make() -> Any:
        feed.append(contender.open(job))
        return feed[0]

    answer = time_feed(make, check=check, use=use, cpu=family_cpu_s, **pace)
    return {
        "samples_per_s": answer["per_s"] * job.batch_size,
        "cpu_us": answer["cpu_s"] / job.batch_size * 1e6,
        "first_s": answer["first_s"],
        "memory_mb": family_mb(),
    }


def _to_floats(batch: Any) -> Any:
    images = first_of(batch)
    return images if images.dtype == torch.float32 else normalise(images)


def _check(job: Job, batch: Any) -> None:
    """Check type, shape and content of a batch."""
    batch = torch.as_tensor(batch)
    if job.kind in ("jpeg", "raw"):
        wanted = torch.float32 if job.is_float else torch.uint8
        shapes = [(job.batch_size, 3, SIZE, SIZE), (job.batch_size, SIZE, SIZE, 3)]
        mean = float(batch.float().mean())
        low, high = (-1.5, 1.5) if job.is_float else (60, 190)
        is_right = batch.dtype == wanted and tuple(batch.shape) in shapes and low < mean < high
    elif job.kind == "numbers":
        is_right = len(batch) == job.batch_size
    else:
        rows = np.load(job.data / f"{job.kind}.npy", mmap_mode="r")
        is_right = tuple(batch.shape) == (job.batch_size, *rows.shape[1:])
        is_right &= _is_one_of(batch[0].numpy(), rows)
    if not is_right:
        raise RuntimeError(f"wrong batch: {batch.dtype} {tuple(batch.shape)}")


def _is_one_of(row: np.ndarray, rows: np.ndarray) -> bool:
    return any(np.array_equal(row, other) for other in rows if other.flat[0] == row.flat[0])


def ask_kill(contender: Contender, job: Job, pace: dict[str, float]) -> Answer:
    """Run an epoch in which one worker is killed once."""
    if not contender.has_processes:
        raise NotOffered("no worker processes: what kills a thread kills the program")
    marker = os.path.join(tempfile.mkdtemp(), "met")
    job = replace(job, work=WORKS["Killed"](marker))
    seen: Counter[int] = Counter()
    num_batches, error, start_s = 0, "", time.perf_counter()
    try:
        for batch in contender.open(job):
            seen.update(int(number) for number in np.asarray(first_of(batch)).ravel())
            num_batches += 1
    except Exception as raised:
        error = type(raised).__name__
    total, taken_s = job.count // job.batch_size, time.perf_counter() - start_s
    if not Path(marker).exists():
        raise RuntimeError("no worker was killed")
    is_whole = not error and len(seen) == job.count and max(seen.values()) == 1
    says = f"{num_batches} of {total} batches" + (f", then {error}" if error else "")
    lost = job.count - len(seen)
    says += f"; {lost} samples lost" if lost and not error else ""
    return {"is_yes": is_whole, "says": says, "seconds": taken_s}


def ask_save(contender: Contender, job: Job, pace: dict[str, float]) -> Answer:
    """Load half an epoch, then save the state and the next batch."""
    feed = contender.open(job)
    if feed.state is None:
        raise NotOffered(contender.without_state)
    batches = iter(feed)
    for _ in itertools.islice(batches, job.count // job.batch_size // 2):
        pass
    state = feed.state()
    coming = [np.asarray(first_of(next(batches))).tolist() for _ in range(2)]
    content = pickle.dumps((state, coming))
    job.home.mkdir(parents=True, exist_ok=True)
    (job.home / "state").write_bytes(content)
    return {"state_bytes": len(pickle.dumps(state))}


def ask_resume(contender: Contender, job: Job, pace: dict[str, float]) -> Answer:
    """Measure the seconds until the next batch in a fresh process, and check the batch."""
    if not (job.home / "state").exists():
        raise NotOffered("no state to save")
    state, coming = pickle.loads((job.home / "state").read_bytes())
    start_s = time.perf_counter()
    feed = contender.open(job)
    assert feed.restore is not None
    feed.restore(state)
    batches = iter(feed)
    first = np.asarray(first_of(next(batches))).tolist()
    taken_s = time.perf_counter() - start_s
    second = np.asarray(first_of(next(batches))).tolist()
    is_right = [first, second] == coming
    says = "the next batch" if is_right else "goes on with other samples"
    return {"is_yes": is_right, "says": says, "seconds": taken_s, "state_bytes": len(str(state))}


def ask_bits(contender: Contender, job: Job, pace: dict[str, float]) -> Answer:
    """Compare order and augmentation of the same seed with 1, 2 and 4 workers."""
    orders, values = [], []
    for num_workers in (1, 2, 4):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        feed = contender.open(replace(job, num_workers=num_workers, seed=0))
        arrays = [np.array(first_of(batch)) for batch in feed]
        numbers = [array[:, 0] for array in arrays] if job.kind == "numbers" else arrays
        orders.append(digest(numbers))
        values.append(digest(arrays))
        del feed
    is_order, is_all = len(set(orders)) == 1, len(set(values)) == 1
    says = "order and augmentation" if is_all else "the order only" if is_order else "neither"
    return {"is_yes": is_all, "says": says}


def ask_strings(contender: Contender, job: Job, pace: dict[str, float]) -> Answer:
    """Measure the memory after a shuffled epoch with 4 workers."""
    feed = contender.open(replace(job, num_workers=4))
    batches = iter(feed)
    for _ in itertools.islice(batches, job.count // job.batch_size - 2):
        pass
    return {"memory_mb": family_mb()}


def ask_prepare(contender: Contender, job: Job, pace: dict[str, float]) -> Answer:
    """Write the data in this contender's format."""
    if not job.folder.exists():
        job.home.mkdir(parents=True, exist_ok=True)
        contender.prepare(job)
    return {}


QUESTIONS: dict[str, Callable[[Contender, Job, dict[str, float]], Answer]] = {
    "prepare": ask_prepare,
    "rate": ask_rate,
    "kill": ask_kill,
    "save": ask_save,
    "resume": ask_resume,
    "bits": ask_bits,
    "strings": ask_strings,
}
