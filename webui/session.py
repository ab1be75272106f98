"""One page's conversations with the daemon, as a stream of what the user sees.

Thread: the event loop. It knows the daemon by its client and no Gradio, no HTTP and no HTML. One connection per page,
opened when it is needed and opened again when it was lost. Text is merged to about 30 updates a second, the first
one at once: each update costs the browser and the server far more than a token costs the socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from service.client import AsyncAnswer, AsyncClient, ConnectionLost, Timeouts, make_chat
from service.protocol import Chat, Delta, Event, HealthReport, Message, NotReady, ServiceError
from webui.texts import Language, say
from webui.view import Say, View, advance, end_with

UPDATE_S = 1 / 30
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: how long one answer may take, and how long to try again while there is no daemon or no model yet."""

    deadline_s: float = 600.0
    reach_s: float = 5.0
    loading_s: float = 900.0
    retry_s: float = 1.0


class ChatSession:
    """`ask` may run several times at once; each ends at once when its generator is closed or its task cancelled."""

    def __init__(
        self, socket_path: str, *, patience: Patience | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket_path = socket_path
        self._patience = patience or Patience()
        self._now = now
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self._answers: set[AsyncAnswer] = set()
        self._waits: set[asyncio.Timeout] = set()  # who waits for the daemon now: close() ends their waits
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def ask(
        self, messages: Sequence[Message], params: Mapping[str, Any] | None = None, *, language: Language = "en"
    ) -> AsyncGenerator[View, None]:
        """Answer the last message. Yields views until one is finished; failures are views too.

        Closing the generator interrupts the answer at the daemon. After `close` it just ends.
        """
        turn = _Turn(messages, params or {}, partial(say, language), self._now(), self._patience.deadline_s)
        reached_at = turn.asked_at
        view = View()
        while not self.is_closed:
            reused = self._client
            client: AsyncClient | None = None
            try:
                client = await self._connection()
                async with aclosing(self._stream(client, turn)) as views:
                    async for view in views:
                        yield view
                return
            except NotReady as error:
                reached_at = self._now()
                progress = await self._progress()
                view = self._still_loading(turn, error, progress)
            except ConnectionLost as error:
                await self._forget(client)
                is_stale = client is not None and client is reused and not view.is_accepted
                if is_stale:  # it was lost while nobody used it: nothing was asked yet
                    continue
                view = self._still_unreachable(turn, error, view, self._now() - reached_at)
            except ServiceError as error:
                view = end_with(view, error, turn.say)
            if not self.is_closed:
                yield view
            if view.is_finished:
                return
            await self.pause(self._patience.retry_s)

    async def health(self, timeout_s: float = 5.0) -> HealthReport | None:
        """What the daemon says of itself; None when it cannot be asked."""
        for _ in range(2):  # the second time on a fresh connection
            client: AsyncClient | None = None
            try:
                client = await self._connection()
                return await self._within(client.health(), timeout_s)
            except (ConnectionLost, ServiceError):
                await self._forget(client)
            except TimeoutError:
                await self._forget(client)  # a reply that comes late would answer the next question
                break
        return None

    def interrupt(self) -> None:
        """Stop every running answer at the daemon; each then ends as stopped."""
        for answer in list(self._answers):
            answer.interrupt()

    async def pause(self, seconds: float) -> None:
        """Wait, but not beyond the session's end: the daemon does not say when it has become ready."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    async def close(self) -> None:
        """End everything at once: the daemon stops what runs on this connection."""
        self._closed.set()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    # --- one attempt ------------------------------------------------------------------------------------------

    async def _stream(self, client: AsyncClient, turn: _Turn) -> AsyncGenerator[View, None]:
        """The views of one request. Raises what the daemon or the connection ends it with."""
        answer = client.open(turn.chat(client.session.new_id()))
        self._answers.add(answer)
        view = shown = View()
        due_at = turn.asked_at
        try:
            async with answer:
                while not answer.mailbox.is_finished:
                    event = await self._next_event(client, answer, None if view is shown else due_at)
                    if self.is_closed:
                        return
                    if event is not None:
                        view = turn.advance(view, event, self._now())
                        if client.session.drain_notice is not None and not view.is_finished:
                            seconds = round(client.session.drain_notice.deadline_s)
                            view = replace(view, sentence=turn.say("drain_notice", seconds=seconds))
                    # The first text, and whatever is not text, is shown at once.
                    may_wait = isinstance(event, Delta) and bool(shown.text)
                    if not may_wait or self._now() >= due_at:
                        yield view
                        shown, due_at = view, self._now() + UPDATE_S
        except (ConnectionLost, ServiceError):
            if view is not shown and not self.is_closed:
                yield view
            raise
        finally:
            self._answers.discard(answer)
            client.session.forget(answer.mailbox)

    async def _next_event(self, client: AsyncClient, answer: AsyncAnswer, due_at: float | None) -> Event | None:
        """The request's next event, or None when text that waits is due (or the session was closed)."""
        wait_s = None if due_at is None else max(0.0, due_at - self._now())
        try:
            return await self._within(client.wait_event(answer.mailbox), wait_s)
        except TimeoutError:
            return None

    async def _within(self, waiting: Awaitable[T], timeout_s: float | None = None) -> T:
        """Await something. Raises `TimeoutError` when the time is over or the session was closed."""
        async with asyncio.timeout(timeout_s) as wait:
            self._waits.add(wait)
            try:
                return await waiting
            finally:
                self._waits.discard(wait)

    # --- between attempts -------------------------------------------------------------------------------------

    async def _connection(self) -> AsyncClient:
        async with self._connecting:
            if self.is_closed:
                raise ConnectionLost("the page was closed")
            if self._client is None:
                timeouts = Timeouts(idle_s=self._patience.deadline_s + 30)
                client = await AsyncClient.connect(self._socket_path, timeouts=timeouts)
                if self._closed.is_set():
                    await client.aclose()
                    raise ConnectionLost("the page was closed")
                self._client = client
            return self._client

    async def _forget(self, client: AsyncClient | None) -> None:
        if client is not None and client is self._client:
            self._client = None
            await client.aclose()

    async def _progress(self) -> float:
        report = await self.health()
        return report.progress if report is not None else 0.0

    def _still_loading(self, turn: _Turn, error: NotReady, progress: float) -> View:
        percent = round(progress * 100)
        if self._now() - turn.asked_at < self._patience.loading_s:
            return View(state="loading", progress=progress, sentence=turn.say("loading", percent=percent))
        seconds = round(self._patience.loading_s)
        return View(state="error", sentence=turn.say("still_loading", seconds=seconds, percent=percent))

    def _still_unreachable(self, turn: _Turn, error: ConnectionLost, view: View, lost_s: float) -> View:
        if view.is_accepted or lost_s >= self._patience.reach_s:
            return end_with(view, error, turn.say)
        return View(state="loading", sentence=turn.say("reaching"))


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the user asked, and when."""

    messages: Sequence[Message]
    params: Mapping[str, Any]
    say: Say
    asked_at: float
    deadline_s: float

    def chat(self, id: str) -> Chat:
        return make_chat(self.messages, id=id, deadline_s=self.deadline_s, **self.params)

    def advance(self, view: View, event: Event, now: float) -> View:
        return advance(
            view, event, messages=self.messages, elapsed_ms=(now - self.asked_at) * 1000, deadline_s=self.deadline_s,
            say=self.say,
        )  # fmt: skip
