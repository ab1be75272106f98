"""One client's connection: bytes ↔ messages, the reply's mode, backpressure, half-close. What a request *means* is
the server's business.

Thread: the event loop. It knows nothing of the engine.

Backpressure: above HIGH_WATER_BYTES of unsent replies nothing more is taken from the streams (their text merges) and
no further request is read. A peer that accepts no byte for `write_stall_s` is cut with `slow_client`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, cast

from service.protocol import (
    END_OF_RESPONSE,
    BadFrame,
    BadRequest,
    Chat,
    Delta,
    Done,
    DrainNotice,
    Error,
    Event,
    Forbidden,
    ProtocolError,
    RequestDecoder,
    ServiceError,
    SlowClient,
    encode_frame,
    encode_line,
)

if TYPE_CHECKING:
    from service.server import Server
    from service.streams import Stream

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 256 * 1024
LOW_WATER_BYTES = 64 * 1024
SEND_BUFFER_BYTES = 2 * 1024 * 1024
_SO_SNDBUFFORCE = 32  # <asm-generic/socket.h>; Python has no name for it


class Connection(asyncio.Protocol):
    """Made by the server for each client; `streams` are its live requests by id."""

    def __init__(self, server: Server, number: int) -> None:
        # shared
        self._server = server
        self._loop = asyncio.get_running_loop()
        # this connection
        self.number = number
        self.uid = -1
        self.pid = -1
        self._is_closing = False
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set by connection_made
        self._decoder = RequestDecoder()
        self._is_paused = False
        self._has_sent_all = False  # the peer has half-closed: no more requests
        self._stall_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._last_data_at = 0.0
        # its requests
        self.streams: dict[str, Stream] = {}
        self.recent_chats: dict[str, Chat] = {}  # ended, but a late interrupt or edit may still name them

    # --- asyncio's calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=LOW_WATER_BYTES)
        sock: socket.socket = transport.get_extra_info("socket")
        self.pid, self.uid, gid = peer_credentials(sock)
        granted = ask_send_buffer(sock, SEND_BUFFER_BYTES)
        log.debug("connection %d: uid %d pid %d, send buffer %d bytes", self.number, self.uid, self.pid, granted)
        try:
            self._server.connected(self, gid, granted)
        except ServiceError as error:
            self._refuse(error)

    def data_received(self, data: bytes) -> None:
        if self.is_closing:
            return
        self._decoder.feed(data)
        self._handle_requests()
        self._last_data_at = self._loop.time()
        if self._decoder.is_partial and self._idle_timer is None and not self.is_closing:
            self._idle_timer = self._loop.call_later(self._server.limits.idle_s, self._check_idle)

    def eof_received(self) -> bool:
        """The peer half-closed, or closed: running answers are still delivered until the kernel says it is gone."""
        self._has_sent_all = True
        try:
            self._decoder.feed_eof()
        except ProtocolError as error:
            self._refuse(error)
        self._server.watch_hangup(self)
        self.close_when_idle()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._set_stall_timer(False)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._server.disconnected(self)

    def pause_writing(self) -> None:
        self._is_paused = True
        if not self._has_sent_all:
            self._transport.pause_reading()
        self._set_stall_timer(True)

    def resume_writing(self) -> None:
        self._is_paused = False
        self._set_stall_timer(False)
        if not self._has_sent_all and not self.is_closing:
            self._transport.resume_reading()
        for stream in list(self.streams.values()):
            self.write_pending(stream)
        self._handle_requests()

    # --- the server's calls ----------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """Nothing more is written: it is said to be lost, was closed, or a write found the peer gone just now."""
        return self._is_closing or self._transport.is_closing()

    @property
    def fileno(self) -> int:
        return cast(socket.socket, self._transport.get_extra_info("socket")).fileno()

    @property
    def wants_text(self) -> bool:
        return self._decoder.wants_text

    def write_pending(self, stream: Stream, *, even_paused: bool = False) -> None:
        """Write what the stream has, unless the peer is behind: then it waits in the stream and merges."""
        if self.is_closing or (self._is_paused and not even_paused):
            return
        for event in stream.take():
            self.write(event)

    def write(self, event: Event) -> None:
        if self.is_closing:
            return
        if self._decoder.mode != "plain":
            self._transport.write(encode_frame(event))
        elif self._decoder.wants_text:
            self._write_text(event)
        else:
            self._transport.write(encode_line(event))
        if isinstance(event, Done | Error) and event.id in self.streams:
            self._server.delivered(self, self.streams[event.id])
            self.close_when_idle()

    def abort(self) -> None:
        """The peer is gone, or must go: drop the connection with whatever is unsent."""
        self._transport.abort()

    def close(self) -> None:
        """Write what is buffered, then close; a peer that does not read is dropped after the stall limit."""
        if not self._is_closing:
            self._is_closing = True
            self._transport.close()
            self._loop.call_later(self._server.limits.write_stall_s, self._transport.abort)

    def close_when_idle(self) -> None:
        """Close once nothing more can come: the peer has half-closed, or plain mode has answered what it got."""
        if self.streams or self._is_paused:
            return
        if self._has_sent_all or (self._decoder.mode == "plain" and self._decoder.num_requests):
            self.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _handle_requests(self) -> None:
        """Everything that is complete in the buffer, unless the peer is behind on its replies."""
        while not self._is_paused and not self.is_closing:
            try:
                request = self._decoder.next_request()
                if request is None:
                    break
                self._server.handle(self, request)
            except BadRequest as error:
                self._server.count_error(error)
                # NOTE: a live request's id on this error would read as that request's end.
                id = error.request_id if error.request_id not in self.streams else None
                self.write(Error.of(error, id=id))
                if self._decoder.wants_text:
                    self._refuse(None)
            except ProtocolError as error:
                if getattr(error, "is_fatal", True):
                    self._refuse(error)
                else:
                    self._server.count_error(error)
                    self.write(Error.of(error))
        self.close_when_idle()

    def _write_text(self, event: Event) -> None:
        """Plain mode's answer: only text, then the end mark; an error is one JSON line."""
        match event:
            case Delta():
                self._transport.write(event.text.encode())
            case Done():
                self._transport.write(f"\n{END_OF_RESPONSE}\n".encode())
            case Error():
                self._transport.write(encode_line(event))
            case DrainNotice() | _:
                pass

    def _refuse(self, error: ServiceError | None) -> None:
        """Tell the peer why, then close."""
        if error is not None:
            self._server.count_error(error)
            if self._decoder.mode == "plain":
                self._transport.write(encode_line(Error.of(error)))
            else:
                self._transport.write(encode_frame(Error.of(error)))
        self.close()

    def _set_stall_timer(self, wanted: bool) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if wanted:
            self._watch_stall(self._transport.get_write_buffer_size())

    def _check_idle(self) -> None:
        """A message that was begun and stands still holds memory and a file number for nothing."""
        self._idle_timer = None
        if self.is_closing or not self._decoder.is_partial:
            return
        idle_s = self._server.limits.idle_s
        left_s = self._last_data_at + idle_s - self._loop.time()
        if left_s > 0 or self.streams or self._is_paused:  # a running answer is not taken away for that
            self._idle_timer = self._loop.call_later(left_s if left_s > 0 else idle_s, self._check_idle)
            return
        self._server.reached("idle_s")
        self._refuse(BadFrame(f"the rest of the message did not come within {idle_s:g} s", is_fatal=True))

    def _watch_stall(self, unsent: int) -> None:
        self._stall_timer = self._loop.call_later(self._server.limits.write_stall_s, self._check_stall, unsent)

    def _check_stall(self, unsent_before: int) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent < unsent_before:  # slow, but reading
            self._watch_stall(unsent)
            return
        log.warning("connection %d: pid %d took nothing for %g s (timeout), closing", self.number, self.pid,
                    self._server.limits.write_stall_s)  # fmt: skip
        # The error waits behind what is unsent, once more as long: a peer that wakes up in that time gets it all.
        self._server.stalled(self, SlowClient("the peer stopped reading"))
        self.close()


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end, as the kernel knows them: unix(7), SO_PEERCRED."""
    size = struct.calcsize("3i")
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid, gid


def ask_send_buffer(sock: socket.socket, size_bytes: int) -> int:
    """Ask for a send buffer, forced where that is allowed; returns what the kernel granted, in its own count."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, size_bytes)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def check_peer(uid: int, gid: int, *, socket_gid: int) -> None:
    """Raises `Forbidden` unless the peer is us, root, or a member of the socket's group."""
    if uid in (os.geteuid(), 0) or gid == socket_gid:
        return
    import grp
    import pwd

    try:
        if socket_gid in os.getgrouplist(pwd.getpwuid(uid).pw_name, gid):
            return
        group = grp.getgrgid(socket_gid).gr_name
    except KeyError:
        group = str(socket_gid)
    raise Forbidden(f"uid {uid} may not use this socket: it is for its owner, root and group {group}")
