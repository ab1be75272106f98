"""Learns when half-closed peers are gone altogether.

Thread: the event loop. It knows connections only as something with a file number that can be aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.connection import Connection


class HangupWatch:
    """Tells when half-closed peers are gone altogether, without polling.

    After a half-close asyncio no longer watches the socket, and a queued answer writes nothing that could fail. An
    epoll of its own reports EPOLLHUP (both directions shut: epoll_ctl(2)), and is itself watched by the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._by_fd: dict[int, Connection] = {}
        self._fds: dict[Connection, int] = {}
        loop.add_reader(self._epoll.fileno(), self._on_hangup)

    def add(self, connection: Connection) -> None:
        fd = connection.fileno
        if fd >= 0 and fd not in self._by_fd:
            self._epoll.register(fd, select.EPOLLHUP | select.EPOLLET)
            self._by_fd[fd] = connection
            self._fds[connection] = fd

    def remove(self, connection: Connection) -> None:
        fd = self._fds.pop(connection, None)
        if fd is not None:
            del self._by_fd[fd]
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _on_hangup(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if fd in self._by_fd:
                self._by_fd[fd].abort()
