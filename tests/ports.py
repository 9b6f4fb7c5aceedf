"""Network ports for servers that are started later."""

from __future__ import annotations

import itertools
import random
import socket
from pathlib import Path

_LOWEST = 10_000


def free_port() -> int:
    """One that the kernel gives to nobody who asks for just any, and that was not given out here before.

    A job binds it a second later or so, and in the meantime jobs beside it open connections by the dozen.
    """
    while True:
        port = next(_ports)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _candidates() -> itertools.cycle[int]:
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = list(range(_LOWEST, max(ephemeral, _LOWEST + 1000)))
    first = random.SystemRandom().randrange(len(ports))  # another process begins elsewhere; nobody's seed counts
    return itertools.cycle(ports[first:] + ports[:first])


_ports = _candidates()
