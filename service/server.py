"""What requests mean: chat, interrupt, edit, resume, health, stats, over the connections of one Unix socket.

Thread: the event loop. It knows the engine only by its contract, and no tensors, no prompts, no files.

Covers: phases, request ids, streams and their retention, deadlines, who may resume. Does not cover: the bytes
(`connection.py`), the queue and the model (the engine), the life of the process (`daemon.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from service import __version__
from service.connection import Connection, check_peer
from service.engine import base
from service.hangup import HangupWatch
from service.ledger import Ledger, Who
from service.metrics import Metrics
from service.protocol import (
    BadRequest,
    Busy,
    Chat,
    Draining,
    DrainNotice,
    Edit,
    Error,
    Forbidden,
    Health,
    HealthReport,
    Interrupt,
    NotReady,
    Request,
    Resume,
    ResumeExpired,
    ServiceError,
    Stats,
    StatsReport,
    UnknownRequest,
)
from service.spool import Record, Spool
from service.streams import Retained, Stream, with_last_message

log = logging.getLogger(__name__)

Phase = Literal["loading", "ready", "draining"]
_PHASES: tuple[Phase, ...] = ("loading", "ready", "draining")

# Finished requests of one connection that a late interrupt or edit may still name.
MAX_RECENT_CHATS = 64

# NOTE: asyncio listens again, with 100; beyond it connect(2) of a Unix socket fails at once with EAGAIN.
BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server. Seconds; counts."""

    resume_s: float = 30.0
    write_stall_s: float = 10.0
    max_connections: int = 4096
    max_requests_per_connection: int = 64
    idle_s: float = 30.0  # for the rest of a message that was begun
    max_new_tokens: int = 0  # 0: the context's
    max_deadline_s: float = 86_400.0


