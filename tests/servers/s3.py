"""A server that speaks S3 (moto), behind a proxy that lets some requests fail. Both on loopback.

Processes of ours that a test starts reach it like any other server.
"""

from __future__ import annotations

import http.client
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from tests.ports import free_port

BUCKET = "bucket"
SECRET = "a-secret-that-nobody-may-see"
_ERRORS = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}
_HOP = {"connection", "transfer-encoding", "keep-alive"}

Fault = int | str
"""A status, "reset" for a connection that breaks, or "drop" for one that ends without an answer: s3fs asks again."""


class Proxy(ThreadingHTTPServer):
    """Passes requests on, except those that shall fail.

    Attributes:
        decide: Gets method and path of a request, and says how it fails; None to pass it on.
        seen: How many requests of each kind were passed on.
        failed: How many failed.
    """

    daemon_threads = True

    def __init__(self, backend: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend = backend
        self.calm()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def calm(self) -> None:
        """Nothing fails any more, and the counts begin anew."""
        self.decide: Callable[[str, str], Fault | None] = lambda method, path: None
        self.seen: Counter[str] = Counter()
        self.failed = 0

    def fail_at_random(self, rate: float, seed: int = 1) -> None:
        """Let this part of all requests fail, in all three ways."""
        dice = random.Random(seed)
        faults: list[Fault] = [500, 503, "reset"]
        self.decide = lambda method, path: dice.choice(faults) if dice.random() < rate else None

    def fail_next(self, count: int, pattern: str, fault: Fault = 503) -> None:
        """Let the next requests fail whose "METHOD /path" matches."""
        left = [count]

        def decide(method: str, path: str) -> Fault | None:
            if left[0] > 0 and re.search(pattern, f"{method} {path}"):
                left[0] -= 1
                return fault
            return None

        self.decide = decide

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed ends its connection where it likes."""

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.decide(self.command, self.path)
        if fault is None:
            self._pass_on(body)
            return
        self.server.failed += 1
        if fault in ("reset", "drop"):
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        assert isinstance(fault, int)
        code = _ERRORS[fault]
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected {code}</Message></Error>".encode()
        self._answer(fault, {"Content-Type": "application/xml"}, text)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def _pass_on(self, body: bytes) -> None:
        backend = http.client.HTTPConnection("127.0.0.1", self.server.backend, timeout=60)
        try:
            headers = {key: value for key, value in self.headers.items() if key.lower() not in {*_HOP, "expect"}}
            backend.request(self.command, self.path, body, headers)
            answer = backend.getresponse()
            kind = "part" if "partNumber=" in self.path else "object"
            self.server.seen[f"{self.command} {kind}"] += 1
            self._answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            backend.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for key, value in headers.items():
            if key.lower() not in {*_HOP, "content-length"}:
                self.send_header(key, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" and not body else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class S3Server:
    """Owned by a test session.

    Attributes:
        running: Process ids of servers, which outlive the test that happened to need one first.
    """

    running: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self._port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.running.add(self._process.pid)
        _wait_for(self._port)
        self.proxy = Proxy(self._port)

    @property
    def options(self) -> dict[str, Any]:
        """What a user passes as `storage_options`."""
        url = f"http://127.0.0.1:{self.proxy.server_port}"
        return {"key": "someone", "secret": SECRET, "endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}}

    def reset(self) -> None:
        """An empty bucket, and nothing fails."""
        self.proxy.calm()
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{BUCKET}")

    def keys(self, prefix: str = "") -> list[str]:
        """All objects, past the proxy."""
        text = self._ask("GET", f"/{BUCKET}?list-type=2&prefix={prefix}")
        return re.findall(r"<Key>(.*?)</Key>", text)

    def uploads(self) -> list[str]:
        """The keys of unfinished uploads."""
        return re.findall(r"<Key>(.*?)</Key>", self._ask("GET", f"/{BUCKET}?uploads"))

    def get(self, key: str) -> bytes:
        """An object."""
        return self._request("GET", f"/{BUCKET}/{key}")

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        self._request("PUT", f"/{BUCKET}/{key}", data)

    def close(self) -> None:
        """End both."""
        self.proxy.close()
        self._process.terminate()
        self._process.wait(timeout=30)

    def _ask(self, method: str, path: str) -> str:
        return self._request(method, path).decode()

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            who = "AWS4-HMAC-SHA256 Credential=someone/20260101/us-east-1/s3/aws4_request"
            connection.request(method, path, body, {"Authorization": who})
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status < 300, (answer.status, data)
            return data
        finally:
            connection.close()


def _wait_for(port: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the S3 server did not start")
