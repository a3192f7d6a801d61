"""``penstock.serve_metrics``: an endpoint that Prometheus scrapes.

    Prometheus --GET /metrics--> a thread in the training process --> loader.metrics()

The thread sleeps between scrapes. A batch does not wait for a scrape, except for Python's own lock.
However many servers scrape, metrics are computed at most once per ``FRESH_S``. Labels are bounded:
the rank, the names given to loaders, and lists of limited length.

Needs ``prometheus-client``. Called in the training process.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from socket import AF_INET6
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from penstock.errors import BadArgument, MissingExtra
from penstock.options import check_count
from penstock.trace.diagnosis import CAUSES
from penstock.trace.metrics import Metrics, loader_metrics
from penstock.trace.recorder import live_recorders

FRESH_S = 0.9
"""Scrapes within this time get the same numbers."""
FIRST_PORT, MAX_PORTS = 19_400, 200
MAX_LOADERS = 20
"""Number of loaders that are exported if all are. The oldest ones are left out."""
MAX_NAMES = 50
"""Number of sources of a mixture that are exported. The others are left out."""
QUANTILES = {"p50_s": "0.5", "p95_s": "0.95", "p99_s": "0.99"}
_FIELDS = {
    "num_batches": "batches_total",
    "num_samples": "samples_total",
    "window_s": "window_seconds",
    "batches_per_s": "batches_per_second",
    "samples_per_s": "samples_per_second",
    "wait_share": "wait_ratio",
    "step_share": "step_ratio",
    "num_ready": "ready_batches",
    "load": "load_seconds",
    "wait": "wait_seconds",
    "step": "step_seconds",
    "sources": "source_samples",
    "verdict": "verdict",
    "num_restarts": "worker_restarts_total",
    "num_hangs": "worker_hangs_total",
    "bad_samples": "bad_samples_total",
    "read_bytes": "read_bytes",
    "disk_bytes": "disk_read_bytes",
    "network.num_bytes": "network_bytes_total",
    "network.num_requests": "network_requests_total",
    "network.num_hits": "network_hits_total",
    "network.num_waits": "network_waits_total",
    "network.waited_s": "network_wait_seconds_total",
    "network.num_evicted": "network_evictions_total",
    "network.used_bytes": "network_cache_bytes",
}
"""The name in Prometheus of each field of :class:`Metrics`. Counters end in ``_total``."""
_WITHOUT_TRACE = {"num_restarts", "num_hangs", "bad_samples", "read_bytes", "disk_bytes", "network"}
_LABELS = {"bad_samples": "error", "sources": "source", "verdict": "cause"}


class MetricsEndpoint:
    """A running endpoint. It ends with the program, or with :meth:`close`.

    Attributes:
        url: The address to scrape.
    """

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        host, self.port = str(server.server_address[0]), int(server.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        threading.Thread(target=server.serve_forever, name="penstock-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._server.server_close()

    def __repr__(self) -> str:
        return f"MetricsEndpoint({self.url!r})"


def serve_metrics(
    loaders: Any = None, *, port: int = FIRST_PORT, address: str = "127.0.0.1"
) -> MetricsEndpoint:
    """Serve the metrics of loaders for Prometheus, until the program ends.

    Example::

        endpoint = penstock.serve_metrics({"train": loader, "validation": other_loader})
        print(endpoint.url)

    Args:
        loaders: A loader, or loaders by name. The name is the label ``loader``. By default, all
            loaders of the program, also those created later, by the class of their dataset.
        port: Where to begin. Each rank of a machine adds its local rank, and takes the next free
            port if that one is in use. 0: any free port.
        address: The network interface. By default, only programs on this machine can connect.

    Raises:
        MissingExtra: prometheus-client is not installed.
    """
    check_client()
    from prometheus_client import CollectorRegistry, make_wsgi_app

    named = loaders if isinstance(loaders, Mapping) else {"loader": loaders}
    for name, loader in named.items() if loaders is not None else ():
        if not callable(getattr(loader, "metrics", None)):
            raise BadArgument(
                f"{name!r} is a {type(loader).__name__}, which has no metrics()",
                remedy="penstock.serve_metrics(penstock.DataLoader(...))",
            )
    port = check_count("port", port, 0, 65535)
    registry: Any = CollectorRegistry()
    registry.register(LoaderCollector(None if loaders is None else named))
    return MetricsEndpoint(_start(make_wsgi_app(registry), port, address))


def check_client() -> None:
    """Raise ``MissingExtra`` if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise MissingExtra.named("prometheus", "prometheus-client is not installed") from None


