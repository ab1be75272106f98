"""What the port serves beside the page: `/healthz`, the headers that keep every answer harmless, a quick end, and
streams of events that lose none.

Thread: the event loop. Knows FastAPI and no Gradio.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import parse_qs

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.protocol import to_wire
from webui.session import ChatSession

# The browser loads nothing from elsewhere, whatever a model writes: a remote image in an answer would tell its
# server what was said. Gradio's own page needs inline and evaluated scripts, from its own origin.
CONTENT_POLICY = "; ".join(
    [
        "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'",
        "connect-src 'self' data: blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-src 'none'",
    ]
)

SETTLE_S = 0.3  # for a closed stream to be known in the browser


def add_healthz(app: FastAPI, service: ChatSession, stopping: asyncio.Event) -> None:
    """`GET /healthz`: the daemon's own report. 200 when it is ready, else 503."""

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        if stopping.is_set():  # a browser that waits for the page is not to load this one again
            return JSONResponse({"type": "health", "phase": "stopping"}, 503)
        report = await service.health()
        if report is None:
            return JSONResponse({"type": "health", "phase": "unreachable"}, 503)
        return JSONResponse(to_wire(report), 200 if report.phase == "ready" else 503)


class SafeHeaders:
    """Adds the headers to every response, without buffering any."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = CONTENT_POLICY
                headers["Referrer-Policy"] = "no-referrer"
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-DNS-Prefetch-Control"] = "off"  # not even the names in its links
            await send(message)

        await self._app(scope, receive, send_safely)


class Stoppable:
    """Ends every response that still streams once `stopping` is set, as if its client had gone.

    Streams of a page live as long as the page, so a server that waits for them to end never stops.
    """

    def __init__(self, app: ASGIApp, stopping: asyncio.Event) -> None:
        self._app = app
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_open = False  # the response has begun and not ended

        async def receive_or_stop() -> Message:
            received = asyncio.ensure_future(receive())
            stopped = asyncio.ensure_future(self._stopping.wait())
            try:
                await asyncio.wait((received, stopped), return_when=asyncio.FIRST_COMPLETED)
                return {"type": "http.disconnect"} if self._stopping.is_set() else await received
            finally:
                received.cancel()
                stopped.cancel()

        async def send_noted(message: Message) -> None:
            nonlocal is_open
            is_open = message["type"] == "http.response.start" or bool(message.get("more_body"))
            await send(message)

        await self._app(scope, receive_or_stop, send_noted)
        if is_open and self._stopping.is_set():
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class Closings:
    """Keeps the end of one stream of events apart from the next event.

    NOTE: Gradio closes a browser's stream when its last event has ended, and the browser opens one when it is told that
    another was queued and it knows of no open one. Told so while the close is on its way, it would open none, and the
    page would wait for ever: where the page's two load events fell so, its text box stayed closed.
    """

    def __init__(self) -> None:
        self._closed_at: dict[str, float] = {}

    def note(self, session: str) -> None:
        """This browser's stream is being closed."""
        now = time.monotonic()
        self._closed_at = {name: at for name, at in self._closed_at.items() if now - at < SETTLE_S}
        self._closed_at[session] = now

    async def settle(self, session: str) -> None:
        """Wait until a browser knows of its closed stream; at once where none was closed just now."""
        await asyncio.sleep(self._closed_at.get(session, 0.0) + SETTLE_S - time.monotonic())


class NoteClosings:
    """Tells `Closings` of each stream of Gradio's events that ends."""

    def __init__(self, app: ASGIApp, closings: Closings) -> None:
        self._app = app
        self._closings = closings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/queue/data"):
            await self._app(scope, receive, send)
            return
        (session,) = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[:1]

        async def send_noted(message: Message) -> None:
            if message.get("body", b"").startswith(b'data: {"msg":"close_stream"'):
                self._closings.note(session)
            await send(message)

        await self._app(scope, receive, send_noted)
