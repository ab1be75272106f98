"""What the port serves beside the page: `/healthz`, the headers that keep every answer harmless, and a quick end.

Thread: the event loop. Knows FastAPI and no Gradio.
"""

from __future__ import annotations

import asyncio

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