class LoaderCollector:
    """Collects the metrics of loaders. Called by prometheus-client, in the thread of a request."""

    def __init__(self, loaders: Mapping[str, Any] | None) -> None:
        self._loaders: dict[str, weakref.ref[Any]] | None = None
        if loaders is not None:
            self._loaders = {str(name): weakref.ref(loader) for name, loader in loaders.items()}
        self._rank = _rank()
        self._lock = threading.Lock()
        self._families: list[Any] = []
        self._until_s = 0.0

    def collect(self) -> list[Any]:
        """Return metric families, as the registry expects."""
        with self._lock:
            if time.monotonic() > self._until_s:
                self._families = self._compute()
                self._until_s = time.monotonic() + FRESH_S
            return self._families

    def _compute(self) -> list[Any]:
        from prometheus_client import metrics_core

        families: dict[str, Any] = {}
        for name, metrics in self._metrics():
            for field, labels, value in _samples(metrics):
                full = f"penstock_{_FIELDS[field]}"
                if field not in families:
                    is_counter = full.endswith("_total")
                    kind = "CounterMetricFamily" if is_counter else "GaugeMetricFamily"
                    families[field] = getattr(metrics_core, kind)(full, _help(field))
                shown = {"loader": name, "rank": self._rank, **labels}
                families[field].add_sample(full, shown, value)
        return list(families.values())

    def _metrics(self) -> Iterator[tuple[str, Metrics]]:
        """Yield the name and the metrics of each loader that still exists."""
        if self._loaders is not None:
            for name, reference in self._loaders.items():
                if (loader := reference()) is not None:
                    yield name, loader.metrics()
            return
        seen: Counter[str] = Counter()
        for recorder in live_recorders()[-MAX_LOADERS:]:
            dataset = str(recorder.facts.get("dataset", "loader"))
            seen[dataset] += 1
            number = seen[dataset]
            yield dataset if number == 1 else f"{dataset} {number}", loader_metrics(recorder)


def _samples(metrics: Metrics) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield each sample: the field, its own labels and the value."""
    for field in _FIELDS:
        whole, _, part = field.partition(".")
        value = getattr(metrics, whole)
        if part and value is not None:
            value = value.get(part)
        if value is None or (metrics.is_off and whole not in _WITHOUT_TRACE):
            continue
        if field == "verdict":
            value = {cause: float(cause == value.cause) for cause in CAUSES}
        if field in _LABELS:
            for name in list(value)[:MAX_NAMES]:
                yield field, {_LABELS[field]: str(name)}, value[name]
        elif field in ("load", "wait", "step"):
            for name, quantile in QUANTILES.items():
                yield field, {"quantile": quantile}, getattr(value, name)
        else:
            yield field, {}, value


@cache
def _help(field: str) -> str:
    """Return the description of a field in the docstring of :class:`Metrics`."""
    text = inspect.getdoc(Metrics) or ""  # none with python -OO
    name = field.partition(".")[0]
    found = re.search(rf"^    (?:\w+, )*{name}(?:, \w+)*: (.+(?:\n {{8}}.+)*)", text, re.M)
    return " ".join(found[1].split()) if found else name


def _rank() -> str:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return os.environ.get("RANK", "0")


class _QuietHandler(WSGIRequestHandler):
    timeout = 10
    """Seconds after which a connection that sends nothing is closed."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # on Windows, two programs could share a port


class _ServerV6(_Server):
    address_family = AF_INET6


def _start(app: Any, port: int, address: str) -> WSGIServer:
    """Start listening on the first free port."""
    if port:
        port += int(os.environ.get("LOCAL_RANK") or 0)
    kind = _ServerV6 if ":" in address else _Server
    for candidate in range(port, min(port + MAX_PORTS, 65536)):
        try:
            return make_server(address, candidate, app, kind, _QuietHandler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise BadArgument(
                    f"address={address!r}, port={candidate}: {error.strerror or error}",
                    remedy='address="127.0.0.1", or address="0.0.0.0" for all interfaces',
                ) from None
    raise BadArgument(
        f"no free port from {port} to {port + MAX_PORTS - 1} on {address}", remedy="port=0"
    )
