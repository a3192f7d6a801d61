"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket

# From 32768 on (Linux) or 49152 on, the system takes ports for outgoing connections. Such a port
# could be taken between this call and the start of the server.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free, also for the second that a server takes to start."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"100 ports between {_PORTS.start} and {_PORTS.stop} are taken")
