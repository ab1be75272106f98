"""The page over HTTP, against a scripted daemon: what it serves, to whom, and what it keeps out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.toy_daemon import DaemonThread, Talk
from tests.webui.conftest import PageThread
from webui import gateway
from webui.history import NOTICE_ID
from webui.pages import MAX_PAGES
from webui.texts import EXAMPLES, LABELS, say

DEFAULTS = ["default", 0.8, 0.8, 0, 1024, 1.0]


def ask(url: str, *data: Any, language: str = "zh-CN") -> list[Any]:
    """The events' data of one `/chat` call."""
    headers = {"Accept-Language": language}
    with httpx.Client(base_url=url, headers=headers, timeout=20) as http:
        event = http.post("/gradio_api/call/chat", json={"data": list(data)}).raise_for_status().json()["event_id"]
        text = http.get(f"/gradio_api/call/chat/{event}").text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "null"]


def said(reply: Any) -> list[str]:
    return [part["text"] for message in reply for part in message["content"]]


def test_a_question_over_the_api_is_answered_and_its_connection_closed(url: str, daemon: DaemonThread) -> None:
    before = daemon.toy.num_connections
    last = ask(url, "你好", *DEFAULTS)[-1]
    assert said(last[0]) == ["你好，世界"]
    assert 'data-state="done"' in last[2]
    assert daemon.toy.talks[0].chat.params == {}
    daemon.until(lambda: daemon.toy.num_connections <= max(1, before))


def test_changed_parameters_reach_the_daemon(url: str, daemon: DaemonThread) -> None:
    ask(url, "你好", "precise", 0.2, 0.7, 40, 256, 1.0)
    expected = {"temperature": 0.2, "top_p": 0.7, "top_k": 40, "max_new_tokens": 256}
    assert daemon.toy.talks[0].chat.params == expected


def test_a_parameter_that_is_no_number_is_said_and_raises_nothing(url: str, daemon: DaemonThread) -> None:
    last = ask(url, "你好", "no such preset", 0.8, 0.8, 0, "many", 1.0)
    assert last == [] or "error" in json.dumps(last[-1])
    assert said(ask(url, "你好", *DEFAULTS)[-1][0]) == ["你好，世界"]


@pytest.mark.parametrize(("language", "picked"), [("zh-CN,zh", "zh"), ("en-US", "en"), ("fr", "en")])
def test_sentences_are_in_the_browsers_language(url: str, daemon: DaemonThread, language: str, picked: Any) -> None:
    async def script(talk: Talk) -> None:
        talk.accepted()
        talk.started()
        talk.delta("x")
        talk.done("length")

    daemon.toy.script = script
    last = ask(url, "?", *DEFAULTS, language=language)[-1]
    assert said(last[0]) == ["x", "ℹ️ " + say(picked, "length", tokens=1)]
    assert last[0][1]["metadata"] == {"id": NOTICE_ID}


def test_healthz_tells_ready_from_loading_and_from_gone(url: str, daemon: DaemonThread) -> None:
    ready = httpx.get(url + "/healthz")
    assert (ready.status_code, ready.json()["phase"], ready.json()["model"]) == (200, "ready", "chatglm3-6b")
    daemon.toy.reports = [replace(daemon.toy.report, phase="loading", progress=0.5)]
    loading = httpx.get(url + "/healthz")
    assert (loading.status_code, loading.json()["progress"]) == (503, 0.5)
    daemon.run(daemon.toy.kill())
    try:
        gone = httpx.get(url + "/healthz")
        assert (gone.status_code, gone.json()["phase"]) == (503, "unreachable")
    finally:
        daemon.run(daemon.toy.start())
    assert httpx.get(url + "/healthz").status_code == 200


def test_who_queues_an_event_while_its_stream_is_being_closed_is_told_so_later(
    url: str, daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser opens a stream only if it knows of no open one, so it must have heard of the close before."""
    functions = httpx.get(url + "/config").json()["dependencies"]
    number = next(function["id"] for function in functions if function["api_name"] == "chat")
    with httpx.Client(base_url=url + "/gradio_api", timeout=20) as http:

        def join(session: str, **options: Any) -> None:
            body = {"data": ["你好", [], *DEFAULTS], "session_hash": session, "fn_index": number}
            http.post("/queue/join", json=body, **options).raise_for_status()

        def last_event(session: str) -> str:
            events = http.get("/queue/data", params={"session_hash": session}).text.split("data: ")
            return str(json.loads(events[-1])["msg"])

        join("one")
        monkeypatch.setattr(gateway, "SETTLE_S", 60.0)
        assert last_event("one") == "close_stream"
        join("other")  # waits for nothing
        with pytest.raises(httpx.ReadTimeout):
            join("one", timeout=0.5)
        daemon.until(lambda: len(daemon.toy.talks) == 3)
        monkeypatch.setattr(gateway, "SETTLE_S", 0.0)
        join("one")
        assert last_event("one") == "close_stream"


def test_a_page_that_stops_says_so_to_whoever_waits_for_it(daemon: DaemonThread) -> None:
    page = PageThread(daemon.toy.path)
    try:
        page.app.state.stopping.set()
        stopping = httpx.get(page.url + "/healthz")
        assert (stopping.status_code, stopping.json()["phase"]) == (503, "stopping")
    finally:
        page.close()


def test_nothing_of_the_page_comes_from_elsewhere(url: str, daemon: DaemonThread) -> None:
    page = httpx.get(url + "/")
    assert page.status_code == 200 and "ChatGLM 对话" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "http" not in policy and "*" not in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    config = httpx.get(url + "/config").json()
    assert config["analytics_enabled"] is False
    assert config.get("footer_links") == []


def test_each_label_is_there_in_chinese_and_english(url: str, daemon: DaemonThread) -> None:
    translations = httpx.get(url + "/config").json()["i18n_translations"]
    assert set(translations) == {"zh", "zh-CN", "en"}
    assert set(translations["zh-CN"]) == set(translations["en"]) == set(LABELS)
    assert len(EXAMPLES) >= 4


def test_what_gradio_keeps_and_how_often_it_looks_is_bounded(page_of_module: PageThread) -> None:
    (gradio,) = [route.app for route in page_of_module.app.routes if hasattr(getattr(route, "app", None), "get_blocks")]
    queue = gradio.get_blocks()._queue
    assert queue.sleep_when_free == 0.01, "an idle queue does not poll each millisecond"
    assert queue.max_size is None, "a full queue would lose the message"
    assert (queue.ANALYTICS_MAX_EVENTS, queue.ANAYLTICS_CACHE_FREQUENCY) == (1, 10**9)
    assert gradio.state_holder.capacity == MAX_PAGES


@pytest.fixture(scope="module")
def guarded(daemon_of_module: DaemonThread) -> Iterator[PageThread]:
    page = PageThread(daemon_of_module.toy.path, credentials=[("ann", "secret")])
    yield page
    page.close()


def test_with_credentials_only_who_has_logged_in_is_answered(guarded: PageThread, daemon: DaemonThread) -> None:
    with httpx.Client(base_url=guarded.url, timeout=20) as http:
        assert http.post("/gradio_api/call/chat", json={"data": ["?", *DEFAULTS]}).status_code == 401
        assert http.post("/login", data={"username": "ann", "password": "wrong"}).status_code == 400
        assert not daemon.toy.talks
        assert http.post("/login", data={"username": "ann", "password": "secret"}).status_code == 200
        http.post("/gradio_api/call/chat", json={"data": ["?", *DEFAULTS]}).raise_for_status()
        daemon.until(lambda: bool(daemon.toy.talks))
