"""Clients of the daemon: `Client` (blocking) and `AsyncClient` (asyncio) over one sans-I/O `Session`.

    with Client() as client:
        for event in client.chat("你好"):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

An `Answer` yields the request's events up to `Done`; an `error` event is raised as its `ServiceError`, a connection
that breaks as `ConnectionLost`. Leaving an answer's `with` block early interrupts it. An object of this module
belongs to one thread (`Client`) or one event loop (`AsyncClient`).
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from service.protocol import (
    Accepted,
    Chat,
    Delta,
    Done,
    DrainNotice,
    Edit,
    Error,
    Event,
    EventDecoder,
    Health,
    HealthReport,
    Interrupt,
    Merge,
    Message,
    Request,
    Resume,
    Stats,
    StatsReport,
    encode_frame,
)

DEFAULT_SOCKET_PATH = "/tmp/chatglm.sock"
_READ_BYTES = 64 * 1024
Reply = TypeVar("Reply", HealthReport, StatsReport)


class ConnectionLost(ConnectionError):
    """The daemon cannot be reached, or went away before the answer ended."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds to wait: for the connection, and for anything at all while a reply is due (None: for ever)."""

    connect_s: float = 5.0
    idle_s: float | None = 120.0


class Mailbox:
    """One request's events on the client's side. A reader that falls behind finds adjacent deltas merged."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.resume_token = ""
        self.last_seq = 0
        self.is_finished = False
        self._events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Delta) and isinstance(last, Delta):
            text, tokens = last.text + event.text, last.tokens + event.tokens
            self._events[-1] = replace(event, text=text, tokens=tokens)
        else:
            self._events.append(event)

    def take(self) -> Event | None:
        """The next event, or None until more bytes come. Raises the `ServiceError` of an `error` event."""
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, Error):
            self.is_finished = True
            raise event.to_exception()
        self.last_seq = getattr(event, "seq", self.last_seq)
        self.is_finished = isinstance(event, Done)
        if isinstance(event, Accepted):
            self.resume_token = event.resume_token
        return event


class Session:
    """What both clients share: ids, routing of events to their requests, replies in order. No I/O."""

    def __init__(self) -> None:
        self._decoder = EventDecoder()
        self._mailboxes: dict[str, Mailbox] = {}
        self._replies: deque[HealthReport | StatsReport] = deque()
        self._numbers = itertools.count(1)
        self._refusal: Error | None = None
        self.drain_notice: DrainNotice | None = None

    def open(self, request: Chat | Edit | Resume) -> tuple[Mailbox, bytes]:
        """Register a request that will have an answer; returns its mailbox and the bytes to send."""
        id = request.new_id if isinstance(request, Edit) else request.id
        assert id is not None, "a resume through a session names its id"
        if id in self._mailboxes and not self._mailboxes[id].is_finished:
            raise ValueError(f"request id {id!r} is already in use on this connection")
        data = encode_frame(request)
        self._mailboxes[id] = Mailbox(id)
        return self._mailboxes[id], data

    def forget(self, mailbox: Mailbox) -> None:
        if self._mailboxes.get(mailbox.id) is mailbox:
            del self._mailboxes[mailbox.id]

    def new_id(self) -> str:
        return f"r{next(self._numbers)}"

    def feed(self, data: bytes) -> None:
        """Bytes from the daemon. Raises `ProtocolError` when they are not the protocol."""
        self._decoder.feed(data)
        while (event := self._decoder.next_event()) is not None:
            if isinstance(event, HealthReport | StatsReport):
                self._replies.append(event)
            elif isinstance(event, DrainNotice):
                self.drain_notice = event
            elif event.id is None:
                self._refusal = event
            elif event.id in self._mailboxes:
                self._mailboxes[event.id].put(event)

    def take_reply(self) -> HealthReport | StatsReport | None:
        return self._replies.popleft() if self._replies else None

    def check_refusal(self) -> None:
        """Raise what the daemon said about the connection as a whole, once."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal.to_exception()


