"""The Prometheus endpoint: read with the client's own parser, and scraped by a real Prometheus."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from wsgiref.simple_server import make_server

import pytest
import torch

import penstock
from penstock.errors import BadArgument, MissingExtra
from penstock.trace import prometheus
from penstock.trace.diagnosis import CAUSES
from penstock.trace.metrics import Metrics
from support import command_line, scraped_script, served_ranks
from support.debian_programs import find_program
from support.paths import REPO
from support.ports import free_port

DASHBOARD = REPO / "docs" / "grafana.json"
FIXED_LABELS = {"loader", "rank"}


class Photos:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index in (3, 4):
            raise OSError("truncated")
        return index


def make_loader(**options: Any) -> penstock.DataLoader[Any]:
    mixture = penstock.mix([(Photos(), 1), (Photos(), 1)], names=["one", "two"])
    loader: Any = penstock.DataLoader(mixture, batch_size=8, on_error="skip", **options)
    for _ in loader:
        pass
    return loader


@contextlib.contextmanager
def serving(loaders: Any, **options: Any) -> Iterator[prometheus.MetricsEndpoint]:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    endpoint = penstock.serve_metrics(loaders, **options)
    del loaders  # the endpoint does not keep them alive either
    try:
        yield endpoint
    finally:
        endpoint.close()


def scrape(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the value of each sample, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=240) as answer:
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    assert {family.type for family in families} <= {"counter", "gauge"}
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_each_field_of_the_metrics_is_exported() -> None:
    loader = make_loader()
    with serving({"train": loader}) as endpoint:
        found = scrape(endpoint.url)
        metrics = loader.metrics()
    here = {("loader", "train"), ("rank", "0")}

    def value(name: str, **labels: str) -> float:
        return found[f"penstock_{name}", frozenset(here | set(labels.items()))]

    assert value("batches_total") == metrics.num_batches == 16
    assert value("samples_total") == metrics.num_samples > 100
    assert value("wait_ratio") == metrics.wait_share > 0
    assert value("load_seconds", quantile="0.95") == metrics.load.p95_s > 0
    assert value("bad_samples_total", error="OSError") == 4
    assert value("source_samples", source="one") == 64
    verdicts = {cause: value("verdict", cause=cause) for cause in CAUSES}
    assert {cause for cause in CAUSES if verdicts[cause]} == {metrics.verdict.cause}
    fields = set(Metrics.__dataclass_fields__) - {"is_off"}
    assert {field.partition(".")[0] for field in prometheus._FIELDS} == fields
    names = {name for name, _ in found}
    expected = {f"penstock_{name}" for name in prometheus._FIELDS.values()}
    expected = {name for name in expected if "_network_" not in name}  # nothing in object storage
    if sys.platform != "linux":
        expected -= {"penstock_read_bytes", "penstock_disk_read_bytes"}
    assert names == expected


def test_what_was_downloaded_is_exported() -> None:
    class Downloading(penstock.DataLoader[Any]):
        def metrics(self) -> Metrics:
            return replace(super().metrics(), network={"num_bytes": 7, "is_ahead": True})

    loader = Downloading(range(8))
    with serving(loader) as endpoint:
        found = {name: value for (name, _), value in scrape(endpoint.url).items()}
    assert {name: found[name] for name in found if "network" in name} == {
        "penstock_network_bytes_total": 7
    }


def test_without_tracing_only_faults_and_bytes_are_known() -> None:
    loader = make_loader(trace=False)
    with serving(loader) as endpoint:
        names = {name for name, _ in scrape(endpoint.url)}
    assert "penstock_bad_samples_total" in names
    assert names <= {
        *("penstock_bad_samples_total", "penstock_worker_restarts_total"),
        *("penstock_worker_hangs_total", "penstock_read_bytes", "penstock_disk_read_bytes"),
    }


def test_several_loaders_are_told_apart_and_one_that_is_dropped_disappears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "FRESH_S", 0.0)
    train, other = make_loader(), make_loader()
    with serving({"train": train, "validation": other}) as endpoint:

        def loaders() -> set[str]:
            return {dict(labels)["loader"] for _, labels in scrape(endpoint.url)}

        assert loaders() == {"train", "validation"}
        del other
        gc.collect()
        assert loaders() == {"train"}


def test_metrics_are_computed_once_for_scrapes_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(penstock.DataLoader[Any]):
        num_calls = 0

        def metrics(self) -> Metrics:
            self.num_calls += 1
            return super().metrics()

    loader = Counting(range(8))
    for fresh_s, num_calls in ((1e6, 1), (0.0, 4)):
        monkeypatch.setattr(prometheus, "FRESH_S", fresh_s)
        with serving(loader) as endpoint:
            for _ in range(3):
                scrape(endpoint.url)
        assert loader.num_calls == num_calls


def test_ranks_get_ports_in_their_order_and_the_next_one_if_it_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = make_loader()
    with serving(loader, port=0) as other:
        first = other.port
        with serving(loader, port=first) as second:
            assert second.port > first
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("RANK", "9")
        with serving(loader, port=first) as third:
            assert third.port > first
            assert {dict(labels)["rank"] for _, labels in scrape(third.url)} == {"9"}
    monkeypatch.delenv("LOCAL_RANK")
    with serving(loader, port=first) as again:  # its port was released
        assert again.port == first


def test_a_client_that_sends_nothing_does_not_hold_up_others() -> None:
    loader = make_loader()
    with serving(loader) as endpoint, socket.create_connection(("127.0.0.1", endpoint.port)):
        assert scrape(endpoint.url)


def test_a_loader_gives_the_same_batches_while_it_is_scraped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "FRESH_S", 0.0)
    loader: Any = penstock.DataLoader(list(range(400)), batch_size=4, num_workers=2, trace=True)
    with serving(loader) as endpoint:
        batches = []
        for number, batch in enumerate(loader):
            batches.append(batch.tolist())
            if number % 10 == 0:
                scrape(endpoint.url)
        assert scrape(endpoint.url)
    assert batches == [list(range(first, first + 4)) for first in range(0, 400, 4)]
    assert loader.timeline().num_batches == 100


class Words(Photos):
    pass


def test_without_a_list_all_loaders_of_the_program_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "FRESH_S", 0.0)
    gc.collect()  # loaders of earlier tests
    with serving(None) as endpoint:

        def loaders() -> set[str]:
            return {dict(labels)["loader"] for _, labels in scrape(endpoint.url)}

        before = loaders()
        made = [iterate(Words()), iterate(Words())]
        assert loaders() - before == {"Words", "Words 2"}
        del made[0]
        gc.collect()
        assert loaders() - before == {"Words"}


def iterate(dataset: Any) -> penstock.DataLoader[Any]:
    loader: Any = penstock.DataLoader(dataset, batch_size=8, on_error="skip")
    for _ in loader:
        pass
    return loader


# Clients that hang


@contextlib.contextmanager
def hanging_clients(port: int) -> Iterator[list[socket.socket]]:
    """Connect clients that send nothing or half a request, or never read the answer."""
    texts = [b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"]
    with contextlib.ExitStack() as stack:
        found = []
        for text in texts:  # few enough for the queue of a server that accepts none of them
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(text)
            found.append(client)
        yield found


def is_waiting(client: socket.socket) -> bool:
    """Return True if the server has neither answered nor closed the connection."""
    client.setblocking(False)
    try:
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("trace", [None, True])
def test_clients_that_hang_delay_no_batch(monkeypatch: pytest.MonkeyPatch, trace: Any) -> None:
    monkeypatch.setattr(prometheus._QuietHandler, "timeout", 600)
    loader: Any = penstock.DataLoader(list(range(400)), batch_size=4, num_workers=2, trace=trace)
    with serving(loader) as endpoint, hanging_clients(endpoint.port) as clients:
        assert sum(len(batch) for batch in loader) == 400
        assert [is_waiting(client) for client in clients].count(True) >= 2  # they hang still
        assert scrape(endpoint.url)


def test_a_server_without_threads_would_wait_for_a_client_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: the clients above do hang. A loop that serves them itself stands still."""
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    monkeypatch.setattr(prometheus._QuietHandler, "timeout", 600)
    loader: Any = penstock.DataLoader(list(range(8)), batch_size=4)
    server = make_server("127.0.0.1", 0, lambda *_: [], handler_class=prometheus._QuietHandler)
    delivered = []

    def train() -> None:
        for batch in loader:
            server.handle_request()
            delivered.append(batch)

    with server:
        with hanging_clients(server.server_port) as clients:
            thread = threading.Thread(target=train, daemon=True)
            thread.start()
            thread.join(2.0)
            assert delivered == []
            assert is_waiting(clients[0])
        thread.join(240)  # the clients are gone
    assert len(delivered) == 2


