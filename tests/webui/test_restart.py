"""Answers in a real browser while a process is restarted under them: the daemon, the page, or the tab itself.

The daemon and the page are processes here, the model is the toy: its text is the same whenever nobody loses a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.client import Client
from tests.faults.common import running_toy
from tests.webui.conftest import PageThread
from tests.webui.tab import Tab
from webui.texts import say
from webui.turn import Patience

pytestmark = pytest.mark.browser

SLOW: dict[str, Any] = {"decode_s": 0.02}
BOT = "#chat .bot.message"


def whole_answer(path: Path, question: str) -> str:
    with Client(str(path)) as client:
        return client.chat(question).text()


def squeezed(text: str) -> str:
    """Without white space, which Markdown changes."""
    return "".join(text.split())


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def server(socket_path: Path) -> Iterator[PageThread]:
    page = PageThread(str(socket_path), patience=Patience(reach_s=0.3, retry_s=0.1))
    yield page
    page.close()


def shown(tab: Tab) -> str:
    """The last answer, and what the page says below it."""
    return squeezed(tab.page.query_selector_all(BOT)[-1].inner_text())


def wait_shown(tab: Tab, text: str) -> None:
    tab.wait_js(f"(document.querySelector('{BOT}')?.innerText ?? '').replace(/\\s/g, '').includes(it)", text)


def test_a_daemon_restarted_under_an_answer_costs_it_no_word(
    tmp_path: Path, socket_path: Path, server: PageThread, contexts: dict[str, Any]
) -> None:
    flags = ["--drain-s", "0.2"]
    with running_toy(tmp_path, *flags) as (_, path):
        whole = squeezed(whole_answer(path, "讲个故事"))
    with running_toy(tmp_path, *flags, **SLOW) as (process, path):
        tab = Tab(contexts["zh-CN"], server.url)
        tab.ask("讲个故事")
        wait_shown(tab, whole[:10])
        process.terminate()
        tab.wait_text(say("zh", "restarting"))
        tab.wait_state("restarting")
        assert process.wait(5) == 0
        before = shown(tab)
        assert len(before) < len(whole)
    with running_toy(tmp_path, **SLOW) as (process, path):
        tab.wait_state("done")
        tab.wait_idle()
        assert whole in shown(tab) and say("zh", "restarting") not in tab.page.inner_text("#chat")
        assert len(tab.page.query_selector_all(BOT)) == 1, "it goes on in the same bubble"
        tab.ask("再来")
        tab.wait_text("再来")
        tab.wait_idle()
        assert len(tab.page.query_selector_all(BOT)) == 2
    tab.close()
