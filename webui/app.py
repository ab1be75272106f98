"""The page: Gradio's components and their few events. The only module that imports gradio.

Thread: the event loop. It knows conversations only through `webui.session`, and the daemon not at all. NOTEs name
the faults of Gradio 6 that a line works around.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

# NOTE: without the first, Gradio phones home; without the others, it keeps 10,000 finished events and makes a pandas
# table of them at the end of each one.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(10**9)

import gradio as gr
from fastapi import FastAPI

from service.protocol import Params
from webui import look, presets, script, texts
from webui.gateway import Closings, NoteClosings, SafeHeaders, Stoppable, add_healthz
from webui.history import as_messages, to_messages, verbatim, without_waiting
from webui.kept import Kept, read_kept
from webui.pages import MAX_PAGES, Page, Pages
from webui.session import ChatSession
from webui.texts import EXAMPLES, TITLE, labels, preferred_language
from webui.turn import Patience
from webui.view import View

log = logging.getLogger(__name__)

ELSEWHERE_S = 2.0  # how long the page before this one in the same tab may take to leave
CLOSED: dict[str, Any] = {"interactive": False, "submit_btn": False, "stop_btn": True}  # the text box
OPEN: dict[str, Any] = {"interactive": True, "submit_btn": True, "stop_btn": False}
STATUS_S = 0.25  # the status line changes at most 4 times a second
LATEX: list[dict[str, str | bool]] = [
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
    """The whole port: the page at `/`, `/healthz` beside it. `credentials` are (user, password) pairs.

    NOTE: call it where an event loop runs: without one, Gradio makes a dozen loops and closes none.
    """
    patience = patience or Patience()
    stopping = asyncio.Event()
    pages = Pages(socket_path, patience, stopping.is_set)
    service = ChatSession(socket_path, patience=patience)  # for what no single page asks

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await pages.close_all()
        await service.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.stopping = stopping  # set it, and every stream ends
    closings = Closings()
    app.add_middleware(SafeHeaders)
    app.add_middleware(NoteClosings, closings=closings)
    app.add_middleware(Stoppable, stopping=stopping)
    add_healthz(app, service, stopping)
    i18n = gr.I18n(**{"zh": labels("zh"), "zh-CN": labels("zh"), "en": labels("en")})
    demo = build_page(Events(pages, service, patience), i18n)
    demo.state_session_capacity = MAX_PAGES  # NOTE: 70 kB each, and one for each API call too; 10,000 by default
    gr.mount_gradio_app(
        app, demo, path="/", auth=list(credentials) or None, root_path=root_path or None, footer_links=[],
        run_history=False, enable_monitoring=False, show_error=False, ssr_mode=False, i18n=i18n,
        theme=gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=look.FONTS), css=look.CSS,
        js=script.WATCH,
    )  # fmt: skip
    assert hasattr(demo._queue, "sleep_when_free")
    demo._queue.sleep_when_free = 0.01  # NOTE: an idle queue polls each 1 ms, which takes 8 % of a core
    _tell_when_settled(demo._queue, closings)
    return app


def _tell_when_settled(queue: Any, closings: Closings) -> None:
    """A browser is told that an event was queued, but not while its stream is being closed; the event runs at once."""
    push = queue.push

    async def push_and_settle(**options: Any) -> Any:
        told = await push(**options)
        await closings.settle(options["body"].session_hash)
        return told

    queue.push = push_and_settle


class Events:
    """What happens on the page. None of these raises: an exception would leave the text box disabled."""

    def __init__(self, pages: Pages, service: ChatSession, patience: Patience) -> None:
        self._pages = pages
        self._service = service
        self._patience = patience

    async def opened(self, request: gr.Request) -> AsyncGenerator[tuple[Any, Any, Any], None]:
        """A page was loaded: the words in its language, and who answers here, followed until the daemon is ready."""
        language = _language(request)
        words = labels(language)
        page = await self._pages.open(_name(request), language)
        examples = [{"text": pair[language == "en"]} for pair in EXAMPLES]
        empty_chat = gr.update(placeholder=look.greeting(words["greeting"], words["greeting_more"]), examples=examples)
        until = time.monotonic() + self._patience.loading_s
        while not page.session.is_closed:
            report = await self._service.health()
            status = look.idle_status(report, language) if page.view is None else gr.skip()
            yield look.header(report, words["subtitle"], language), status, empty_chat
            if (report is not None and report.phase == "ready") or time.monotonic() > until:
                return
            empty_chat = gr.skip()
            await page.session.pause(1.0)

    async def restored(self, stored: str, request: gr.Request) -> AsyncGenerator[tuple[Any, ...], None]:
        """A page was loaded: a tab's conversation is shown again, and what was being answered is taken up.

        Like `answer`, with the whole chat, and Gradio's own note of it; the box is closed until then.
        """
        kept = read_kept(stored)
        messages, answer = list(kept.messages), []
        page = await self._pages.open(_name(request), _language(request))
        try:
            if kept.resume_token:
                yield messages, gr.skip(), gr.skip(), gr.update(**CLOSED), gr.skip(), messages
                async with aclosing(self._taken_up(page, kept)) as updates:
                    async for answer, *values in updates:
                        if not page.has_taken_up:  # the next question has been asked
                            return
                        yield [*messages, *answer], *values, gr.skip()
        except Exception:
            log.exception("the page failed to take up an answer")
        messages = [*messages, *answer]
        yield messages, gr.skip(), gr.skip(), gr.update(**OPEN, value=kept.draft), "", messages

    async def _taken_up(self, page: Page, kept: Kept) -> AsyncGenerator[tuple[Any, ...], None]:
        page.has_taken_up = True
        if await self._pages.is_read(kept.resume_token, ELSEWHERE_S):
            view = View(state="stopped", sentence=texts.say(page.language, "read_elsewhere"))
            yield as_messages(view), look.status(view, page.language), look.NOTHING, gr.skip(), gr.skip()
            return
        messages = to_messages(kept.messages[:-1], kept.question)
        views = page.session.take_up(kept.resume_token, messages, language=page.language)
        async with aclosing(_shown(page, views)) as updates:
            async for update in updates:
                yield update

    async def closed(self, request: gr.Request) -> None:
        """The tab is gone. NOTE: a running answer would notice only at its next piece of text."""
        await self._pages.close(_name(request))

    async def stopped(self, shown: list[Any], request: gr.Request) -> tuple[Any, ...]:
        """The stop button: Gradio ends the answer's generator; what the page says of it is ours."""
        page = self._pages.get(_name(request))
        if page is None or page.view is None:
            return gr.skip(), gr.skip(), gr.skip(), gr.skip()
        page.session.interrupt()
        page.view = page.view.as_stopped(partial(texts.say, page.language))
        turns = [*without_waiting(shown), *as_messages(replace(page.view, text=""))]
        box = gr.update(**OPEN) if page.has_taken_up else gr.skip()  # else Gradio opens it
        return look.status(page.view, page.language), turns, box, ""

    async def cleared(self, request: gr.Request) -> tuple[Any, Any]:
        report = await self._service.health()
        return look.idle_status(report, _language(request)), look.NOTHING

    async def answer(
        self, message: str, history: list[Any], preset: str, temperature: float, top_p: float, top_k: float,
        max_new_tokens: float, repetition_penalty: float, request: gr.Request,
    ) -> AsyncGenerator[tuple[Any, ...], None]:  # fmt: skip
        """One answer, as chat messages, status line, notice, text box and what resumes it."""
        language = _language(request)
        try:
            values = (temperature, top_p, top_k, max_new_tokens, repetition_penalty)
            params = presets.changed(preset, dict(zip(presets.OFFERED, values, strict=True)))
            async with self._pages.borrow(_name(request), language) as page:
                if page.has_taken_up:  # the box was closed until its end, so whoever comes before that is no person
                    page.has_taken_up = False
                    page.session.interrupt()
                views = page.session.ask(to_messages(history, message), params, language=language)
                async with aclosing(_shown(page, views)) as updates:
                    async for update in updates:
                        yield update
        except Exception:
            log.exception("the page failed to answer")
            view = View(state="error", sentence=texts.say(language, "page_failed"))
            yield as_messages(view), look.status(view, language), look.NOTHING, gr.skip(), ""


