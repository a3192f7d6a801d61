"""The parent's end of a pipe handles frames of any size, in any pieces, without blocking."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

import pytest

from penstock.engine.parent.process_pool import Channel, ChannelPoller

pytestmark = pytest.mark.legacy


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Any]]:
    ours, theirs = connection.Pipe(duplex=True)
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def read_until(channel: Channel, count: int, limit_s: float = 10.0) -> list[bytes]:
    frames: list[bytes] = []
    board = ChannelPoller([channel])
    limit = time.monotonic() + limit_s
    while len(frames) < count and channel.is_open and time.monotonic() < limit:
        if board.wait(0.1):
            frames += channel.read()
    return frames


@pytest.mark.parametrize("size", [0, 1, 3, 65536, 5 << 20])
def test_a_frame_from_the_worker_arrives_whole(ends: Any, size: int) -> None:
    channel, theirs = ends
    body = os.urandom(size)
    sender = threading.Thread(target=theirs.send_bytes, args=(body,))
    sender.start()
    assert read_until(channel, 1) == [body]
    sender.join()


@pytest.mark.parametrize("size", [0, 1, 65536, 5 << 20])
def test_a_frame_to_the_worker_arrives_whole(ends: Any, size: int) -> None:
    channel, theirs = ends
    body = os.urandom(size)
    channel.send(body)  # does not block, although the pipe holds 64 KB and nothing reads yet
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(theirs.recv_bytes()))
    reader.start()
    board = ChannelPoller([channel])
    while reader.is_alive():
        board.wait(0.05)
    assert received == [body]
    assert not channel.has_unsent


def test_many_frames_that_come_at_once_are_read_in_one_go_and_in_order(ends: Any) -> None:
    channel, theirs = ends
    bodies = [bytes([number]) * number for number in range(100)]
    for body in bodies:
        theirs.send_bytes(body)
    assert channel.read() == bodies


def test_a_frame_that_comes_byte_by_byte_is_given_once_it_is_whole(ends: Any) -> None:
    channel, theirs = ends
    stream = struct.pack("!i", 5) + b"water" + struct.pack("!i", 2) + b"ok"
    given = []
    for byte in stream:
        os.write(theirs.fileno(), bytes([byte]))
        given.append(channel.read())
    assert given[8] == [b"water"]
    assert given[14] == [b"ok"]
    assert sum(map(len, given)) == 2


def test_the_long_header_of_frames_past_two_gigabytes_is_understood(ends: Any) -> None:
    channel, theirs = ends
    os.write(theirs.fileno(), struct.pack("!i", -1) + struct.pack("!Q", 5) + b"wat")
    assert channel.read() == []
    os.write(theirs.fileno(), b"er")
    assert channel.read() == [b"water"]


def test_reading_when_nothing_came_gives_nothing_and_leaves_the_channel_open(ends: Any) -> None:
    channel, _ = ends
    assert channel.read() == []
    assert channel.is_open


def test_frames_sent_before_the_worker_hung_up_are_given_before_the_end(ends: Any) -> None:
    channel, theirs = ends
    theirs.send_bytes(b"last words")
    theirs.close()
    assert channel.read() == [b"last words"]
    assert channel.is_open
    assert channel.read() == []
    assert not channel.is_open


def test_sending_to_a_worker_that_is_gone_raises_nothing(ends: Any) -> None:
    channel, theirs = ends
    theirs.close()
    channel.send(b"x" * (1 << 20))
    channel.send(b"y")
    assert not channel.has_unsent
    channel.read()
    assert not channel.is_open


def test_the_poller_names_the_channels_that_have_something_to_say() -> None:
    pipes = [connection.Pipe(duplex=True) for _ in range(3)]
    channels = [Channel(ours) for ours, _ in pipes]
    board = ChannelPoller(channels)
    assert board.wait(0.0) == []
    pipes[2][1].send_bytes(b"x")
    pipes[0][1].close()
    assert sorted(board.wait(1.0)) == [0, 2]
    board.forget(0)
    assert board.wait(1.0) == [2]
    for channel, (_, theirs) in zip(channels, pipes, strict=True):
        channel.close()
        theirs.close()
