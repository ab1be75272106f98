"""The page: Gradio's components and their few events. The only module that imports gradio.

Thread: the event loop. It knows conversations only through `webui.session`, and the daemon not at all. NOTEs name
the faults of Gradio 6 that a line works around.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # NOTE: read when gradio is imported; without it, it phones home

import gradio as gr
from fastapi import FastAPI

from service.protocol import Params
from webui import look, presets, texts
from webui.gateway import SafeHeaders, add_healthz
from webui.history import NOTICE_ID, to_messages
from webui.pages import Page, Pages
from webui.session import ChatSession, Patience
from webui.texts import EXAMPLES, TITLE, labels, preferred_language
from webui.view import View

log = logging.getLogger(__name__)

STATUS_S = 0.25  # the status line changes at most 4 times a second
LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]


def build_app(
    socket_path: str,
    *,
    credentials: Sequence[tuple[str, str]] = (),
    root_path: str = "",
    patience: Patience | None = None,
) -> FastAPI:
    """The whole port: the page at `/`, `/healthz` beside it. `credentials` are (user, password) pairs."""
    patience = patience or Patience()
    pages = Pages(socket_path, patience)
    service = ChatSession(socket_path, patience=patience)  # for what no single page asks

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await pages.close_all()
        await service.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(SafeHeaders)
    add_healthz(app, service)
    i18n = gr.I18n(**{"zh": labels("zh"), "zh-CN": labels("zh"), "en": labels("en")})
    demo = build_page(Events(pages, service, patience), i18n)
    gr.mount_gradio_app(
        app, demo, path="/", auth=list(credentials) or None, root_path=root_path or None, footer_links=[],
        run_history=False, enable_monitoring=False, show_error=False, ssr_mode=False, i18n=i18n,
        theme=gr.themes.Default(primary_hue="blue", neutral_hue="slate"), css=look.CSS,
    )  # fmt: skip
    assert hasattr(demo._queue, "sleep_when_free")
    demo._queue.sleep_when_free = 0.01  # NOTE: an idle queue polls each 1 ms, which takes 8 % of a core
    return app


class Events:
    """What happens on the page. None of these raises: an exception would leave the text box disabled."""

    def __init__(self, pages: Pages, service: ChatSession, patience: Patience) -> None:
        self._pages = pages
        self._service = service
        self._patience = patience

    async def opened(self, request: gr.Request) -> AsyncGenerator[tuple[Any, Any], None]:
        """A page was loaded: who answers here, followed until the daemon is ready."""
        language = _language(request)
        page = await self._pages.open(_name(request), language)
        until = time.monotonic() + self._patience.loading_s
        while not page.session.is_closed:
            report = await self._service.health()
            status = look.idle_status(report, language) if page.view is None else gr.skip()
            yield look.header(report, texts.labels(language)["subtitle"], language), status
            if (report is not None and report.phase == "ready") or time.monotonic() > until:
                return
            await page.session.pause(1.0)

    async def closed(self, request: gr.Request) -> None:
        """The tab is gone. NOTE: a running answer would notice only at its next piece of text."""
        await self._pages.close(_name(request))

    async def stopped(self, request: gr.Request) -> Any:
        """The stop button: Gradio ends the answer's generator; the status line is ours."""
        page = self._pages.get(_name(request))
        if page is None or page.view is None:
            return gr.skip()
        page.session.interrupt()
        return look.status(page.view.as_stopped(), page.language)

    async def cleared(self, request: gr.Request) -> tuple[Any, Any]:
        report = await self._service.health()
        return look.idle_status(report, _language(request)), look.NOTHING

    async def answer(
        self, message: str, history: list[Any], preset: str, temperature: float, top_p: float, top_k: float,
        max_new_tokens: float, repetition_penalty: float, request: gr.Request,
    ) -> AsyncGenerator[tuple[Any, Any, Any], None]:  # fmt: skip
        """One answer, as chat messages, status line and notice."""
        language = _language(request)
        try:
            values = (temperature, top_p, top_k, max_new_tokens, repetition_penalty)
            params = presets.changed(preset, dict(zip(presets.OFFERED, values, strict=True)))
            async with self._pages.borrow(_name(request), language) as page:
                views = page.session.ask(to_messages(history, message), params, language=language)
                async with aclosing(_shown(page, views)) as updates:
                    async for update in updates:
                        yield update
        except Exception:
            log.exception("the page failed to answer")
            view = View(state="error", sentence=texts.say(language, "page_failed"))
            yield _chat(view), look.status(view, language), look.NOTHING


