"""The writer's other work: digests of the tensors in snapshots, for whoever goes on from one.

A thread of the writer process, at its low priority, so that it costs training neither a moment of its thread nor a
processor that it needs. Where snapshots are taken faster than they can be read, some get no seal.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading

from lightning_resilience.checkpoint.snapshots.header import SIZE, SLOTS, Header, digest_of


class Sealer:
    """Owned by the writer process; its methods are called by the thread that talks to the rank."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: str | None = None
        threading.Thread(target=self._run, name="lightning-resilience-seals", daemon=True).start()

    def want(self, path: str) -> None:
        """A snapshot in this file is complete."""
        with self._changed:
            self._wanted = path
            self._changed.notify()

    def _run(self) -> None:
        file: _File | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                path, self._wanted = self._wanted, None
            assert path is not None
            with contextlib.suppress(OSError, ValueError):  # it has ended well, and the file is gone
                if file is None or file.path != path:
                    file = _File(path)
                file.seal()


class _File:
    """A snapshot file as the writer sees it."""

    def __init__(self, path: str) -> None:
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._memory = memoryview(mmap.mmap(fd, 0))
        finally:
            os.close(fd)

    def seal(self) -> None:
        """Every snapshot that has none."""
        size = len(self._memory) // SLOTS
        for start in range(0, SLOTS * size, size):
            self._seal(self._memory[start : start + size])

    def _seal(self, region: memoryview) -> None:
        header = Header(region[:SIZE])
        body = header.read()
        if body is None:
            return
        tensors = region[SIZE : SIZE + json.loads(body)["tensor_bytes"]]
        header.seal(lambda: digest_of(tensors, go_on=lambda: header.read() == body))
