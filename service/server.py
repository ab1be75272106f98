"""The service on one Unix socket: its phases, its connections, and where each request goes.

Thread: the event loop. It knows the engine only by its contract, and no tensors, no prompts, no files.

Covers: who may connect, health, stats, errors. Does not cover: what chat, interrupt, edit and resume mean (`desk.py`),
the streams while and after they live (`shelf.py`), the bytes (`connection.py`), the queue and the model (the engine),
the life of the process (`daemon.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from service import __version__
from service.connection import Connection, check_peer
from service.desk import Desk, who
from service.engine import base
from service.hangup import HangupWatch
from service.ledger import Ledger
from service.metrics import Metrics
from service.protocol import (
    Busy,
    Chat,
    Draining,
    DrainNotice,
    Edit,
    Error,
    Health,
    HealthReport,
    Interrupt,
    NotReady,
    Request,
    Resume,
    ServiceError,
    Stats,
    StatsReport,
)
from service.shelf import Shelf
from service.spool import Spool
from service.streams import Stream

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
        self.shelf = Shelf(self._ledger, spool, resume_s=limits.resume_s, now=now)
        self._desk = Desk(self.shelf, limits=limits, metrics=metrics, ready_engine=self._ready_engine)

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
        self.shelf.ready(engine)
        if self.phase == "loading":
            self.advance("ready")

    def begin_drain(self, deadline_s: float) -> None:
        """Refuse new work and tell every client how long running answers have."""
        self._drain_deadline = self._now() + deadline_s
        self.advance("draining")
        for connection in list(self._connections):
            connection.write(DrainNotice(deadline_s))

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
            self.shelf.unread(stream)
        connection.streams.clear()
        self._connection_gone.set()
        self._connection_gone.clear()

    def stalled(self, connection: Connection, error: ServiceError) -> None:
        """The peer stopped reading: its requests end with the error, except those it asked to keep."""
        self.count_error(error)
        self.reached("write_stall_s")
        for stream in list(connection.streams.values()):
            if stream.chat.on_disconnect == "cancel":
                self.shelf.end(stream, base.Failed(error))
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
        self.shelf.delivered(stream)

    # --- requests ---------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: Request) -> None:
        """Carry out one request. A `ServiceError` becomes an `error` event here and nowhere else."""
        try:
            match request:
                case Chat():
                    self._desk.chat(connection, request)
                case Interrupt():
                    self._desk.interrupt(connection, request)
                case Edit():
                    self._desk.edit(connection, request)
                case Resume():
                    self._desk.resume(connection, request)
                case Health():
                    connection.write(self.health())
                case Stats():
                    metrics, text = self._metrics.snapshot()
                    connection.write(StatsReport(metrics, text))
        except ServiceError as error:
            self.count_error(error)
            id = request.new_id if isinstance(request, Edit) else getattr(request, "id", None)
            if isinstance(request, Chat | Edit):
                self._ledger.refuse(str(id), who(connection), error)
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

    def _ready_engine(self) -> base.Engine:
        if self.phase == "draining":
            raise Draining("the service is stopping", retry_after_s=max(1.0, self._drain_deadline - self._now()))
        if self._engine is None:
            raise NotReady(f"the model is loading ({self.progress:.0%})", retry_after_s=2.0)
        return self._engine
