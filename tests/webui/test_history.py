"""What of a conversation reaches the daemon."""

from __future__ import annotations

from typing import Any

from service.protocol import Message
from webui.history import NOTICE_ID, WAITING_ID, to_messages, without_waiting


def _turn(role: str, text: str, metadata: Any = None) -> dict[str, Any]:
    return {"role": role, "metadata": metadata, "content": [{"type": "text", "text": text}], "options": None}


def test_history_from_the_page_and_from_an_api_client_read_the_same() -> None:
    page = [_turn("user", "a"), _turn("assistant", "  b\n\tc")]
    api = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "  b\n\tc"}]
    expected = [Message("user", "a"), Message("assistant", "  b\n\tc"), Message("user", "d")]
    assert to_messages(page, "d") == to_messages(api, "d") == expected


def test_sentences_of_the_page_and_unanswered_questions_are_not_sent() -> None:
    notice = _turn("assistant", "⚠️ …", {"id": NOTICE_ID})
    history = [_turn("user", "lost"), notice, _turn("user", "a"), _turn("assistant", "b"), notice, _turn("user", "c")]
    assert to_messages(history, "d") == [Message("user", "a"), Message("assistant", "b"), Message("user", "d")]
    waiting = _turn("assistant", "⏳ …", {"id": WAITING_ID})
    assert to_messages([*history[:1], waiting], "d") == [Message("user", "d")]
    assert without_waiting([*history, waiting]) == history


def test_a_lone_surrogate_does_not_break_the_conversation() -> None:
    assert to_messages([], "a\ud800b") == [Message("user", "a?b")]
