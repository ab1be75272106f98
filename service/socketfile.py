"""The socket's place in the file system: one daemon a path, and nothing of anybody else's is ever removed.

Order: lock file (`<socket>.lock`, flock) → look at what is there → unlink a stale *socket* of ours only → bind, with
mode 0660 before the name is visible → listen. On exit the name is removed only if it is still ours by device and
inode. Blocking calls, made before the event loop serves.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from typing import Self

BACKLOG = 1024


class PathTaken(Exception):
    """Another live daemon owns the socket's path."""


class PathRefused(Exception):
    """The path cannot be used, and waiting or restarting does not change that. The message says why."""


class SocketFile:
    """A listening Unix socket and its name. `socket` is non-blocking."""

    def __init__(self, path: str, lock_fd: int, sock: socket.socket) -> None:
        self.path = path
        self.socket = sock
        self._lock_fd = lock_fd
        self._identity = (-1, -1)
        self.gid = self._identify()

    @classmethod
    def claim(cls, path: str) -> Self:
        """Lock, clear a stale socket, bind, listen. Raises `PathTaken` or `PathRefused`."""
        if len(os.fsencode(path)) > 107:  # sun_path of unix(7), less its NUL
            raise PathRefused(f"{path}: a Unix socket's path has at most 107 bytes")
        lock_fd = _take_lock(path + ".lock")
        try:
            _clear_stale(path)
            return cls(path, lock_fd, _listen(path))
        except BaseException:
            os.close(lock_fd)
            raise

    def is_ours(self) -> bool:
        """Whether the name still leads to this socket."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def is_gone(self) -> bool:
        """Whether nothing is left at the path: somebody has removed the name."""
        return not os.path.lexists(self.path)

    def claim_again(self) -> socket.socket:
        """Bind the path anew, with a new `socket`, after its name was removed; the lock file too, if that went along.

        Returns the old socket, which is still open. Raises `PathTaken` or `PathRefused`; then nothing has changed.
        """
        lock_fd = self._lock_fd if _leads_to(self.path + ".lock", self._lock_fd) else _take_lock(self.path + ".lock")
        try:
            sock = _listen(self.path)
        except PathRefused:
            if lock_fd != self._lock_fd:
                os.close(lock_fd)
            raise
        if lock_fd != self._lock_fd:
            os.close(self._lock_fd)
        before, self.socket, self._lock_fd = self.socket, sock, lock_fd
        self.gid = self._identify()
        return before

    def _identify(self) -> int:
        """Remember which file is ours; returns its group."""
        found = os.lstat(self.path)
        self._identity = (found.st_dev, found.st_ino)
        return found.st_gid

    def release(self) -> None:
        """Stop listening; remove the name if it is still ours; let the lock go (its file stays, so no race opens)."""
        if self.is_ours():
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.socket.close()
        os.close(self._lock_fd)


def _take_lock(path: str) -> int:
    try:
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        hint = "is a symbolic link" if error.errno == errno.ELOOP else (error.strerror or str(error))
        raise PathRefused(f"cannot open the lock file {path}: {hint}") from None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise PathTaken(f"another daemon holds {path}") from None
    return lock_fd


def _leads_to(path: str, fd: int) -> bool:
    """Whether the name still leads to the open file."""
    try:
        named = os.lstat(path)
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _clear_stale(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PathRefused(f"{path}: {error.strerror}") from None
    if not stat.S_ISSOCK(found.st_mode):
        raise PathRefused(f"{path} exists and is not a socket; it is left alone, remove it or choose another path")
    if found.st_uid != os.geteuid():
        raise PathRefused(f"{path} belongs to uid {found.st_uid}; it is left alone, choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            pass  # nobody listens: stale
        except OSError as error:
            raise PathRefused(f"{path}: cannot tell whether somebody listens: {error}") from None
        else:
            raise PathTaken(f"somebody already listens on {path}")
    os.unlink(path)


def _listen(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    umask = os.umask(0o117)  # the socket's mode is 0777 less this: 0660
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise PathRefused(f"cannot bind {path}: {error.strerror}") from None
    finally:
        os.umask(umask)
    return sock
