"""What the requests about answers mean: chat, interrupt, edit, resume.

Thread: the event loop. It decides what a client may have and refuses the rest by raising; the streams themselves are
the shelf's, what an error becomes is the server's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from service.engine import base
from service.ledger import Who
from service.metrics import Metrics
from service.protocol import (
    BadRequest,
    Busy,
    Chat,
    Edit,
    Forbidden,
    Interrupt,
    Resume,
    ResumeExpired,
    UnknownRequest,
)
from service.shelf import Shelf
from service.streams import Stream, with_last_message

if TYPE_CHECKING:
    from service.connection import Connection
    from service.server import Limits


class Desk:
    """`ready_engine` raises while there is no engine for new work."""

    def __init__(
        self, shelf: Shelf, *, limits: Limits, metrics: Metrics, ready_engine: Callable[[], base.Engine]
    ) -> None:
        self._shelf = shelf
        self._limits = limits
        self._metrics = metrics
        self._ready_engine = ready_engine

    # --- requests ---------------------------------------------------------------------------------------------

    def chat(self, connection: Connection, chat: Chat) -> None:
        engine = self._ready_engine()
        self._check_new_id(connection, chat.id)
        self._check_wishes(chat)
        stream = Stream(chat, uid=connection.uid, resume_token=secrets.token_urlsafe(18))
        self._shelf.submit(engine, stream, who(connection), (connection.uid, connection.number))
        self._attach(connection, stream)

    def interrupt(self, connection: Connection, request: Interrupt) -> None:
        stream = connection.streams.get(request.id)
        if stream is not None:
            self._shelf.cancel(stream, "interrupted")
        elif request.id not in connection.recent_chats:
            raise UnknownRequest(f"no live request {request.id!r} on this connection")

    def edit(self, connection: Connection, request: Edit) -> None:
        old = connection.streams.get(request.id)
        chat = old.chat if old is not None else connection.recent_chats.get(request.id)
        if chat is None:
            raise UnknownRequest(f"no request {request.id!r} on this connection")
        chat = with_last_message(chat, id=request.new_id, prompt=request.prompt)
        if old is not None and not old.has_started and not old.is_finished:
            self._ready_engine()
            self._check_new_id(connection, chat.id)
            self._shelf.cancel(old, "interrupted")  # first: it gives up its own place in the queue
        self.chat(connection, chat)
        if old is not None:
            self._shelf.cancel(old, "interrupted")

    def resume(self, connection: Connection, request: Resume) -> None:
        stream, record = self._shelf.find(request.resume_token)
        if connection.uid != stream.uid:
            raise Forbidden("another user started this request")
        id = request.id or stream.chat.id
        if connection.streams.get(id) is not stream:
            self._check_new_id(connection, id)
        replayed = stream.replay(request.after)
        if not replayed and stream.is_exhausted:
            raise ResumeExpired("the request has ended and all its events were received")
        if record is not None and record.saved is not None:
            engine = self._ready_engine()
            self._shelf.check_model(engine, record, record.saved)
            self._shelf.submit(engine, stream, who(connection), (connection.uid, connection.number), record.saved)
        self._metrics.resumes.inc()
        self._shelf.take_up(stream, record)
        self._move(stream, connection, id)
        for event in replayed:
            connection.write(replace(event, id=id))
        connection.write_pending(stream)

    # --- who reads --------------------------------------------------------------------------------------------

    def _move(self, stream: Stream, connection: Connection, id: str) -> None:
        """From now on this connection reads the stream, under this id."""
        before = stream.connection
        if before is not None:
            before.streams.pop(stream.id, None)
        stream.id = id
        stream.connection = connection
        connection.streams[id] = stream
        if before is not None and before is not connection:
            before.close_when_idle()

    def _attach(self, connection: Connection, stream: Stream) -> None:
        stream.connection = connection
        connection.streams[stream.id] = stream
        connection.write_pending(stream)

    # --- what is allowed --------------------------------------------------------------------------------------

    def _check_wishes(self, chat: Chat) -> None:
        """Refuse what the operator does not allow."""
        limits, num_tokens = self._limits, chat.params.get("max_new_tokens", 0)
        if limits.max_new_tokens and num_tokens > limits.max_new_tokens:
            self._reached("max_new_tokens")
            path = "$.params.max_new_tokens"
            raise BadRequest(f"{path}: at most {limits.max_new_tokens} are allowed here, got {num_tokens}", path=path)
        if chat.deadline_s > limits.max_deadline_s:
            self._reached("max_deadline_s")
            path = "$.deadline_s"
            raise BadRequest(f"{path}: at most {limits.max_deadline_s:g} s are allowed here", path=path)

    def _check_new_id(self, connection: Connection, id: str) -> None:
        if id in connection.streams:
            raise BadRequest(f"$.id: {id!r} is the id of a live request of this connection", path="$.id")
        limit = self._limits.max_requests_per_connection
        if len(connection.streams) >= limit:
            self._reached("max_requests_per_connection")
            raise Busy(f"this connection has {limit} live requests already", retry_after_s=1.0)

    def _reached(self, setting: str) -> None:
        """A limit has refused something."""
        self._metrics.limits.labels(setting).inc()


def who(connection: Connection) -> Who:
    return Who(connection.uid, connection.pid)