async def _shown(page: Page, views: AsyncGenerator[View]) -> AsyncGenerator[tuple[Any, ...], None]:
    """Views as Gradio's values; the status line less often than the text."""
    # NOTE: Gradio empties the text box's placeholder when a message is sent.
    box = gr.update(placeholder=labels(page.language)["chat_interface.message_placeholder"])
    status_at, shown, kept = 0.0, View(), ""
    async with aclosing(views):
        async for view in views:
            page.view = view
            now = time.monotonic()
            if now >= status_at or view.state != shown.state or view.is_finished:
                status_at, shown = now + STATUS_S, view
                values = look.status(view, page.language), look.notice(view, page.language)
            else:
                values = gr.skip(), gr.skip()
            token = "" if view.is_finished else view.resume_token
            yield as_messages(view), *values, box, gr.skip() if token == kept else token
            box, kept = gr.skip(), token


class VerbatimChat(gr.ChatInterface):
    """Keeps the indentation of what the user typed, too, and forgets what was said of waiting once it is over."""

    def _append_message_to_history(self, message: Any, history: Any, role: Any = "user") -> Any:
        return super()._append_message_to_history(message, without_waiting(history), role)

    def _message_as_message_dict(self, message: Any, role: Any) -> Any:
        if isinstance(message, str):
            message = {"role": role, "content": verbatim(message)}
        return super()._message_as_message_dict(message, role)


