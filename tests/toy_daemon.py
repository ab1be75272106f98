"""A daemon whose answers are scripts, for the tests of its clients: the real protocol, no model.

`ToyDaemon` lives on one event loop. `DaemonThread` gives it a thread of its own, for tests that block.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal, TypeVar

from service.protocol import (
    Accepted,
    Chat,
    Delta,
    Done,
    DrainNotice,
    Error,
    Event,
    Health,
    HealthReport,
    Interrupt,
    NotReady,
    Queued,
    RequestDecoder,
    ServiceError,
    Started,
    Timing,
    Usage,
    encode_frame,
)

T = TypeVar("T")


class Talk:
    """One request. A script calls its methods; `end` says how it ended: done, failed, interrupted or gone."""

    def __init__(self, chat: Chat, write: Callable[[Event], None], daemon: ToyDaemon) -> None:
        self.chat = chat
        self.end = ""
        self.tokens = 0
        self.daemon = daemon
        self.go_on = asyncio.Event()  # for scripts that wait for the test
        self.task: asyncio.Task[None] | None = None
        self._write = write
        self._seq = 0

    @property
    def prompt(self) -> str:
        return self.chat.messages[-1].content

    def accepted(self, position: int = 0, start_s: float = 0.0) -> None:
        self._write(Accepted(self.chat.id, self._next(), f"token-{id(self)}", position, start_s))

    def queued(self, position: int, start_s: float = 0.0) -> None:
        self._write(Queued(self.chat.id, self._next(), position, start_s))

    def started(self, prompt_tokens: int = 7, limit: int = 2048, dropped: tuple[int, ...] = ()) -> None:
        self._write(Started(self.chat.id, self._next(), prompt_tokens, 0, limit, dropped))

    def delta(self, text: str, tokens: int = 1) -> None:
        self.tokens += tokens
        self._write(Delta(self.chat.id, self._next(), text, tokens, 10.0 * self.tokens))

    def done(self, reason: Literal["stop", "length", "interrupted", "deadline", "drained"] = "stop") -> None:
        if self.end:
            return
        self.end = "interrupted" if reason == "interrupted" else "done"
        usage, timing = Usage(7, 0, self.tokens), Timing(0.0, 10.0, 10.0 * self.tokens, 80.0)
        self._write(Done(self.chat.id, self._next(), reason, usage, timing))

    def fail(self, error: ServiceError) -> None:
        self.end = "failed"
        self._write(Error.of(error, id=self.chat.id))

    def say(self, *pieces: str) -> None:
        """A whole answer at once."""
        self.accepted()
        self.started()
        for piece in pieces:
            self.delta(piece)
        self.done()

    def _next(self) -> int:
        self._seq += 1
        return self._seq


Script = Callable[[Talk], Awaitable[None]]


async def say_hello(talk: Talk) -> None:
    talk.say("你好", "，", "世界")


class ToyDaemon:
    """`talks` are all requests so far. A connection that breaks ends its talks as gone."""

    def __init__(self, path: str, script: Script = say_hello) -> None:
        self.path = path
        self.script = script
        self.talks: list[Talk] = []
        self.num_connections = 0
        self.report = HealthReport(
            "ready", 1.0, "chatglm3-6b", "chatglm3", "local", "int4", "cpu", 2048, slots=3, version="0"
        )
        self.reports: list[HealthReport] = []  # said first, one a question
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def kill(self) -> None:
        """As if the process had died: every connection breaks, and no socket answers."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        await self.until(lambda: not self.num_connections)

    async def until(self, is_so: Callable[[], bool], bound_s: float = 10.0) -> None:
        """Wait for a state of the daemon. Raises `TimeoutError`."""
        async with asyncio.timeout(bound_s):
            while not is_so():
                await self._changed.wait()

    def drain(self, deadline_s: float) -> None:
        for writer in self._writers:
            writer.write(encode_frame(DrainNotice(deadline_s)))

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        self.notify()
        decoder = RequestDecoder()
        live: dict[str, Talk] = {}

        def write(event: Event) -> None:
            writer.write(encode_frame(event))
            self.notify()

        with suppress(ConnectionError):
            while data := await reader.read(65536):
                decoder.feed(data)
                while (request := decoder.next_request()) is not None:
                    self._handle(request, live, write)
        for talk in live.values():
            if not talk.end:
                talk.end = "gone"
                self._cancel(talk)
        self._writers.discard(writer)
        self.num_connections -= 1
        writer.close()
        self.notify()

    def _handle(self, request: Any, live: dict[str, Talk], write: Callable[[Event], None]) -> None:
        if isinstance(request, Health):
            write(self.reports.pop(0) if self.reports else self.report)
        elif isinstance(request, Interrupt):
            talk = live[request.id]
            self._cancel(talk)
            talk.done("interrupted")
        elif isinstance(request, Chat):
            if self.reports or self.report.phase == "loading":
                write(Error.of(NotReady("the model is loading", retry_after_s=2.0), id=request.id))
                return
            talk = live[request.id] = Talk(request, write, self)
            self.talks.append(talk)
            talk.task = asyncio.create_task(self._run(talk))
            self.notify()

    async def _run(self, talk: Talk) -> None:
        await self.script(talk)
        self.notify()

    @staticmethod
    def _cancel(talk: Talk) -> None:
        if talk.task is not None:
            talk.task.cancel()


class DaemonThread:
    """A `ToyDaemon` on a thread of its own. Attributes that are only read may be read from any thread."""

    def __init__(self, path: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="toy daemon", daemon=True)
        self._thread.start()
        self.toy = self.run(self._make(path))

    async def _make(self, path: str) -> ToyDaemon:
        toy = ToyDaemon(path)
        await toy.start()
        return toy

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def until(self, is_so: Callable[[], bool], bound_s: float = 10.0) -> None:
        self.run(self.toy.until(is_so, bound_s))

    def call(self, action: Callable[[], object]) -> None:
        """Run something on the daemon's thread."""

        async def act() -> None:
            action()
            self.toy.notify()

        self.run(act())

    def close(self) -> None:
        self.run(self.toy.kill())
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    @staticmethod
    async def _end_tasks() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