async def _shown(page: Page, views: AsyncGenerator[View, None]) -> AsyncGenerator[tuple[Any, Any, Any], None]:
    """Views as Gradio's values; the status line less often than the text."""
    status_at, shown = 0.0, View()
    async with aclosing(views):
        async for view in views:
            page.view = view
            now = time.monotonic()
            is_due = now >= status_at or view.state != shown.state or view.is_finished
            if is_due:
                status_at, shown = now + STATUS_S, view
            yield (
                _chat(view),
                look.status(view, page.language) if is_due else gr.skip(),
                look.notice(view, page.language) if is_due else gr.skip(),
            )


def _chat(view: View) -> list[dict[str, Any]]:
    """The answer, and below it the page's own sentence, marked so that it is no part of the conversation."""
    messages = []
    if view.text:
        messages.append({"role": "assistant", "content": _verbatim(view.text)})
    if sentence := look.bubble(view):
        messages.append({"role": "assistant", "content": _verbatim(sentence), "metadata": {"id": NOTICE_ID}})
    return messages


def _verbatim(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]  # NOTE: a plain string goes through inspect.cleandoc: indentation is lost


class VerbatimChatbot(gr.Chatbot):
    """A chatbot that keeps the indentation of what the user typed, too."""

    def postprocess(self, value: Any) -> Any:
        messages = [
            {**message, "content": _verbatim(message["content"])}
            if isinstance(message, dict) and isinstance(message.get("content"), str)
            else message
            for message in value or []
        ]
        return super().postprocess(messages)


def build_page(events: Events, label: Callable[[str], Any]) -> gr.Blocks:
    """The components and what connects them."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as demo:
        with gr.Column(elem_id="page"):
            header = gr.HTML(look.header(None, "", "zh"), elem_id="glm-header")
            notice = gr.HTML(look.NOTHING, elem_id="glm-notice")
            top = gr.Column(elem_id="page-top")
            with gr.Column(elem_id="page-bottom"):
                status = gr.HTML(look.idle_status(None, "zh"), elem_id="glm-status")
                inputs = _sampling(label)
        with top:
            chat = gr.ChatInterface(
                events.answer,
                chatbot=VerbatimChatbot(
                    elem_id="chat", show_label=False, height=None, sanitize_html=True, allow_tags=False,
                    latex_delimiters=LATEX, buttons=["copy", "copy_all"], placeholder=look.greeting("", ""),
                    autoscroll=True, layout="bubble",
                ),
                textbox=gr.Textbox(
                    placeholder=label("chat_interface.message_placeholder"), lines=1, max_lines=8, autofocus=True,
                    submit_btn=True, stop_btn=True, show_label=False, elem_id="question",
                ),
                additional_inputs=inputs, additional_outputs=[status, notice],
                examples=[[chinese, *[None] * len(inputs)] for chinese, _ in EXAMPLES],
                cache_examples=False, analytics_enabled=False, api_name="chat", concurrency_limit=None,
                show_progress="hidden", flagging_mode="never",
            )  # fmt: skip
        chat.textbox.stop(events.stopped, None, [status], queue=False, show_progress="hidden", api_visibility="private")
        chat.chatbot.clear(events.cleared, None, [status, notice], queue=False, show_progress="hidden", api_visibility="private")
        demo.load(events.opened, None, [header, status], show_progress="hidden", concurrency_limit=None, api_visibility="private")
        demo.unload(events.closed)
    return demo


def _sampling(label: Callable[[str], Any]) -> list[Any]:
    """The accordion of sampling parameters; returns its components in the order that `Events.answer` takes them."""
    defaults = Params()
    with gr.Accordion(label("sampling"), open=False, elem_id="sampling"):
        preset = gr.Radio(
            [(label(f"preset_{name}"), name) for name in presets.PRESETS], value=presets.MODEL_DEFAULT,
            label=label("preset"), info=label("preset_help"),
        )  # fmt: skip
        with gr.Row():
            temperature = gr.Slider(0, 2, defaults.temperature, step=0.05, label=label("temperature"), min_width=220)
            top_p = gr.Slider(0, 1, defaults.top_p, step=0.01, label=label("top_p"), min_width=220)
            top_k = gr.Slider(0, 200, defaults.top_k, step=1, label=label("top_k"), min_width=220)
            max_new_tokens = gr.Slider(
                1, 8192, defaults.max_new_tokens, step=1, label=label("max_new_tokens"), min_width=220
            )
            penalty = gr.Slider(
                0.5, 2, defaults.repetition_penalty, step=0.01, label=label("repetition_penalty"), min_width=220
            )

    def choose(name: str) -> tuple[Any, Any]:
        values = presets.shown_values(name)
        return values["temperature"], values["top_p"]

    preset.input(choose, [preset], [temperature, top_p], queue=False, show_progress="hidden", api_visibility="private")
    return [preset, temperature, top_p, top_k, max_new_tokens, penalty]


def _name(request: gr.Request) -> str:
    return request.session_hash or ""


def _language(request: gr.Request) -> texts.Language:
    return preferred_language(request.headers.get("accept-language", ""))
