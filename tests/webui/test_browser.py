"""The page in a real browser, against a scripted daemon: what a person sees, and what the daemon is spared.

Asserts on the daemon's state with a bound, never on the wall clock; waits for elements, never for "networkidle".
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.toy_daemon import DaemonThread, Talk
from tests.webui.tab import BOX, HOSTILE, Listener, Tab
from webui.texts import EXAMPLES, LABELS, say

pytestmark = pytest.mark.browser

BOT = "#chat .bot.message"
BOT_BUTTONS = "#chat .message-buttons-left"
RETRY, UNDO, CLEAR = "重试", "撤销", "清空对话"
CODE = "看：\n\n```python\ndef f(n):\n    if n:\n\t\treturn 1\n    return 2\n```\n"


@pytest.fixture
def open_tab(contexts: dict[str, Any], url: str, daemon: DaemonThread) -> Iterator[Any]:
    tabs: list[Tab] = []

    def open_one(locale: str = "zh-CN") -> Tab:
        tabs.append(Tab(contexts[locale], url))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()


async def answer_slowly(talk: Talk) -> None:
    talk.accepted()
    talk.started()
    for number in range(100_000):
        talk.delta(f"{number} ")
        await asyncio.sleep(0.02)


async def stall_in_queue(talk: Talk) -> None:
    talk.accepted(position=2, start_s=9.0)
    await asyncio.Event().wait()


async def stall_after_text(talk: Talk) -> None:
    talk.accepted()
    talk.started()
    talk.delta("写到一半")
    await asyncio.Event().wait()


def test_a_typed_question_streams_an_answer(open_tab: Any, daemon: DaemonThread) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started()
        talk.delta("第一段")
        await talk.go_on.wait()
        talk.delta("第二段")
        talk.done()

    daemon.toy.script = script
    tab = open_tab()
    assert tab.page.title() == "ChatGLM 对话"
    assert "chatglm3-6b · INT4 · CPU" in tab.page.inner_text(".glm-badge")
    tab.ask("你好")
    tab.wait_text("第一段")
    assert "第二段" not in tab.page.inner_text("#chat")
    daemon.call(lambda: daemon.toy.talks[0].go_on.set())
    tab.wait_text("第一段第二段")
    tab.wait_state("done")
    tab.wait_idle()
    assert [message.content for message in daemon.toy.talks[0].chat.messages] == ["你好"]
    assert daemon.toy.talks[0].chat.params == {}
    assert tab.page.get_attribute(BOX, "placeholder") == LABELS["chat_interface.message_placeholder"][0]
    tab.ask("再来")
    daemon.until(lambda: len(daemon.toy.talks) == 2)
    sent = [(message.role, message.content) for message in daemon.toy.talks[1].chat.messages]
    assert sent == [("user", "你好"), ("assistant", "第一段第二段"), ("user", "再来")]
    assert tab.foreign == []


def test_indentation_survives_on_the_screen_and_in_the_next_turn(open_tab: Any, daemon: DaemonThread) -> None:
    async def script(talk: Talk) -> None:
        talk.say(*CODE)

    daemon.toy.script = script
    tab = open_tab()
    question = "  def g():\n      pass"
    tab.page.fill(BOX, question)
    tab.page.press(BOX, "Enter")
    tab.wait_state("done")
    tab.page.wait_for_selector(f"{BOT} pre code")
    shown = tab.page.inner_text(f"{BOT} pre code")  # Markdown shows a tab as four spaces
    assert shown == "def f(n):\n    if n:\n        return 1\n    return 2\n"
    tab.wait_idle()
    tab.ask("再来")
    daemon.until(lambda: len(daemon.toy.talks) == 2)
    assert [message.content for message in daemon.toy.talks[1].chat.messages] == [question, CODE, "再来"]


def test_stop_ends_the_work_at_the_daemon_and_keeps_the_text(open_tab: Any, daemon: DaemonThread) -> None:
    daemon.toy.script = answer_slowly
    tab = open_tab()
    tab.ask("数数")
    tab.wait_text("0 1 2")
    tab.page.click(".stop-button")
    daemon.until(lambda: daemon.toy.talks[0].end == "interrupted", 5)
    tab.wait_state("stopped")
    tab.wait_idle()
    assert "0 1 2" in tab.page.inner_text("#chat")


def test_stop_while_queued_ends_the_work_and_says_so(open_tab: Any, daemon: DaemonThread) -> None:
    daemon.toy.script = stall_in_queue
    tab = open_tab()
    tab.ask("排队")
    tab.wait_text(say("zh", "queued", ahead=2, seconds=9))
    tab.wait_state("queued")
    tab.page.click(".stop-button")
    daemon.until(lambda: daemon.toy.talks[0].end == "interrupted", 5)
    tab.wait_text(say("zh", "stopped_early"))
    assert say("zh", "queued", ahead=2, seconds=9) not in tab.page.inner_text("#chat")
    tab.wait_idle()
    daemon.toy.script = answer_slowly
    tab.ask("数数")
    tab.wait_text("0 1 2")
    assert [message.content for message in daemon.toy.talks[1].chat.messages] == ["数数"]
    assert say("zh", "queued", ahead=2, seconds=9) not in tab.page.inner_text("#chat")


@pytest.mark.parametrize("script", [stall_in_queue, stall_after_text, answer_slowly])
def test_a_closed_tab_ends_its_work_at_the_daemon(open_tab: Any, daemon: DaemonThread, script: Any) -> None:
    daemon.toy.script = script
    tab = open_tab()
    tab.ask("有人吗")
    daemon.until(lambda: len(daemon.toy.talks) == 1)
    tab.wait_state("queued" if script is stall_in_queue else "answering")
    tab.close()
    daemon.until(lambda: daemon.toy.talks[0].end == "interrupted", 5)


def test_a_daemon_that_dies_leaves_the_text_and_a_page_that_works(open_tab: Any, daemon: DaemonThread) -> None:
    daemon.toy.script = stall_after_text
    tab = open_tab()
    tab.ask("讲个故事")
    tab.wait_text("写到一半")
    daemon.run(daemon.toy.kill())
    try:
        tab.wait_text(say("zh", "reconnecting"))
        tab.wait_state("reconnecting")
        daemon.run(daemon.toy.start())  # it knows nothing of the answer
        tab.wait_text(say("zh", "restarted"))
        chat = tab.page.inner_text("#chat")
        assert "写到一半" in chat and say("zh", "reconnecting") not in chat
        tab.wait_idle()
        daemon.run(daemon.toy.kill())
        tab.ask("还在吗")
        tab.wait_text("supervisorctl -c supervisord.conf status")
        tab.wait_idle()
    finally:
        daemon.run(daemon.toy.start())

    async def say_back(talk: Talk) -> None:
        talk.say("我回来了")

    daemon.toy.script = say_back
    tab.ask("现在呢")
    tab.wait_text("我回来了")
    sent = [message.content for message in daemon.toy.talks[-1].chat.messages]
    assert sent == ["讲个故事", "写到一半", "现在呢"]


def test_loading_shows_progress_and_the_answer_follows(open_tab: Any, daemon: DaemonThread) -> None:
    tab = open_tab()
    daemon.toy.report = replace(daemon.toy.report, phase="loading", progress=0.42)
    try:
        tab.ask("你好")
        tab.wait_text(say("zh", "loading", percent=42))
        tab.wait_state("loading")
    finally:
        daemon.toy.report = replace(daemon.toy.report, phase="ready", progress=1.0)
    tab.wait_text("你好，世界")
    assert say("zh", "loading", percent=42) not in tab.page.inner_text("#chat")


def test_what_only_looks_like_a_tag_stays_readable(open_tab: Any, daemon: DaemonThread) -> None:
    async def script(talk: Talk) -> None:
        talk.say("a List<String>, <think>hm</think>, a < b > c")

    daemon.toy.script = script
    tab = open_tab()
    tab.ask("?")
    tab.wait_text("a List<String>, <think>hm</think>, a < b > c")


def test_hostile_answers_are_harmless_and_load_nothing_from_elsewhere(open_tab: Any, daemon: DaemonThread) -> None:
    listener = Listener()
    text = HOSTILE.format(evil=listener.url)

    async def script(talk: Talk) -> None:
        talk.say(*re.findall(r".{1,40}", text, re.DOTALL))

    daemon.toy.script = script
    try:
        tab = open_tab()
        tab.ask(text)  # what the user pastes is as untrusted as what the model writes
        tab.wait_state("done")
        tab.wait_text("the end")
        tab.wait_idle()
        assert tab.page.query_selector_all(f"{BOT} img[src$='markdown.png']"), "it is there, but not fetched"
        for bait in tab.page.query_selector_all("#chat a"):
            assert not (bait.get_attribute("href") or "").startswith("javascript:")
        for tag in ("script", "iframe", "object", "embed", "meta", "link", "style"):
            assert tab.page.query_selector_all(f"#chat .message {tag}") == [], tag
        tab.page.click(BOX)  # nothing lies over it
        tab.page.evaluate("document.querySelectorAll('#chat .message form').forEach(form => form.submit())")
        tab.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert (listener.paths, tab.dialogs) == ([], [])
        assert tab.page.url.startswith(tab.page.evaluate("location.origin"))
    finally:
        listener.close()


@pytest.mark.parametrize(("locale", "column", "language"), [("zh-CN", 0, "zh"), ("en-US", 1, "en")])
def test_the_page_speaks_the_browsers_language(
    open_tab: Any, daemon: DaemonThread, locale: str, column: int, language: Any
) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started(dropped=(0, 1))
        talk.delta("x")
        talk.done("length")

    tab = open_tab(locale)
    tab.wait_text(LABELS["greeting"][column])
    page_text = tab.page.inner_text("body")
    for key in ("subtitle", "greeting_more", "sampling"):
        assert LABELS[key][column] in page_text
    assert say(language, "state_ready") in page_text
    tab.page.click("#sampling button")
    tab.page.wait_for_selector(f"text={LABELS['preset_creative'][column]}")
    assert LABELS["temperature"][column] in tab.page.inner_text("#sampling")
    daemon.toy.script = script
    tab.page.click(f"text={EXAMPLES[0][column]}")
    daemon.until(lambda: bool(daemon.toy.talks))
    assert daemon.toy.talks[0].prompt == EXAMPLES[0][column]
    tab.wait_text(say(language, "length", tokens=1))
    tab.wait_idle()
    tab.ask("再")
    daemon.until(lambda: len(daemon.toy.talks) == 2)
    tab.page.wait_for_selector(f"text={say(language, 'dropped', turns=1)}")


def test_a_preset_is_sent_and_retry_undo_and_clear_work(open_tab: Any, daemon: DaemonThread) -> None:
    tab = open_tab()
    tab.page.click("#sampling button")
    tab.page.click(f"text={LABELS['preset_precise'][0]}")
    tab.wait_js("document.querySelector('#sampling input[type=number]').value == '0.2'")
    tab.ask("你好")
    tab.wait_state("done")
    tab.wait_idle()
    assert daemon.toy.talks[0].chat.params == {"temperature": 0.2, "top_p": 0.7}
    tab.page.click(f"{BOT_BUTTONS} [aria-label='{RETRY}']")
    daemon.until(lambda: len(daemon.toy.talks) == 2)
    assert [message.content for message in daemon.toy.talks[1].chat.messages] == ["你好"]
    tab.wait_idle()
    tab.page.click(f"{BOT_BUTTONS} [aria-label='{UNDO}']")
    tab.wait_js(f"document.querySelector('{BOX}').value == '你好'")
    assert tab.page.query_selector_all(BOT) == []
    tab.page.press(BOX, "Enter")
    daemon.until(lambda: len(daemon.toy.talks) == 3)
    tab.wait_state("done")
    tab.wait_idle()
    tab.page.click(f"#chat [aria-label='{CLEAR}']")
    tab.wait_text(LABELS["greeting"][0])
    tab.wait_state("ready")
