"""A real SFTP server (paramiko's) on loopback that serves one folder, and drops connections on demand."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import paramiko

USER, PASSWORD = "someone", "a-password-that-nobody-may-see"


class _Login(paramiko.ServerInterface):  # type: ignore[misc]  # paramiko has no types
    def check_auth_password(self, username: str, password: str) -> int:
        good = (username, password) == (USER, PASSWORD)
        return int(paramiko.AUTH_SUCCESSFUL if good else paramiko.AUTH_FAILED)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)


class _Handle(paramiko.SFTPHandle):  # type: ignore[misc]  # paramiko has no types
    def stat(self) -> Any:
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))


class _Files(paramiko.SFTPServerInterface):  # type: ignore[misc]  # paramiko has no types
    """Every path is below the folder."""

    root: Path

    def _real(self, path: str) -> str:
        return str(self.root / self.canonicalize(path).lstrip("/"))

    def list_folder(self, path: str) -> Any:
        def act() -> list[paramiko.SFTPAttributes]:
            real = self._real(path)
            return [
                paramiko.SFTPAttributes.from_stat(os.lstat(os.path.join(real, name)), name) for name in os.listdir(real)
            ]

        return _answer(act)

    def stat(self, path: str) -> Any:
        return _answer(lambda: paramiko.SFTPAttributes.from_stat(os.stat(self._real(path))))

    def lstat(self, path: str) -> Any:
        return _answer(lambda: paramiko.SFTPAttributes.from_stat(os.lstat(self._real(path))))

    def open(self, path: str, flags: int, attr: Any) -> Any:
        def act() -> paramiko.SFTPHandle:
            fd = os.open(self._real(path), flags, 0o666)
            mode = "r+b" if flags & os.O_RDWR else "wb" if flags & os.O_WRONLY else "rb"
            handle = _Handle(flags)
            handle.readfile = handle.writefile = os.fdopen(fd, mode)
            return handle

        return _answer(act)

    def remove(self, path: str) -> int:
        return _done(lambda: os.remove(self._real(path)))

    def posix_rename(self, oldpath: str, newpath: str) -> int:
        return _done(lambda: os.replace(self._real(oldpath), self._real(newpath)))

    def mkdir(self, path: str, attr: Any) -> int:
        return _done(lambda: os.mkdir(self._real(path)))

    def rmdir(self, path: str) -> int:
        return _done(lambda: os.rmdir(self._real(path)))


def _answer(act: Any) -> Any:
    try:
        return act()
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno or 0)


def _done(act: Any) -> int:
    result = _answer(act)
    return result if isinstance(result, int) else paramiko.SFTP_OK


class SftpServer:
    """Owned by a test.

    Args:
        root: The folder it serves.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files = type("Files", (_Files,), {"root": root})
        self._key = paramiko.RSAKey.generate(2048)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """What its paths begin with."""
        return f"sftp://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """What a user passes as `storage_options`."""
        return {"username": USER, "password": PASSWORD, "look_for_keys": False, "allow_agent": False}

    def drop_connections(self) -> None:
        """As a network does."""
        for transport in self._transports:
            transport.close()
        self._transports.clear()

    def close(self) -> None:
        """Stop."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.drop_connections()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(self._key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, self._files)
            try:
                transport.start_server(server=_Login())
            except (OSError, EOFError, paramiko.SSHException):
                continue
            self._transports.append(transport)
            self.connections += 1