def make_chat(
    prompt: str | Sequence[Message | dict[str, str]],
    *,
    id: str,
    priority: int = 0,
    deadline_s: float = 60.0,
    on_disconnect: str = "cancel",
    merge_ms: int = 0,
    **params: Any,
) -> Chat:
    """A `Chat` from a question or a list of messages; further keywords are sampling parameters.

    The daemon checks the values; here only their form is given.
    """
    if isinstance(prompt, str):
        messages: tuple[Message, ...] = (Message("user", prompt),)
    else:
        messages = tuple(turn if isinstance(turn, Message) else Message(**turn) for turn in prompt)  # type: ignore[arg-type]
    return Chat(
        id, messages, params, priority=priority, deadline_s=deadline_s,
        on_disconnect=on_disconnect, merge=Merge(merge_ms),  # type: ignore[arg-type]
    )  # fmt: skip


# --- Blocking --------------------------------------------------------------------------------------------------


class Answer:
    """The events of one request, as a blocking iterator that ends after `Done`."""

    def __init__(self, client: Client, mailbox: Mailbox) -> None:
        self._client = client
        self.mailbox = mailbox

    @property
    def id(self) -> str:
        return self.mailbox.id

    def __iter__(self) -> Iterator[Event]:
        while not self.mailbox.is_finished:
            yield self._client.wait_event(self.mailbox)
        self._client.session.forget(self.mailbox)

    def text(self) -> str:
        """The whole answer's text."""
        return "".join(event.text for event in self if isinstance(event, Delta))

    def interrupt(self) -> None:
        if not self.mailbox.is_finished:
            self._client.send(Interrupt(self.id))

    def edit(self, prompt: str) -> Answer:
        """Stop this answer and ask again with the last user message replaced."""
        return self._client.open(Edit(self.id, self._client.session.new_id(), prompt))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.mailbox.is_finished and not isinstance(error, ConnectionLost):
            self.interrupt()
            self._client.session.forget(self.mailbox)


