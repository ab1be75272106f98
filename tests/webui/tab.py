"""What the browser tests drive: a tab with the page in it, and another origin that counts who comes."""

from __future__ import annotations

import http.server
import threading
from typing import Any

BOX = "#question textarea"


class Tab:
    """A browser tab with the page in it. `foreign` lists every request that did not go to the page.

    Where the page does not come, the error tells what the browser said and what it still waits for.
    """

    def __init__(self, context: Any, url: str) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(45_000)  # a busy machine may be slow; what hangs still fails
        self.foreign: list[str] = []
        self.dialogs: list[str] = []
        self._said: list[str] = []
        self._requests: list[Any] = []
        self.page.on("request", lambda request: self._note(request, url))
        self.page.on("requestfailed", lambda request: self._said.append(f"{request.url}: {request.failure}"))
        self.page.on("console", lambda message: self._said.append(message.text))
        self.page.on("pageerror", lambda error: self._said.append(str(error)))
        self.page.on("dialog", self._dismiss)
        try:
            self.page.goto(url)
            self.page.wait_for_selector(f"{BOX}:enabled")
            self.page.wait_for_selector(".glm-status[data-state]:has(.glm-dot:not(.offline))")
        except Exception as error:
            waiting = [f"{it.method} {it.url}" for it in self._requests if it.timing["responseEnd"] < 0]
            error.add_note(f"said: {self._said}\nwaits for: {waiting}\nshows: {self.page.inner_text('body')}")
            raise

    def _note(self, request: Any, url: str) -> None:
        self._requests.append(request)
        if not request.url.startswith((url, "data:", "blob:")):
            self.foreign.append(request.url)

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def ask(self, question: str) -> None:
        self.page.fill(BOX, question)
        self.page.press(BOX, "Enter")

    def wait_state(self, state: str) -> None:
        self.page.wait_for_selector(f".glm-status[data-state={state}]")

    def wait_text(self, text: str) -> None:
        self.wait_js("document.querySelector('#chat')?.innerText.includes(it)", text)

    def wait_js(self, condition: str, it: str = "") -> None:
        self.page.wait_for_function("it => " + condition, arg=it, polling=50)

    def wait_idle(self) -> None:
        self.page.wait_for_selector(f"{BOX}:enabled")
        self.page.wait_for_selector(".submit-button")

    def close(self) -> None:
        self.page.close()


class Listener:
    """Another origin, which counts who comes."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        paths = self.paths

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                paths.append(self.path)
                self.send_error(404)

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


# An answer that tries everything; {evil} is the other origin.
HOSTILE = """
<script>fetch('{evil}/script'); alert(1)</script>
<img src=x onerror="alert(2); fetch('{evil}/onerror')">
<img src="{evil}/img.png">

![remote]({evil}/markdown.png) [md](javascript:alert(6))

<iframe src="{evil}/frame"></iframe> <iframe srcdoc="<script>alert(3)</script>"></iframe>
<svg onload="alert(4)"><image href="{evil}/svg.png"/></svg>
<style>body {{ display: none; background: url({evil}/css.png) }} @import url({evil}/import.css);</style>
<link rel="stylesheet" href="{evil}/link.css">
<form action="{evil}/form"><button>x</button></form>
<video src="{evil}/video.mp4" autoplay></video> <audio src="{evil}/audio.mp3" autoplay></audio>
<p style="background: url({evil}/style.png)">styled</p>
<a href="javascript:alert(5)" id="bait">bait</a>
<div style="position: fixed; inset: 0; z-index: 9999; background: white">over everything</div>
<meta http-equiv="refresh" content="0;url={evil}/refresh">
<object data="{evil}/object"></object><embed src="{evil}/embed">

the end
"""