@pytest.mark.parametrize("trace", [None, True])
def test_metrics_that_take_forever_delay_no_batch(trace: Any) -> None:
    """A thread holds the lock of the records as if it computed metrics all the time."""
    loader: Any = penstock.DataLoader(list(range(400)), batch_size=4, num_workers=2, trace=trace)
    batches = iter(loader)
    next(batches)
    is_held, is_done = threading.Event(), threading.Event()

    def hold() -> None:
        with loader._recorder._lock:
            is_held.set()
            is_done.wait(600)

    threads = [threading.Thread(target=hold, daemon=True)]
    threads[0].start()
    assert is_held.wait(240)
    threads.append(threading.Thread(target=loader.timeline, daemon=True))
    threads[1].start()
    for _ in range(90):
        next(batches)
    assert threads[1].is_alive()  # control: a reader of the records does wait
    is_done.set()
    for thread in threads:
        thread.join(240)
    assert sum(1 for _ in batches) == 9


def test_what_cannot_be_served_is_refused() -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    plain: Any = torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="has no metrics"):
        penstock.serve_metrics(plain)
    loader: Any = penstock.DataLoader(range(4))
    with pytest.raises(BadArgument, match="port=70000 must be at most 65535"):
        penstock.serve_metrics(loader, port=70000)
    with pytest.raises(BadArgument, match=r"203\.0\.113\.1"):
        penstock.serve_metrics(loader, address="203.0.113.1")