class Client:
    """A blocking connection to the daemon. Several answers may run on it; they are read in turn."""

    def __init__(self, path: str = DEFAULT_SOCKET_PATH, *, timeouts: Timeouts | None = None) -> None:
        self.session = Session()
        self._timeouts = timeouts or Timeouts()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(self._timeouts.connect_s)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise ConnectionLost(f"cannot reach the daemon at {path}: {error.strerror or error}") from error
        self._socket.settimeout(self._timeouts.idle_s)

    def chat(
        self, prompt: str | Sequence[Message | dict[str, str]], *, id: str | None = None, **options: Any
    ) -> Answer:
        """Start an answer. `options` are those of `make_chat`: priority, deadline_s, … and sampling parameters."""
        return self.open(make_chat(prompt, id=id or self.session.new_id(), **options))

    def resume(self, resume_token: str, after: int = 0) -> Answer:
        """Go on with an answer: its events with `seq` > `after`."""
        return self.open(Resume(resume_token, after, id=self.session.new_id()))

    def health(self) -> HealthReport:
        return self._ask(Health(), HealthReport)

    def stats(self) -> StatsReport:
        return self._ask(Stats(), StatsReport)

    def interrupt(self, id: str) -> None:
        self.send(Interrupt(id))

    def open(self, request: Chat | Edit | Resume) -> Answer:
        mailbox, data = self.session.open(request)
        self._send_bytes(data)
        return Answer(self, mailbox)

    def send(self, request: Request) -> None:
        self._send_bytes(encode_frame(request))

    def wait_event(self, mailbox: Mailbox) -> Event:
        while (event := mailbox.take()) is None:
            self._pump()
        return event

    def close(self) -> None:
        self._socket.close()

    def _ask(self, request: Request, kind: type[Reply]) -> Reply:
        self.send(request)
        while (reply := self.session.take_reply()) is None:
            self._pump()
        assert isinstance(reply, kind)
        return reply

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLost(f"the daemon went away: {error.strerror or error}") from error

    def _pump(self) -> None:
        """Read once, blocking, and route what came."""
        self.session.check_refusal()
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            raise ConnectionLost(f"the daemon said nothing for {self._timeouts.idle_s} s") from None
        except OSError as error:
            raise ConnectionLost(f"the daemon went away: {error.strerror or error}") from error
        if not data:
            raise ConnectionLost("the daemon closed the connection")
        self.session.feed(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- asyncio ---------------------------------------------------------------------------------------------------


class AsyncAnswer:
    """The events of one request, as an asynchronous iterator that ends after `Done`."""

    def __init__(self, client: AsyncClient, mailbox: Mailbox) -> None:
        self._client = client
        self.mailbox = mailbox

    @property
    def id(self) -> str:
        return self.mailbox.id

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self.mailbox.is_finished:
            yield await self._client.wait_event(self.mailbox)
        self._client.session.forget(self.mailbox)

    async def text(self) -> str:
        """The whole answer's text."""
        return "".join([event.text async for event in self if isinstance(event, Delta)])

    def interrupt(self) -> None:
        if not self.mailbox.is_finished:
            self._client.send(Interrupt(self.id))

    def edit(self, prompt: str) -> AsyncAnswer:
        """Stop this answer and ask again with the last user message replaced."""
        return self._client.open(Edit(self.id, self._client.session.new_id(), prompt))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.mailbox.is_finished:
            self.interrupt()
            self._client.session.forget(self.mailbox)


class AsyncClient:
    """A connection to the daemon for asyncio; made by `AsyncClient.connect`. Any number of answers may run on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeouts: Timeouts) -> None:
        self.session = Session()
        self._timeouts = timeouts
        self._reader = reader
        self._writer = writer
        self._news = asyncio.Event()
        self._lost: Exception | None = None
        self._pump_task = asyncio.create_task(self._pump())

    @classmethod
    async def connect(cls, path: str = DEFAULT_SOCKET_PATH, *, timeouts: Timeouts | None = None) -> Self:
        """Raises `ConnectionLost` when the daemon cannot be reached."""
        timeouts = timeouts or Timeouts()
        try:
            async with asyncio.timeout(timeouts.connect_s):
                reader, writer = await asyncio.open_unix_connection(path)
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"cannot reach the daemon at {path}: {error or 'timed out'}") from error
        return cls(reader, writer, timeouts)

    def chat(
        self, prompt: str | Sequence[Message | dict[str, str]], *, id: str | None = None, **options: Any
    ) -> AsyncAnswer:
        """Start an answer. `options` are those of `make_chat`: priority, deadline_s, … and sampling parameters."""
        return self.open(make_chat(prompt, id=id or self.session.new_id(), **options))

    def resume(self, resume_token: str, after: int = 0) -> AsyncAnswer:
        """Go on with an answer: its events with `seq` > `after`."""
        return self.open(Resume(resume_token, after, id=self.session.new_id()))

    async def health(self) -> HealthReport:
        return await self._ask(Health(), HealthReport)

    async def stats(self) -> StatsReport:
        return await self._ask(Stats(), StatsReport)

    def interrupt(self, id: str) -> None:
        self.send(Interrupt(id))

    def open(self, request: Chat | Edit | Resume) -> AsyncAnswer:
        mailbox, data = self.session.open(request)
        self._writer.write(data)
        return AsyncAnswer(self, mailbox)

    def send(self, request: Request) -> None:
        self._writer.write(encode_frame(request))

    async def wait_event(self, mailbox: Mailbox) -> Event:
        while (event := mailbox.take()) is None:
            await self._wait_news()
        return event

    async def aclose(self) -> None:
        """Close at once. The daemon ends whatever still runs on this connection, and whoever waits here is told."""
        self._pump_task.cancel()
        self._lost = self._lost or ConnectionLost("the connection was closed here")
        self._news.set()
        self._writer.transport.abort()
        await asyncio.gather(self._pump_task, return_exceptions=True)

    async def _ask(self, request: Request, kind: type[Reply]) -> Reply:
        self.send(request)
        while (reply := self.session.take_reply()) is None:
            await self._wait_news()
        assert isinstance(reply, kind)
        return reply

    async def _wait_news(self) -> None:
        self.session.check_refusal()
        if self._lost is not None:
            raise ConnectionLost(str(self._lost)) from self._lost
        try:
            async with asyncio.timeout(self._timeouts.idle_s):
                await self._news.wait()
        except TimeoutError:
            raise ConnectionLost(f"the daemon said nothing for {self._timeouts.idle_s} s") from None

    async def _pump(self) -> None:
        """Read for ever, route what comes, wake whoever waits."""
        while self._lost is None:
            try:
                data = await self._reader.read(_READ_BYTES)
                if data:
                    self.session.feed(data)
                else:
                    self._lost = ConnectionLost("the daemon closed the connection")
            except OSError as error:
                self._lost = ConnectionLost(f"the daemon went away: {error.strerror or error}")
            except Exception as error:  # not the protocol: told to every waiter below
                self._lost = error
            news, self._news = self._news, asyncio.Event()
            news.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
