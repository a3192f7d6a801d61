"""A small HTTP server with ranges over a folder, and with faults on request.

with RangeServer(folder) as server:
    server.url                         http://127.0.0.1:PORT
    server.requests                    (name, start, end) of each request so far
    server.faults.append(Fault(...))   applied to matching requests until used up
    server.expired_keys.add("AKIA...") refuses requests that are signed with this key, as S3 does
    GET server.url/count               the number of requests so far
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable


@dataclasses.dataclass
class Fault:
    """What goes wrong with the next ``times`` requests whose name matches ``pattern``.

    Args:
        kind: ``"status"`` (answer ``status``), ``"reset"`` (in mid-body), ``"short"`` (a body
            that ends early), ``"stall"`` (a body that stops for ``pause_s``), ``"flip"`` (a
            changed byte),
            ``"whole"`` (200 with the whole object instead of 206), ``"refuse"`` (reset at once),
            ``"etag"`` (another ETag each time, with the right bytes).
    """

    kind: str
    pattern: str = "npy"
    times: int = 1
    status: int = 503
    pause_s: float = 30.0


class RangeServer:
    """Serves the files of a folder until the end of the ``with`` block.

    Args:
        latency_s: Time before each answer.
        bytes_per_s: Rate of all answers together. None: unlimited.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
    ) -> None:
        self.folder = os.fspath(folder)
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.requests: list[tuple[str, int, int | None]] = []
        self.faults: list[Fault] = []
        self.expired_keys: set[str] = set()
        self.seen_keys: set[str] = set()
        self.most_at_once = 0
        self.on_request: Callable[[str], None] | None = None
        self.num_at_once = self.num_sent = 0
        """Requests that are being answered, and answers with a body that were sent whole."""
        self._mutex = threading.Lock()
        self._free_s = 0.0
        self._port = 0

    def __enter__(self) -> RangeServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start listening, on the same port as before."""
        server = self

        class Handler(_Handler):
            owner = server

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128
            allow_reuse_address = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that went away

        self.is_stopping = threading.Event()
        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True, name="range-server"
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and reset all connections, as a killed server does."""
        self.is_stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._mutex:
            connections = list(self._connections)
        for connection in connections:
            reset(connection)

    def num_data_requests(self) -> int:
        return sum(name.endswith(".npy") for name, _, _ in self.requests)

    # -- called by the handlers --------------------------------------------------------------------

    def take_fault(self, name: str) -> Fault | None:
        with self._mutex:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, name):
                    fault.times -= 1
                    return fault
        return None

    def pace(self, num_bytes: int) -> None:
        """Sleep as long as ``num_bytes`` take at the limited rate, shared by all answers."""
        if self.bytes_per_s is None:
            return
        with self._mutex:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + num_bytes / self.bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)

    @contextlib.contextmanager
    def counted(self):
        with self._mutex:
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            yield
        finally:
            with self._mutex:
                self.num_at_once -= 1


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: RangeServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.owner._connections.add(self.connection)

    def finish(self) -> None:
        self.owner._connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        with self.owner.counted(), contextlib.suppress(OSError):
            self._answer(has_body=True)

    def do_HEAD(self) -> None:
        with self.owner.counted(), contextlib.suppress(OSError):
            self._answer(has_body=False)

    def _answer(self, has_body: bool) -> None:
        name = self.path.lstrip("/")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)?", self.headers.get("Range") or "")
        start = int(found[1]) if found else 0
        end = int(found[2]) + 1 if found and found[2] else None
        if name == "count":  # for programs in other processes
            self._send(str(len(self.owner.requests)).encode())
            return
        self.owner.requests.append((name, start, end))
        if self.owner.on_request is not None:
            self.owner.on_request(name)
        time.sleep(self.owner.latency_s)
        signed = re.search("Credential=([^/]+)/", self.headers.get("Authorization") or "")
        if signed:
            self.owner.seen_keys.add(signed[1])
            if signed[1] in self.owner.expired_keys:
                self._refuse(signed[1], has_body)
                return
        fault = self.owner.take_fault(name)
        if fault is not None and fault.kind == "refuse":
            reset(self.connection)
            self.close_connection = True
            return
        if fault is not None and fault.kind == "status":
            self._send_empty(fault.status)
            return
        if fault is not None and fault.kind == "whole":
            found, start, end = None, 0, None
        try:
            with open(os.path.join(self.owner.folder, name), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(start)
                body = file.read() if end is None else file.read(end - start)
        except OSError:
            self._send_empty(404)
            return
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        tag = len(self.owner.requests) if fault is not None and fault.kind == "etag" else 0
        version = os.stat(os.path.join(self.owner.folder, name)).st_mtime_ns
        self.send_header("ETag", f'"{size}-{version}-{tag}"')
        self.send_header("Last-Modified", "Tue, 17 Nov 2026 00:00:00 GMT")
        if found:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{size}")
        self.end_headers()
        if has_body:
            self._send_body(body, fault)

    def _refuse(self, key: str, has_body: bool) -> None:
        body = (
            "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message>"
            f"<AWSAccessKeyId>{key}</AWSAccessKeyId></Error>"
        ).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_body(self, body: bytes, fault: Fault | None) -> None:
        kind = None if fault is None else fault.kind
        if kind == "flip":
            at = len(body) // 2
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        for at in range(0, len(body), 1 << 18):
            piece = body[at : at + (1 << 18)]
            if kind in ("reset", "short", "stall"):
                self.wfile.write(piece[: len(piece) // 2])
                self.wfile.flush()
                if kind == "stall":
                    assert fault is not None
                    self.owner.is_stopping.wait(fault.pause_s)
                if kind == "reset":
                    reset(self.connection)
                else:
                    self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self.owner.pace(len(piece))
            self.wfile.write(piece)
        self.owner.num_sent += 1

    def log_message(self, *_: object) -> None:
        pass


def reset(connection: socket.socket) -> None:
    """Close a connection with a TCP reset, as a killed server does."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()