def test_a_missing_client_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra) as caught:
        penstock.serve_metrics(penstock.DataLoader(range(4)))  # type: ignore[arg-type]
    assert 'pip install "prometheus-client>=0.17"' in str(caught.value)


# The dashboard


def expressions() -> list[str]:
    """Return the queries of the dashboard, for all loaders and ranks."""
    board = json.loads(DASHBOARD.read_text("utf-8"))
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [query.replace("$loader", ".*").replace("$rank", ".*") for query in found]


def unknown_metrics(text: str) -> set[str]:
    """Return the metrics in a text that the endpoint does not export."""
    exported = {f"penstock_{name}" for name in prometheus._FIELDS.values()}
    return set(re.findall(r"\bpenstock_\w+", text)) - exported


def test_the_dashboard_shows_only_metrics_that_are_exported() -> None:
    text = DASHBOARD.read_text("utf-8")
    assert unknown_metrics(text) == set()
    assert unknown_metrics(text.replace("wait_ratio", "wait_share")) == {"penstock_wait_share"}
    labels = set(re.findall(r"\{\{(\w+)\}\}", text))
    assert labels - FIXED_LABELS <= {*prometheus._LABELS.values(), "quantile"}


# Scripts under penstock run


@contextlib.contextmanager
def script(*launcher: str, stop: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the script until the ``with`` block ends."""
    command = [sys.executable, *launcher, scraped_script.__file__, str(stop)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        try:
            yield program
        finally:
            stop.touch()
            try:
                program.communicate(timeout=240)
            finally:
                program.kill()


def read_urls(program: subprocess.Popen[str], count: int) -> dict[str, str]:
    """Read the addresses that the ranks print, by what stands before."""
    found: dict[str, str] = {}
    assert program.stderr is not None
    for line in program.stderr:
        if match := re.match(r"(penstock.*): metrics: (http://\S+)$", line):
            found[match[1]] = match[2]
            if len(found) == count:
                break
    assert len(found) == count
    return found


def test_a_script_is_served_without_a_change(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    run = ("-m", "penstock", "run", "--metrics-port", "0")
    with script(*run, stop=tmp_path / "stop") as program:
        url = read_urls(program, 1)["penstock"]
        labels = frozenset({("loader", "Photos"), ("rank", "0")})
        wait_until(lambda: scrape(url).get(("penstock_samples_total", labels), 0) > 0)
    assert program.returncode == 0
    plain = tmp_path / "plain.py"
    plain.write_text("from torch.utils.data import DataLoader\nprint(list(DataLoader(range(4))))")
    command = [sys.executable, "-m", "penstock", "run", str(plain)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "ran on Penstock's engine" in done.stderr
    assert "metrics:" not in done.stderr  # without the option


def test_a_script_does_not_start_if_the_client_is_missing(tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError")
    (tmp_path / "train.py").write_text("print('ran')")
    command = [sys.executable, "-m", "penstock", "run", "--metrics-port", "0", "train.py"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2, done.stderr
    assert 'pip install "prometheus-client>=0.17"' in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="penstock top reads /proc")
def test_each_rank_under_torchrun_has_its_own_port_and_is_shown_by_top(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    port = str(free_port())
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    run = ("-m", "penstock", "run", "--metrics-port", port)
    with script(*launcher, *run, stop=tmp_path / "stop") as program:
        urls = read_urls(program, 2)
        assert len(set(urls.values())) == 2
        for rank in ("0", "1"):
            url = urls[f"penstock (rank {rank})"]
            wait_until(lambda url=url: any("samples_total" in name for name, _ in scrape(url)))
            assert {dict(labels)["rank"] for _, labels in scrape(url)} == {rank}

        def shown_ranks() -> list[str]:
            views = json.loads(command_line.invoke("top", "--json").output)
            return sorted(one["rank"] for one in views if str(tmp_path) in one["program"])

        wait_until(lambda: shown_ranks() == ["0", "1"])
    assert program.returncode == 0


# A real Prometheus


@contextlib.contextmanager
def rank(number: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(number)}
    command = [sys.executable, served_ranks.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        try:
            assert program.stdout is not None
            yield program, program.stdout.readline().strip()
        finally:
            program.kill()


@contextlib.contextmanager
def prometheus_server(folder: Path, targets: list[str]) -> Iterator[Callable[[str], list[Any]]]:
    """Run Prometheus on these targets. Yields a function that returns the result of a query."""
    program = find_program("prometheus")
    if program is None:
        pytest.skip("needs Debian's prometheus (tools/install_programs.sh unpacks it)")
    address = f"127.0.0.1:{free_port()}"
    scrape_config = {"job_name": "penstock", "static_configs": [{"targets": targets}]}
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape_config]}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    log = folder / "log"

    def query(text: str) -> list[Any]:
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        try:
            with urllib.request.urlopen(url, timeout=240) as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:  # it is starting
                    return []
                raise AssertionError(f"{text}: {error.read().decode()}") from None
        except urllib.error.URLError:  # it is starting
            assert server.poll() is None, log.read_text()
            return []

    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], cwd=folder, stdout=out, stderr=out
        )
    try:
        yield query
    finally:
        server.terminate()
        server.wait(240)


def wait_until(read: Callable[[], Any]) -> None:
    limit = time.monotonic() + 240
    while not read():
        assert time.monotonic() < limit
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a program of Debian")
def test_a_real_prometheus_scrapes_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    with rank(0) as (_, first), rank(1) as (second_program, second):
        urls = [urllib.parse.urlsplit(url) for url in (first, second)]
        assert urls[0].port != urls[1].port
        with prometheus_server(tmp_path, [url.netloc for url in urls]) as query:
            grows = "increase(penstock_samples_total[30s]) > 0"
            wait_until(lambda: {one["metric"]["rank"] for one in query(grows)} == {"0", "1"})
            assert [one["value"][1] for one in query("up")] == ["1", "1"]
            (verdicts,) = query("sum(penstock_verdict)")
            assert verdicts["value"][1] == "2"
            wait_until(lambda: query('penstock_bad_samples_total{error="OSError"} > 1'))
            for expression in expressions():
                if "penstock_network" in expression:
                    query(expression)  # valid, but nothing is in object storage
                else:
                    wait_until(lambda text=expression: query(text))
            with pytest.raises(AssertionError, match="parse error"):
                query("rate(penstock_samples_total[1m]")
            second_program.kill()
            wait_until(lambda: sorted(one["value"][1] for one in query("up")) == ["0", "1"])