class Server:
    """`now` is a monotonic clock. `model` names what is loading until the engine knows better."""

    def __init__(
        self, listener: socket.socket, *, socket_gid: int, limits: Limits, metrics: Metrics, model: str,
        now: Callable[[], float], ledger: Ledger | None = None, spool: Spool | None = None,
    ) -> None:  # fmt: skip
        # shared
        self.limits = limits
        self.phase: Phase = "loading"
        self.progress = 0.0
        self._listener = listener
        self._socket_gid = socket_gid
        self._metrics = metrics
        self._ledger = ledger if ledger is not None else Ledger(metrics, now=now)
        self._model = self._ledger.model = model
        self._now = now
        self._started_at = now()
        self._loop = asyncio.get_running_loop()
        self._engine: base.Engine | None = None
        self._asyncio_server: asyncio.Server | None = None
        self._hangups = HangupWatch(self._loop)
        # connections
        self._connections: set[Connection] = set()
        self._connection_gone = asyncio.Event()
        self._num_connections = 0
        self._drain_deadline = 0.0
        # requests
        self._live: dict[str, Stream] = {}  # by resume token
        self._retained = Retained()
        self._spool = spool
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Accept connections; `health` is answered from here on."""
        self._asyncio_server = await self._loop.create_unix_server(
            self._new_connection, sock=self._listener, backlog=BACKLOG
        )

    async def listen_on(self, listener: socket.socket) -> None:
        """Accept connections on another socket instead; those that are open stay."""
        before, self._listener = self._asyncio_server, listener
        await self.start()
        if before is not None:
            before.close()

    def advance(self, phase: Phase) -> None:
        """To a later phase; phases never go back."""
        assert _PHASES.index(phase) >= _PHASES.index(self.phase), f"{self.phase} → {phase}"
        log.info("phase %s", phase)
        self.phase = phase

    def ready(self, engine: base.Engine) -> None:
        """The engine is loaded and warm."""
        self._engine = engine
        self.progress = 1.0
        self._metrics.watch(engine.stats)
        self._ledger.model = engine.info.model
        if self._spool is not None:
            self._loop.call_later(self.limits.resume_s, self._spool.expire)
        if self.phase == "loading":
            self.advance("ready")

    def begin_drain(self, deadline_s: float) -> None:
        """Refuse new work and tell every client how long running answers have."""
        self._drain_deadline = self._now() + deadline_s
        self.advance("draining")
        for connection in list(self._connections):
            connection.write(DrainNotice(deadline_s))

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether the last live request ended within the time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end_all(self, reason: base.Reason) -> None:
        """End every live request, keeping what was generated."""
        for stream in list(self._live.values()):
            self._cancel(stream, reason)

    async def save_answers(self) -> None:
        """Leave the other finished answers for the next daemon: of those who detach, or have not received the end."""
        if self._spool is None or self._engine is None:
            return
        kept = []
        for stream in [*self._live.values(), *self._retained]:
            wants_it = stream.chat.on_disconnect == "detach" or not stream.is_exhausted
            if stream.is_finished and stream.saved is None and wants_it:
                stream.take()  # numbered, it is replayed
                kept.append(self._record_of(stream))
        await asyncio.to_thread(self._spool.save, kept)

    async def close(self, flush_s: float) -> None:
        """Stop accepting, let buffered replies go out for at most `flush_s`, close."""
        if self._asyncio_server is not None:
            self._asyncio_server.close()
        for connection in list(self._connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(flush_s):
                while self._connections:
                    await self._connection_gone.wait()
        for connection in list(self._connections):
            connection.abort()
        self._hangups.close()

    # --- connections ------------------------------------------------------------------------------------------

    def _new_connection(self) -> Connection:
        self._num_connections += 1
        return Connection(self, self._num_connections)

    def connected(self, connection: Connection, gid: int, send_buffer_bytes: int) -> None:
        """Raises `Forbidden` or `Busy`: the peer is told and closed."""
        if self._num_connections == 1:
            log.info("send buffer granted: %d bytes a connection", send_buffer_bytes)
        self._connections.add(connection)
        self._metrics.connections.set(len(self._connections))
        check_peer(connection.uid, gid, socket_gid=self._socket_gid)
        if len(self._connections) > self.limits.max_connections:
            self.reached("max_connections")
            raise Busy(f"{self.limits.max_connections} connections are open already", retry_after_s=1.0)
        if self.phase == "draining":
            connection.write(DrainNotice(max(0.0, self._drain_deadline - self._now())))

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._metrics.connections.set(len(self._connections))
        self._hangups.remove(connection)
        for stream in connection.streams.values():
            stream.connection = None
            if stream.is_finished:
                self._retain(stream)
            elif stream.chat.on_disconnect == "cancel":
                self._cancel(stream, "interrupted")
            else:
                self._expire_later(stream)
        connection.streams.clear()
        self._connection_gone.set()
        self._connection_gone.clear()

    def stalled(self, connection: Connection, error: ServiceError) -> None:
        """The peer stopped reading: its requests end with the error, except those it asked to keep."""
        self.count_error(error)
        self.reached("write_stall_s")
        for stream in list(connection.streams.values()):
            if stream.chat.on_disconnect == "cancel":
                self._end(stream, base.Failed(error))
                connection.write_pending(stream, even_paused=True)

    def count_error(self, error: ServiceError) -> None:
        """The connection itself told its peer what was wrong."""
        self._metrics.errors.labels(error.code).inc()

    def reached(self, setting: str) -> None:
        """A limit has refused or cut something."""
        self._metrics.limits.labels(setting).inc()

    def watch_hangup(self, connection: Connection) -> None:
        """The peer has half-closed: learn of its full close without reading or writing."""
        self._hangups.add(connection)

    def delivered(self, connection: Connection, stream: Stream) -> None:
        """The stream's terminal event was written to this connection."""
        del connection.streams[stream.id]
        connection.recent_chats[stream.id] = stream.chat
        while len(connection.recent_chats) > MAX_RECENT_CHATS:
            connection.recent_chats.pop(next(iter(connection.recent_chats)))
        stream.connection = None
        self._ledger.settle(stream.resume_token)
        self._retain(stream)

    # --- requests ---------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: Request) -> None:
        """Carry out one request. A `ServiceError` becomes an `error` event here and nowhere else."""
        try:
            match request:
                case Chat():
                    self._chat(connection, request)
                case Interrupt():
                    self._interrupt(connection, request)
                case Edit():
                    self._edit(connection, request)
                case Resume():
                    self._resume(connection, request)
                case Health():
                    connection.write(self.health())
                case Stats():
                    metrics, text = self._metrics.snapshot()
                    connection.write(StatsReport(metrics, text))
        except ServiceError as error:
            self.count_error(error)
            id = request.new_id if isinstance(request, Edit) else getattr(request, "id", None)
            if isinstance(request, Chat | Edit):
                self._ledger.refuse(str(id), Who(connection.uid, connection.pid), error)
            # NOTE: a live request's id on this error would read as that request's end.
            connection.write(Error.of(error, id=None if id in connection.streams else id))

    def health(self) -> HealthReport:
        uptime_s = round(self._now() - self._started_at, 3)
        if self._engine is None:
            progress = round(self.progress, 3)
            return HealthReport(self.phase, progress, model=self._model, uptime_s=uptime_s, version=__version__)
        info = self._engine.info
        return HealthReport(
            self.phase, self.progress, info.model, info.family, info.engine, info.quantization, info.device,
            info.context_limit, info.slots, self._engine.num_running, self._engine.num_queued, uptime_s, __version__,
        )  # fmt: skip

    def _chat(self, connection: Connection, chat: Chat) -> None:
        self._ready_engine()
        self._check_new_id(connection, chat.id)
        self._check_wishes(chat)
        stream = Stream(chat, uid=connection.uid, resume_token=secrets.token_urlsafe(18))
        self._submit(connection, stream, None)
        self._attach(connection, stream)

    def _submit(self, connection: Connection, stream: Stream, saved: base.Saved | None) -> None:
        """Hand a request to the engine. Raises what the engine raises; then nothing has happened."""
        chat = stream.chat
        # The stream has no connection yet, so nothing is written before the request is known to be in.
        stream.key = self._ready_engine().submit(
            chat, owner=(connection.uid, connection.number), sink=partial(self._on_event, stream), saved=saved
        )
        who = Who(connection.uid, connection.pid)
        self._ledger.open(stream.resume_token, chat, who, stream.key, stream.num_delivered_tokens)
        self._live[stream.resume_token] = stream
        self._idle.clear()
        left_s = max(0.0, chat.deadline_s - (saved.spent_s if saved is not None else 0.0))
        stream.deadline_timer = self._loop.call_later(left_s, self._cancel, stream, "deadline")

    def _check_wishes(self, chat: Chat) -> None:
        """Refuse what the operator does not allow."""
        limits, num_tokens = self.limits, chat.params.get("max_new_tokens", 0)
        if limits.max_new_tokens and num_tokens > limits.max_new_tokens:
            self.reached("max_new_tokens")
            path = "$.params.max_new_tokens"
            raise BadRequest(f"{path}: at most {limits.max_new_tokens} are allowed here, got {num_tokens}", path=path)
        if chat.deadline_s > limits.max_deadline_s:
            self.reached("max_deadline_s")
            path = "$.deadline_s"
            raise BadRequest(f"{path}: at most {limits.max_deadline_s:g} s are allowed here", path=path)

    def _interrupt(self, connection: Connection, request: Interrupt) -> None:
        stream = connection.streams.get(request.id)
        if stream is not None:
            self._cancel(stream, "interrupted")
        elif request.id not in connection.recent_chats:
            raise UnknownRequest(f"no live request {request.id!r} on this connection")

    def _edit(self, connection: Connection, request: Edit) -> None:
        old = connection.streams.get(request.id)
        chat = old.chat if old is not None else connection.recent_chats.get(request.id)
        if chat is None:
            raise UnknownRequest(f"no request {request.id!r} on this connection")
        chat = with_last_message(chat, id=request.new_id, prompt=request.prompt)
        if old is not None and not old.has_started and not old.is_finished:
            self._ready_engine()
            self._check_new_id(connection, chat.id)
            self._cancel(old, "interrupted")  # first: it gives up its own place in the queue
        self._chat(connection, chat)
        if old is not None:
            self._cancel(old, "interrupted")

    def _resume(self, connection: Connection, request: Resume) -> None:
        stream = self._live.get(request.resume_token) or self._retained.get(request.resume_token)
        record = self._spool.get(request.resume_token) if stream is None and self._spool is not None else None
        if record is not None:
            stream = Stream.restored(
                record.chat, uid=record.uid, resume_token=record.resume_token, events=record.events,
                goes_on=record.saved is not None,
            )  # fmt: skip
        if stream is None:
            raise ResumeExpired("nothing to continue under this token: its time is over, or it never was")
        if connection.uid != stream.uid:
            raise Forbidden("another user started this request")
        id = request.id or stream.chat.id
        if connection.streams.get(id) is not stream:
            self._check_new_id(connection, id)
        replayed = stream.replay(request.after)
        if not replayed and stream.is_exhausted:
            raise ResumeExpired("the request has ended and all its events were received")
        if record is not None:
            self._take_over(connection, stream, record)
        self._metrics.resumes.inc()
        self._retained.remove(stream.resume_token)
        self._live[stream.resume_token] = stream
        self._idle.clear()
        self._move(stream, connection, id)
        for event in replayed:
            connection.write(replace(event, id=id))
        connection.write_pending(stream)

    def _take_over(self, connection: Connection, stream: Stream, record: Record) -> None:
        """Go on with an answer of the daemon before; its file goes once the engine has it."""
        assert self._spool is not None
        saved = record.saved
        if saved is not None:
            engine = self._ready_engine()
            if record.model != self._model_mark():  # its ids would mean something else
                raise ResumeExpired("another model has been loaded since")
            if len(saved.prompt) + len(saved.generated) >= engine.info.context_limit:
                raise ResumeExpired("the context is shorter than before")
            self._submit(connection, stream, saved)
        self._spool.remove(record.resume_token)

    def _model_mark(self) -> str:
        """What must be the same for an answer to go on."""
        assert self._engine is not None
        info = self._engine.info
        return f"{info.engine} {info.model} {info.family} {info.quantization}"

    def _move(self, stream: Stream, connection: Connection, id: str) -> None:
        """From now on this connection reads the stream, under this id."""
        before = stream.connection
        if before is not None:
            before.streams.pop(stream.id, None)
        if stream.expiry_timer is not None:
            stream.expiry_timer.cancel()
            stream.expiry_timer = None
        stream.id = id
        stream.connection = connection
        connection.streams[id] = stream
        if before is not None and before is not connection:
            before.close_when_idle()

    # --- streams ----------------------------------------------------------------------------------------------

    def _attach(self, connection: Connection, stream: Stream) -> None:
        stream.connection = connection
        connection.streams[stream.id] = stream
        connection.write_pending(stream)

    def _on_event(self, stream: Stream, event: base.Event) -> None:
        """The engine's sink. Called once a step and request."""
        now = self._now()
        stream.put(event, now)
        self._ledger.record(stream.resume_token, event)
        if isinstance(event, base.Finished | base.Failed):
            if stream.deadline_timer is not None:
                stream.deadline_timer.cancel()
        elif (due_at := stream.due_at()) is not None and not stream.is_timed:
            stream.is_timed = True
            self._loop.call_later(due_at - now, self._let_go, stream)
        if stream.saved is not None and self._spool is not None:
            self._keep(stream, self._spool)
        self._write(stream)

    def _keep(self, stream: Stream, spool: Spool) -> None:
        """Leave a drained answer for the next daemon, and only then tell its end: whoever was told can go on.

        NOTE: the one file that the loop writes itself, a few tens of kilobytes into the page cache. A worker would
        leave time in which the client knows and the file is not there, should the daemon be killed in its drain.
        """
        events = stream.take()
        spool.save([self._record_of(stream)])
        if stream.connection is not None:
            for event in events:
                stream.connection.write(event)

    def _record_of(self, stream: Stream) -> Record:
        return Record(
            stream.resume_token, stream.uid, self._model_mark(), self._now(), stream.chat, stream.events, stream.saved
        )

    def _write(self, stream: Stream) -> None:
        if stream.connection is not None:
            stream.connection.write_pending(stream)
        elif stream.is_finished:
            self._retain(stream)

    def _let_go(self, stream: Stream) -> None:
        now = self._now()
        stream.is_timed = False
        stream.let_go(now)
        if (due_at := stream.due_at()) is not None:
            stream.is_timed = True
            self._loop.call_later(due_at - now, self._let_go, stream)
        self._write(stream)

    def _cancel(self, stream: Stream, reason: base.Reason) -> None:
        if not stream.is_finished and self._engine is not None:
            self._ledger.cancel(stream.resume_token)
            self._engine.cancel(stream.key, reason)

    def _end(self, stream: Stream, end: base.Failed) -> None:
        """End a request from this side; what the engine still says of it is ignored."""
        if not stream.is_finished:
            self._cancel(stream, "interrupted")
            self._on_event(stream, end)

    def _expire_later(self, stream: Stream) -> None:
        """Nobody reads it: it has this long to be taken up again."""
        if stream.expiry_timer is not None:
            stream.expiry_timer.cancel()
        stream.expiry_timer = self._loop.call_later(self.limits.resume_s, self._expire, stream)

    def _expire(self, stream: Stream) -> None:
        self._retained.remove(stream.resume_token)
        self._cancel(stream, "interrupted")

    def _retain(self, stream: Stream) -> None:
        """A finished request is no longer live, but can be fetched for a while."""
        if self._live.pop(stream.resume_token, None) is None:
            return
        self._retained.add(stream)
        self._expire_later(stream)
        self._loop.call_later(self.limits.resume_s, self._ledger.settle, stream.resume_token)
        if not self._live:
            self._idle.set()

    def _ready_engine(self) -> base.Engine:
        if self.phase == "draining":
            raise Draining("the service is stopping", retry_after_s=max(1.0, self._drain_deadline - self._now()))
        if self._engine is None:
            raise NotReady(f"the model is loading ({self.progress:.0%})", retry_after_s=2.0)
        return self._engine

    def _check_new_id(self, connection: Connection, id: str) -> None:
        if id in connection.streams:
            raise BadRequest(f"$.id: {id!r} is the id of a live request of this connection", path="$.id")
        limit = self.limits.max_requests_per_connection
        if len(connection.streams) >= limit:
            self.reached("max_requests_per_connection")
            raise Busy(f"this connection has {limit} live requests already", retry_after_s=1.0)