def build_page(events: Events, label: Callable[[str], Any]) -> gr.Blocks:
    """The components and what connects them."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as demo:
        with gr.Column(elem_id="page"):
            header = gr.HTML(look.header(None, "", "zh"), elem_id="glm-header", padding=False)
            notice = gr.HTML(look.NOTHING, elem_id="glm-notice", padding=False)
            top = gr.Column(elem_id="page-top")
            with gr.Column(elem_id="page-bottom"):
                status = gr.HTML(look.idle_status(None, "zh"), elem_id="glm-status", padding=False)
                inputs = _sampling(label)
        # What the tab keeps goes through these two: in the browser only, but for the load of the page.
        token, kept = (gr.Textbox(visible="hidden", show_label=False, container=False) for _ in range(2))
        question = gr.Textbox(
            placeholder=label("chat_interface.message_placeholder"), lines=1, max_lines=8, autofocus=True,
            submit_btn=True, stop_btn=True, show_label=False, elem_id="question", render=False, interactive=False,
        )  # fmt: skip
        with top:
            chat = VerbatimChat(
                events.answer,
                chatbot=gr.Chatbot(
                    elem_id="chat", show_label=False, height=None, sanitize_html=True, allow_tags=True,
                    latex_delimiters=LATEX, buttons=["copy", "copy_all"], autoscroll=True, layout="bubble",
                ),
                textbox=question, additional_inputs=inputs, additional_outputs=[status, notice, question, token],
                examples=[[chinese, *[None] * len(inputs)] for chinese, _ in EXAMPLES],
                cache_examples=False, analytics_enabled=False, api_name="chat", concurrency_limit=None,
                show_progress="hidden", flagging_mode="never",
            )  # fmt: skip
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        chat.textbox.stop(
            events.stopped, [chat.chatbot], [status, chat.chatbot, question, token], queue=False, **quiet
        ).then(
            lambda shown: shown, [chat.chatbot], [chat.chatbot_state], queue=False, **quiet
        )  # NOTE: the next question's answer is shown below this state, which Gradio took before ours was shown
        chat.chatbot.clear(events.cleared, None, [status, notice], queue=False, **quiet)
        _keep(demo, events, chat, kept, [chat.chatbot, status, notice, question, token, chat.chatbot_state], quiet)
        demo.load(events.opened, None, [header, status, chat.chatbot], concurrency_limit=None, **quiet)
        demo.unload(events.closed)
    return demo


def _keep(
    demo: gr.Blocks, events: Events, chat: VerbatimChat, kept: gr.Textbox, outputs: list[Any], quiet: dict[str, Any]
) -> None:
    """A tab keeps its conversation, and shows it when the page is loaded again."""
    token = outputs[-2]
    for changed in (token.change, chat.chatbot_state.change):
        changed(None, [token, chat.chatbot], None, js=script.KEEP, queue=False, **quiet)
    restored = demo.load(events.restored, [kept], outputs, js=script.READ, concurrency_limit=None, **quiet)
    restored.then(None, None, None, js=script.FOCUS, queue=False, **quiet)
    chat.textbox.stop(None, None, None, cancels=[restored], **quiet)


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
