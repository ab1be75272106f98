"""One page's conversations with the daemon, as a stream of what the user sees.

Thread: the event loop. It knows the daemon by its client and no Gradio, no HTTP and no HTML. One connection per page,
opened when it is needed and opened again when it was lost. Text is merged to about 30 updates a second, the first
one at once: each update costs the browser and the server far more than a token costs the socket.

The daemon goes on with an answer whose connection is lost, so that it can be taken up again. Whoever leaves an answer
therefore says so: closing a connection stops nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from service.client import AsyncAnswer, AsyncClient, ConnectionLost, Timeouts
from service.protocol import Busy, Delta, Draining, Event, HealthReport, Message, NotReady, ServiceError
from webui.texts import Language, say
from webui.turn import Patience, Turn
from webui.view import View

UPDATE_S = 1 / 30
GOODBYE_S = 1.0  # how long to wait for the daemon to have heard that nobody reads any more
T = TypeVar("T")


class ChatSession:
    """`ask` may run several times at once; each ends at once when its generator is closed or its task cancelled.

    `is_leaving` says that the whole page process stops: then running answers are left to whoever takes them up.
    """

    def __init__(
        self, socket_path: str, *, patience: Patience | None = None, now: Callable[[], float] = time.monotonic,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._socket_path = socket_path
        self._patience = patience or Patience()
        self._now = now
        self._is_leaving = is_leaving
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()
        self._turns: set[Turn] = set()
        self._answers: set[AsyncAnswer] = set()
        self._farewells: set[asyncio.Task[None]] = set()
        self._waits: set[asyncio.Timeout] = set()  # who waits for the daemon now: close() ends their waits
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def reads(self, resume_token: str) -> bool:
        """Whether this answer is on its way to this page."""
        return any(turn.resume_token == resume_token for turn in self._turns)

    async def ask(
        self, messages: Sequence[Message], params: Mapping[str, Any] | None = None, *, language: Language = "en"
    ) -> AsyncGenerator[View, None]:
        """Answer the last message. Yields views until one is finished; failures are views too.

        Closing the generator interrupts the answer at the daemon. After `close` it just ends.
        """
        turn = Turn(messages, params or {}, partial(say, language), self._patience, self._now())
        async with aclosing(self._follow(turn)) as views:
            async for view in views:
                yield view

    async def take_up(
        self, resume_token: str, messages: Sequence[Message], *, language: Language = "en"
    ) -> AsyncGenerator[View, None]:
        """Like `ask`, for an answer that a page before this one asked for: from its first word on."""
        turn = Turn(messages, {}, partial(say, language), self._patience, self._now(), resume_token)
        async with aclosing(self._follow(turn)) as views:
            async for view in views:
                yield view

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
        for turn in self._turns:
            turn.is_stopped = True
        for answer in list(self._answers):
            answer.interrupt()

    async def pause(self, seconds: float) -> None:
        """Wait, but not beyond the session's end: the daemon does not say when it has become ready."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    async def close(self) -> None:
        """End everything at once: the daemon stops what runs for this page, unless the process is leaving."""
        self._closed.set()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)
        client, self._client = self._client, None
        if client is not None:
            if not self._is_leaving():
                await self._say_goodbye(client)
            await client.aclose()
        await asyncio.gather(*self._farewells)

    # --- one answer, over as many connections as it takes ------------------------------------------------------

    async def _follow(self, turn: Turn) -> AsyncGenerator[View, None]:
        self._turns.add(turn)
        try:
            while not self.is_closed:
                async with aclosing(self._attempt(turn)) as views:
                    async for view in views:
                        yield view
                if turn.view.is_finished:
                    return
        finally:
            self._turns.discard(turn)
            self._leave(turn)

    async def _attempt(self, turn: Turn) -> AsyncGenerator[View, None]:
        """What one connection brings of the answer, then what to say of its failure, and a pause."""
        reused, client = self._client, None
        try:
            client = await self._connection_for(turn)
            async with aclosing(self._stream(client, turn)) as views:
                async for view in views:
                    yield view
            return
        except NotReady:
            progress = await self._progress()
            turn.not_ready(self._now(), progress)
        except (Draining, Busy) as error:
            if turn.resume_token:
                turn.draining(self._now())
            else:
                turn.fail(error)
        except ConnectionLost as error:
            await self._forget(client)
            is_stale = client is not None and client is reused and not turn.view.is_accepted
            if is_stale:  # it was lost while nobody used it: nothing was asked yet
                return
            is_news = turn.lost_at is None
            turn.lost(error, self._now())
            if turn.resume_token and is_news:
                return  # the daemon may well be there: ask it at once
        except ServiceError as error:
            turn.fail(error)
        if not self.is_closed:
            yield turn.view
        if not turn.view.is_finished:
            await self.pause(self._patience.retry_s)

    async def _connection_for(self, turn: Turn) -> AsyncClient:
        """Raises `Draining` while only the daemon is there that has ended the answer: it would call it over."""
        if turn.is_drained:
            report = await self.health()
            if report is not None and report.phase == "draining":
                raise Draining("the next daemon has not come yet")
        return await self._connection()

    async def _stream(self, client: AsyncClient, turn: Turn) -> AsyncGenerator[View, None]:
        """The views of one request. Raises what the daemon or the connection ends it with."""
        answer = client.open(turn.request(client.session.new_id()))
        self._answers.add(answer)
        turn.is_streaming = True
        shown = turn.view
        due_at = turn.asked_at
        try:
            while not answer.mailbox.is_finished:
                event = await self._next_event(client, answer, None if turn.view is shown else due_at)
                if self.is_closed:
                    return
                if event is not None:
                    turn.advance(event, self._now(), client.session.drain_notice)
                # The first text, and whatever is not text, is shown at once.
                may_wait = isinstance(event, Delta) and bool(shown.text)
                if not may_wait or self._now() >= due_at:
                    yield turn.view
                    shown, due_at = turn.view, self._now() + UPDATE_S
        except (ConnectionLost, ServiceError) as error:
            turn.is_streaming = not isinstance(error, ConnectionLost)
            if turn.view is not shown and not self.is_closed:
                yield turn.view
            raise
        finally:
            is_running = turn.is_streaming and not answer.mailbox.is_finished
            if is_running and answer in self._answers and not self._is_leaving():
                answer.interrupt()
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

    # --- leaving -----------------------------------------------------------------------------------------------

    async def _say_goodbye(self, client: AsyncClient) -> None:
        """Stop what runs on a connection, and wait until the daemon has read that.

        NOTE: closing at once would lose it: a daemon that writes to a closed connection reads no more from it.
        """
        for answer in self._answers:
            answer.interrupt()
        self._answers.clear()
        with suppress(ConnectionLost, ServiceError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await client.health()

    def _leave(self, turn: Turn) -> None:
        """Nobody reads the answer any more. While no connection brings it, one is made to say so."""
        is_running = turn.resume_token and not turn.view.is_finished and not turn.is_drained
        if is_running and not turn.is_streaming and not self._is_leaving():
            farewell = asyncio.create_task(self._stop_elsewhere(turn))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def _stop_elsewhere(self, turn: Turn) -> None:
        with suppress(ConnectionLost, ServiceError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S), await AsyncClient.connect(self._socket_path) as client:
                client.resume(turn.resume_token, turn.last_seq).interrupt()
                await client.health()

    # --- connections -------------------------------------------------------------------------------------------

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
