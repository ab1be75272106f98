"""One scripted daemon and one page for a module's tests: the page runs in this process, on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.toy_daemon import DaemonThread, say_hello
from webui.turn import Patience

CHROMIUM = "/usr/bin/chromium"
ARGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


class PageThread:
    """The page behind uvicorn. `url` is where it is. `close` ends it as a signal does."""

    def __init__(self, socket_path: str, port: int = 0, **options: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.app: Any = None
        self._server: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(socket_path, options),), name="page")
        self._thread.start()
        assert self._is_up.wait(60)

    async def _serve(self, socket_path: str, options: dict[str, Any]) -> None:
        import uvicorn

        from webui.app import build_app

        self._loop = asyncio.get_running_loop()
        self.app = build_app(socket_path, **options)
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=1))
        self._is_up.set()
        await self._server.serve([self._listener])

    def close(self) -> None:
        assert self._loop is not None
        self._server.should_exit = True
        self._loop.call_soon_threadsafe(self.app.state.stopping.set)
        self._thread.join(10)
        self._listener.close()


@pytest.fixture(scope="module")
def daemon_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonThread]:
    path: Path = tmp_path_factory.mktemp("daemon")
    daemon = DaemonThread(str(path / "toy.sock"))
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def page_of_module(daemon_of_module: DaemonThread) -> Iterator[PageThread]:
    page = PageThread(daemon_of_module.toy.path, patience=Patience(reach_s=0.3, retry_s=0.1))
    yield page
    page.close()


@pytest.fixture
def url(page_of_module: PageThread) -> str:
    return page_of_module.url


@pytest.fixture
def daemon(daemon_of_module: DaemonThread) -> DaemonThread:
    """The module's daemon, with nothing left of the last test."""
    toy = daemon_of_module.toy
    toy.script = say_hello
    toy.reports.clear()
    toy.talks.clear()
    return daemon_of_module


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not Path(CHROMIUM).exists():
        message = f"{CHROMIUM} is missing"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def contexts(browser: Any) -> Iterator[dict[str, Any]]:
    """One browser context a language, so that the page's files are fetched once."""
    size: Any = {"width": 1000, "height": 760}
    contexts = {locale: browser.new_context(locale=locale, viewport=size) for locale in ("zh-CN", "en-US")}
    yield contexts
    for context in contexts.values():
        context.close()
