"""Measures object storage for ``penstock doctor s3://bucket/set``.

::

    access    may objects be read and listed? Nothing is written
    latency   requests for one byte, one after the other
    rate      ranges of 4 MiB, with 1, 8, 32 and 128 requests at the same time

Tested by ``tests/integration/cli/doctor/test_network_check.py``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.cli.sections import print_section
from penstock.sources.manifest import MANIFEST, Manifest
from penstock.sources.remote.address import check_url, require_obstore
from penstock.sources.remote.block_layout import BLOCK_BYTES, describe_bytes
from penstock.sources.remote.downloader import NUM_REQUESTS
from penstock.sources.remote.object_store import FetchFailed, ObjectStore

AT_ONCE = (1, 8, 32, 128)
_LEVEL_S = 3.0
"""How long each rate is measured, at least one request for each place."""
_NUM_LATENCIES = 8
_RETRY_S = 10.0


@dataclass(kw_only=True)
class NetworkFindings:
    """Results for one address.

    Args:
        kind: ``"packed set"`` or ``"objects"``.
        num_bytes: Bytes of the set, or of the objects that were listed.
        access: What was tried, and the answer.
        rates: Bytes per second, by the number of requests at the same time.
        failure: Why nothing could be measured, with the remedy.
    """

    url: str
    kind: str = "objects"
    num_bytes: int = 0
    access: dict[str, str] = field(default_factory=dict)
    latency_s: float | None = None
    rates: dict[int, float] = field(default_factory=dict)
    failure: dict[str, str] | None = None


def check_network(url: str) -> NetworkFindings:
    """Measure one address. Reads at most some seconds of data for each rate.

    Raises:
        BadArgument: The address is not valid.
        MissingExtra: The library for object storage is not installed.
    """
    require_obstore(url)
    found = NetworkFindings(url=check_url(url))
    store = ObjectStore(found.url, _RETRY_S)
    sizes = _list(store, found)
    try:
        content = store.read(MANIFEST) if store.size_of(MANIFEST) is not None else None
        if content is not None:
            found.kind = "packed set"
            manifest = Manifest.from_json(content.decode("utf-8"), f"{url}/{MANIFEST}")
            sizes = {entry.name: entry.bytes for entry in manifest.entries}
        found.num_bytes = sum(sizes.values())
        if not found.num_bytes:
            found.failure = {
                "what": f"{found.url} contains no set and no objects that can be listed",
                "remedy": "penstock doctor with the address of a packed set",
            }
            return found
        _measure(store, sizes, found)
        found.access["read"] = "allowed"
    except FetchFailed as error:
        found.access["read"] = "refused" if error.facts["kind"] == "access" else "failed"
        found.failure = error.facts
    return found


def _list(store: ObjectStore, found: NetworkFindings) -> dict[str, int]:
    try:
        sizes = store.list_some()
    except FetchFailed as error:
        is_refused = error.facts["kind"] == "access"
        found.access["list"] = "refused" if is_refused else "not possible here"
        return {}
    found.access["list"] = "allowed"
    return sizes


def _measure(store: ObjectStore, sizes: dict[str, int], found: NetworkFindings) -> None:
    largest = max(sizes, key=lambda name: sizes[name])
    took_s = [_time(lambda: store.read(largest, 0, 1)) for _ in range(_NUM_LATENCIES)]
    found.latency_s = statistics.median(took_s)
    ranges = [
        (name, start, min(start + BLOCK_BYTES, size))
        for name, size in sorted(sizes.items(), key=lambda one: -one[1])
        for start in range(0, size, BLOCK_BYTES)
    ]
    turns = itertools.cycle(ranges)
    for num_requests in AT_ONCE:
        found.rates[num_requests] = _rate(store, turns, num_requests)


def _rate(store: ObjectStore, turns: Any, num_requests: int) -> float:
    """Return the bytes per second with ``num_requests`` requests at the same time."""
    start_s = time.perf_counter()

    def read_on(first: tuple[str, int, int]) -> int:
        num_bytes = len(store.read(*first))
        while time.perf_counter() - start_s < _LEVEL_S:
            num_bytes += len(store.read(*next(turns)))
        return num_bytes

    with ThreadPoolExecutor(num_requests) as pool:
        num_bytes = sum(pool.map(read_on, [next(turns) for _ in range(num_requests)]))
    return num_bytes / (time.perf_counter() - start_s)


def _time(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def print_network(console: Console, found: NetworkFindings) -> None:
    """Print the results for people."""
    rows = [("contents", f"{found.kind}, {describe_bytes(found.num_bytes)}")]
    rows += [(f"{name} access", answer) for name, answer in sorted(found.access.items())]
    if found.latency_s is not None:
        rows.append(("latency", f"{found.latency_s * 1e3:.3g} ms for one byte (median)"))
    rows += [
        (f"{num} request{'s' * (num > 1)}", f"{rate / 1e6:,.4g} MB/s")
        for num, rate in found.rates.items()
    ]
    if found.rates:
        rate = found.rates[NUM_REQUESTS]
        rows.append(
            ("download", f"{found.num_bytes / rate:,.3g} s with {NUM_REQUESTS} requests at a time")
        )
    print_section(console, found.url, rows)
    if found.failure is not None:
        console.print(Text(found.failure["what"], style="red"), soft_wrap=True)
        for name in ("likely", "remedy"):
            if found.failure.get(name):
                console.print(Text(f"  {name.capitalize()}: {found.failure[name]}"), soft_wrap=True)
