"""Looks after what the daemon stands on while it serves: its socket's name, and the room for connections.

Thread: the event loop. It knows no requests and no engine. Once a second it looks at one directory entry; that is
the only thing here that is asked again and again, because nothing tells when a name goes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Callable
from typing import Any

from service.server import Server
from service.socketfile import PathRefused, PathTaken, SocketFile

log = logging.getLogger(__name__)

LOOK_S = 1.0
# Files that the daemon has open besides its connections: model, logs, epoll, pipes.
OWN_FILES = 64


async def keep_socket(socket_file: SocketFile, server: Server, look_s: float = LOOK_S) -> None:
    """For ever: when the socket's name has been removed, serve under it again. What took its place is left alone."""
    complaint = ""
    while True:
        await asyncio.sleep(look_s)
        if socket_file.is_ours():
            complaint = ""
            continue
        try:
            if not socket_file.is_gone():
                raise PathRefused(f"{socket_file.path} is something else now; it is left alone, and nobody can connect")
            before = socket_file.claim_again()
        except (PathRefused, PathTaken) as error:
            if str(error) != complaint:
                log.error("%s", error)
            complaint = str(error)
            continue
        await server.listen_on(socket_file.socket)
        before.close()
        log.warning("%s had been removed; it is served again", socket_file.path)


def make_room(max_connections: int) -> int:
    """Raise this process's limit of open files as far as allowed, for so many connections; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OWN_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < wanted:
        log.warning("the limit of open files is %d: at most about %d connections", soft, soft - OWN_FILES)
    return soft


def tell_no_files(count: Callable[[], None]) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A loop's exception handler: one line when there is no file number for another connection, which waits.

    asyncio stops accepting for a second then and tries again; the client waits in the listen queue.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            log.warning("no file number is left for another connection (%s); trying again in 1 s", error.strerror)
            count()
        else:
            loop.default_exception_handler(context)

    return handle
