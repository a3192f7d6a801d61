"""The first epoch over a slow network, beside other loaders at the settings that they recommend.

    python benchmarks/remote.py --peers

Called by ``remote.py``. Every loader reads the same samples in its own format from the same server,
with an empty cache, in a process of its own, in alternation. The server also answers S3's requests
for objects, because LitData and Streaming read no other addresses with a latency worth measuring.
The time is that from opening the dataset to the last batch. Imports are not counted. Requests are
those that the server has seen until the first batch, and in all.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

BUCKET = "bench-bucket"
BATCH, NUM_WORKERS = 256, 2
NUM_SHARDS = 8


def samples(count: int) -> Iterable[tuple[np.ndarray, int]]:
    for index in range(count):
        random = np.random.default_rng(index)
        yield random.integers(0, 256, (3, 64, 64), dtype=np.uint8), index


# -- the same samples in each format -----------------------------------------------------------


def write_packed(folder: Path, count: int) -> None:
    import penstock

    size = 12_300 * count // NUM_SHARDS
    penstock.pack(list(samples(count)), folder, workers=0, shard_bytes=size, fields=["x", "label"])


def write_litdata(folder: Path, count: int) -> None:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes=12_400 * count // NUM_SHARDS)
    for index, (x, label) in enumerate(samples(count)):
        writer[index] = {"x": x, "label": label}
    writer.done()
    writer.merge()


def write_mds(folder: Path, count: int) -> None:
    import streaming

    columns = {"x": "ndarray:uint8:3,64,64", "label": "int"}
    limit = 12_400 * count // NUM_SHARDS
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=limit) as writer:
        for x, label in samples(count):
            writer.write({"x": x, "label": label})


def write_tars(folder: Path, count: int) -> None:
    import webdataset

    folder.mkdir()
    every = list(samples(count))
    for shard in range(NUM_SHARDS):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for x, label in every[shard::NUM_SHARDS]:
                writer.write({"__key__": f"{label:08d}", "x.npy": x, "cls": label})


def write_parquet(folder: Path, count: int) -> None:
    import pyarrow as arrow
    import pyarrow.parquet

    folder.mkdir()
    every = list(samples(count))
    for shard in range(NUM_SHARDS):
        mine = every[shard::NUM_SHARDS]
        table = arrow.table({"x": [x.tobytes() for x, _ in mine], "label": [at for _, at in mine]})
        arrow.parquet.write_table(table, folder / f"{shard}.parquet")


# -- the loaders -------------------------------------------------------------------------------


def read_packed(url: str, cache: str) -> Iterable[int]:
    import penstock

    data = penstock.Packed(url, cache_folder=cache)
    order = data.block_order(seed=0)
    loader = penstock.DataLoader(data, batch_size=BATCH, sampler=order, num_workers=NUM_WORKERS)
    for _, label in loader:
        yield len(label)


def read_litdata(url: str, cache: str) -> Iterable[int]:
    import litdata
    from litdata.streaming import downloader
    from litdata.streaming.resolver import Dir

    # Its client takes no address without TLS, and has neither an option nor a variable for that.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    place = Dir(path=cache, url=f"s3://{BUCKET}/litdata")
    data = litdata.StreamingDataset(place, shuffle=True, seed=0, storage_options=_storage())
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=NUM_WORKERS)
    for batch in loader:
        yield len(batch["label"])


def read_mds(url: str, cache: str) -> Iterable[int]:
    import streaming

    data = streaming.StreamingDataset(
        remote=f"s3://{BUCKET}/mds", local=cache, shuffle=True, batch_size=BATCH
    )
    # Forked workers would share the connection that has fetched the index. Over TLS that is an
    # error and a retry; here, they read each other's answers and raise IndexError.
    for stream in data.streams:
        stream._downloader.clean_up()
    loader = streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=NUM_WORKERS)
    for batch in loader:
        yield len(batch["label"])


def read_tars(url: str, cache: str) -> Iterable[int]:
    import webdataset

    urls = [f"pipe:curl -s {url}/{shard}.tar" for shard in range(NUM_SHARDS)]
    data = webdataset.WebDataset(urls, shardshuffle=NUM_SHARDS, seed=0)
    data = data.shuffle(1000).decode().to_tuple("x.npy", "cls").batched(BATCH)
    for _, label in webdataset.WebLoader(data, batch_size=None, num_workers=NUM_WORKERS):
        yield len(label)


def _to_arrays(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": np.frombuffer(row["x"], np.uint8).reshape(3, 64, 64).copy()}


def read_parquet(url: str, cache: str) -> Iterable[int]:
    import torch

    import datasets

    files = [f"{url}/{shard}.parquet" for shard in range(NUM_SHARDS)]
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = data.shuffle(seed=0, buffer_size=1000).map(_to_arrays)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=NUM_WORKERS)
    for batch in loader:
        yield len(batch["label"])


Peer = tuple[str, Callable[[Path, int], None], Callable[[str, str], Iterable[int]]]
PEERS: dict[str, Peer] = {
    "Penstock": ("packed", write_packed, read_packed),
    "LitData": ("litdata", write_litdata, read_litdata),
    "MosaicML Streaming": ("mds", write_mds, read_mds),
    "WebDataset": ("tars", write_tars, read_tars),
    "HF datasets": ("parquet", write_parquet, read_parquet),
}


def _storage() -> dict[str, str]:
    return {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }


def run_one(name: str, url: str) -> None:
    """Read one epoch and print the time. Called in a process of its own."""
    folder, _, read = PEERS[name]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HF_HOME"] = cache
        import_library(folder)
        before, first_s, count, num_first = count_requests(url), 0.0, 0, 0
        start_s = time.perf_counter()
        for num in read(f"{url}/{BUCKET}/{folder}", cache):
            if not count:
                first_s = time.perf_counter() - start_s
                num_first = count_requests(url) - before
            count += num
        took_s = time.perf_counter() - start_s
    found = {"took_s": took_s, "first_s": first_s, "count": count, "num_first": num_first}
    found["num_requests"] = count_requests(url) - before
    print("\n" + json.dumps(found), flush=True)


def import_library(folder: str) -> None:
    names = {"packed": "penstock", "tars": "webdataset", "mds": "streaming", "parquet": "datasets"}
    found = importlib.import_module(names.get(folder, folder))
    importlib.import_module("torch.utils.data")
    if folder == "packed":  # its names are imported on first use
        found.DataLoader, found.Packed  # noqa: B018


def count_requests(url: str) -> int:
    with urllib.request.urlopen(f"{url}/count") as answer:
        return int(answer.read())


def compare(root: Path, url: str, count: int, num_turns: int) -> None:
    """Print the times of all loaders that are installed."""
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": url,
        "S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key-of-the-benchmark",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-benchmark",
        "AWS_REGION": "us-east-1",
    }
    times: dict[str, list[float]] = {name: [] for name in PEERS}
    for turn in range(num_turns):
        for name in PEERS:
            command = [sys.executable, __file__, name, url]
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=240
            )
            if ended.returncode:
                print(f"turn {turn}: {name} failed: {ended.stderr.strip()[-400:]}", flush=True)
                continue
            found = json.loads(ended.stdout.strip().splitlines()[-1])
            times[name].append(found["took_s"])
            print(
                f"turn {turn}: {name:20} {found['took_s']:7.2f} s, first batch "
                f"{found['first_s']:.2f} s after {found['num_first']} requests, "
                f"{found['num_requests']} in all, {found['count']} samples",
                flush=True,
            )
    print(f"{count} samples, {num_turns} turns")
    known = {name: statistics.median(some) for name, some in times.items() if some}
    for name, median_s in known.items():
        ratio = median_s / known.get("Penstock", median_s)
        print(f"median: {name:20} {median_s:7.2f} s ({ratio:.2f}x Penstock's)")


def write_sets(root: Path, count: int) -> None:
    (root / BUCKET).mkdir(parents=True, exist_ok=True)
    for name, (folder, write, _) in PEERS.items():
        if not (root / BUCKET / folder).exists():
            try:
                write(root / BUCKET / folder, count)
            except ImportError as error:
                print(f"{name} is not installed: {error}")


if __name__ == "__main__":
    del sys.path[0]  # this folder has a module named datasets
    run_one(*sys.argv[1:])
