"""A daemon whose answers are scripts, for the tests of its clients: the real protocol, no model.

`ToyDaemon` lives on one event loop. `DaemonThread` gives it a thread of its own, for tests that block.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

from service.protocol import (
    Accepted,
    Busy,
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
    Resume,
    ResumeExpired,
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
        self.id = chat.id  # its name on the connection that reads it
        self.token = f"token-{id(self)}"
        self.end = ""
        self.tokens = 0
        self.daemon = daemon
        self.go_on = asyncio.Event()  # for scripts that wait for the test
        self.task: asyncio.Task[None] | None = None
        self.send = write
        self.log: list[Any] = []

    @property
    def prompt(self) -> str:
        return self.chat.messages[-1].content

    def accepted(self, position: int = 0, start_s: float = 0.0) -> None:
        self._write(Accepted(self.id, self._next(), self.token, position, start_s))

    def queued(self, position: int, start_s: float = 0.0) -> None:
        self._write(Queued(self.id, self._next(), position, start_s))

    def started(self, prompt_tokens: int = 7, limit: int = 2048, dropped: tuple[int, ...] = ()) -> None:
        self._write(Started(self.id, self._next(), prompt_tokens, 0, limit, dropped))

    def delta(self, text: str, tokens: int = 1) -> None:
        self.tokens += tokens
        self._write(Delta(self.id, self._next(), text, tokens, 10.0 * self.tokens))

    def done(self, reason: Literal["stop", "length", "interrupted", "deadline", "drained"] = "stop") -> None:
        if self.end:
            return
        self.end = "interrupted" if reason == "interrupted" else "done"
        usage, timing = Usage(7, 0, self.tokens), Timing(0.0, 10.0, 10.0 * self.tokens, 80.0)
        self._write(Done(self.id, self._next(), reason, usage, timing))

    def fail(self, error: ServiceError) -> None:
        self.end = "failed"
        self._write(Error.of(error, id=self.id))

    def say(self, *pieces: str) -> None:
        """A whole answer at once."""
        self.accepted()
        self.started()
        for piece in pieces:
            self.delta(piece)
        self.done()

    def resume(self, id: str, after: int, write: Callable[[Event], None]) -> None:
        """Another connection reads it from now on."""
        self.id, self.send = id, write
        for event in self.log[after:]:
            write(replace(event, id=id))

    def _write(self, event: Any) -> None:
        self.log.append(event)
        self.send(event)

    def _next(self) -> int:
        return len(self.log) + 1


Script = Callable[[Talk], Awaitable[None]]


async def say_hello(talk: Talk) -> None:
    talk.say("你好", "，", "世界")


class ToyDaemon:
    """`talks` are all requests so far. A connection that breaks ends its talks as gone, if they do not detach."""

    def __init__(self, path: str, script: Script = say_hello) -> None:
        self.path = path
        self.script = script
        self.talks: list[Talk] = []
        self.num_connections = 0
        self.report = HealthReport(
            "ready", 1.0, "chatglm3-6b", "chatglm3", "local", "int4", "cpu", 2048, slots=3, version="0"
        )
        self.reports: list[HealthReport] = []  # said first, one a question
        self.num_busy = 0  # resumes that are refused before one is taken
        self._tokens: dict[str, Talk] = {}
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
        for talk in self.talks:
            self._lose(talk)
        self._tokens.clear()
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        await self.cut()

    async def cut(self) -> None:
        """Every connection breaks, and the daemon lives."""
        for writer in self._writers:
            writer.transport.abort()
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
            if talk.chat.on_disconnect == "cancel":
                self._lose(talk)
        self._writers.discard(writer)
        self.num_connections -= 1
        writer.close()
        self.notify()

    def _handle(self, request: Any, live: dict[str, Talk], write: Callable[[Event], None]) -> None:
        if isinstance(request, Health):
            write(self.reports.pop(0) if self.reports else self.report)
        elif isinstance(request, Interrupt):
            if (talk := live.get(request.id)) is not None:
                self._cancel(talk)
                talk.done("interrupted")
        elif isinstance(request, Resume):
            self._resume(request, live, write)
        elif isinstance(request, Chat):
            if self.reports or self.report.phase == "loading":
                write(Error.of(NotReady("the model is loading", retry_after_s=2.0), id=request.id))
                return
            talk = live[request.id] = Talk(request, write, self)
            self.talks.append(talk)
            self._tokens[talk.token] = talk
            talk.task = asyncio.create_task(self._run(talk))
            self.notify()

    def _resume(self, request: Resume, live: dict[str, Talk], write: Callable[[Event], None]) -> None:
        assert request.id is not None
        if self.num_busy:
            self.num_busy -= 1
            write(Error.of(Busy("full", retry_after_s=1.0), id=request.id))
            return
        talk = self._tokens.get(request.resume_token)
        if talk is None or (talk.end and request.after >= len(talk.log)):
            write(Error.of(ResumeExpired("nothing under this token"), id=request.id))
            return
        live[request.id] = talk
        talk.resume(request.id, request.after, write)

    def _lose(self, talk: Talk) -> None:
        if not talk.end:
            talk.end = "gone"
            self._cancel(talk)

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
