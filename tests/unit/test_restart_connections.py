"""Connections are ended without losing what is being sent."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_resilience._torch_groups import Descriptor, open_sockets, sockets_being_written
from lightning_resilience.restart.connections import Connections

MUCH = b"x" * (64 << 20)
"""More than two socket buffers take."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with ours, theirs:
            yield ours, theirs


def descriptor(connection: socket.socket) -> Descriptor:
    return next(item for item in open_sockets() if item.fd == connection.fileno())


def test_who_reads_finds_the_end_and_who_writes_can(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    connections = Connections()
    assert connections.cut([descriptor(ours)]) == 1
    assert ours.recv(1) == b""
    ours.sendall(b"on its way")
    assert theirs.recv(100) == b"on its way"
    connections.let_go()


def test_what_others_still_send_is_taken_in(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    connections = Connections()
    connections.cut([descriptor(ours)])
    ours.close()  # as gloo does when it finds the end
    theirs.settimeout(30.0)
    theirs.sendall(MUCH)  # neither blocks nor fails
    connections.let_go()
    with contextlib.suppress(ConnectionResetError):  # something came after the last look
        assert theirs.recv(1) == b""


def test_it_waits_for_a_send_that_has_begun(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    ours.setblocking(False)
    with select.epoll() as poll:
        sent = ours.send(MUCH)
        assert sent < len(MUCH)
        poll.register(ours, select.EPOLLIN | select.EPOLLOUT)
        assert ours.fileno() in sockets_being_written()
        connections = Connections(flush_s=30.0)
        cutting = threading.Thread(target=connections.cut, args=([descriptor(ours)],))
        cutting.start()
        time.sleep(0.05)
        with pytest.raises(BlockingIOError):
            ours.recv(1)  # not yet
        poll.modify(ours, select.EPOLLIN)  # it is sent
        cutting.join(10.0)
        assert ours.recv(1) == b""
        connections.let_go()


def test_it_does_not_wait_for_ever(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    with select.epoll() as poll:
        poll.register(ours, select.EPOLLIN | select.EPOLLOUT)
        connections = Connections(flush_s=0.01)
        connections.cut([descriptor(ours)])
        assert ours.recv(1) == b""
        connections.let_go()


def test_nothing_is_left_open_and_listeners_stay(pair: tuple[socket.socket, socket.socket]) -> None:
    before = set(open_sockets())
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        items = [descriptor(pair[0]), descriptor(listener), Descriptor(9999, "socket:[1]")]
        assert connections.cut(items) == 1
        assert connections.cut(items) == 0, "it is cut already"
        socket.create_connection(listener.getsockname()).close()
    connections.let_go()
    assert set(open_sockets()) == before


def test_a_number_that_is_of_something_else_now_is_no_connection() -> None:
    before = os.listdir("/proc/self/fd")
    with open(os.devnull) as file:
        assert Connections().cut([Descriptor(file.fileno(), "socket:[1]")]) == 0
    assert os.listdir("/proc/self/fd") == before
