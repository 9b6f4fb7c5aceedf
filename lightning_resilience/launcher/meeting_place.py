"""The store in which ranks find each other. The launcher serves it, so that no rank's death takes it away.

It is new for each start of all ranks: torch trips over what is left in an old one.

The port is open before the first rank starts, and answers when torch is imported, which takes as long here as there.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from lightning_resilience.errors import ConfigurationError


class MeetingPlace:
    """Owned by the supervisor.

    Args:
        host: Where ranks look for it.
        port: The same; 0 for any that is free.

    Raises:
        ConfigurationError: The port cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            self._socket = socket.create_server((host, port), backlog=2048, reuse_port=False)
        except OSError as error:
            raise ConfigurationError(
                f"--master-addr {host}, --master-port {port}: {error}. It must be an address of this machine and a"
                " free port; leave both out to have them chosen"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        self._host = host
        self._store: Any = None
        self._thread = threading.Thread(target=self._serve, name="lightning-resilience-store", daemon=True)

    def open(self) -> None:
        """Begin to answer, in a while."""
        self._thread.start()

    def close(self) -> None:
        """End it; waits for an import that is under way, so that whoever forks next does so without it."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._store is None:
            self._socket.close()
        self._store = None

    def _serve(self) -> None:
        from lightning_resilience._torch_groups import TCPStore

        descriptor = self._socket.detach()  # the store closes it
        self._store = TCPStore(self._host, self.port, None, True, wait_for_workers=False, master_listen_fd=descriptor)
