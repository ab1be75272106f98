"""Views as HTML."""

from __future__ import annotations

from service.protocol import HealthReport
from webui import look
from webui.texts import say
from webui.view import View


def test_text_from_outside_is_escaped_in_our_html() -> None:
    evil = HealthReport("ready", 1.0, model="<img src=x onerror=alert(1)>")
    assert "<img" not in look.header(evil, "<b>", "zh")
    assert "<b>" not in look.header(evil, "<b>", "zh")


def test_the_status_line_shows_the_numbers_and_warns_when_the_context_is_nearly_full() -> None:
    view = View(text="x", tokens=90, prompt_tokens=10, context_limit=100, ttft_ms=12.4, tokens_per_s=9.87)
    line = look.status(view, "en")
    assert "12 ms" in line and "9.9 tok/s" in line and "100/100" in line and 'class="full"' in line


def test_the_notice_appears_only_when_turns_were_dropped() -> None:
    assert look.notice(View(), "zh") == look.NOTHING
    assert say("zh", "dropped", turns=2) in look.notice(View(dropped_turns=2), "zh")
