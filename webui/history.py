"""A conversation as Gradio keeps it: what the daemon gets of it, and an answer's part in it.

Pure. The page gives `{"role", "metadata", "content": [{"type": "text", "text": …}]}`, an API client plain strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.protocol import Message
from webui.look import bubble
from webui.view import View

# Mark, in a message's metadata, what the page said itself: it is no part of the conversation. What it says while
# something is awaited is over when the next thing happens.
NOTICE_ID = "notice"
WAITING_ID = "waiting"


def to_messages(history: Sequence[Any], question: str) -> list[Message]:
    """The turns that have an answer, then the question. Sentences of the page are left out.

    A question that got no answer (stopped, refused) is not sent again: there, the user presses retry.
    """
    messages: list[Message] = []
    for item in history:
        role, text = item.get("role"), _text_of(item)
        if role == "system" and text:
            messages.append(Message("system", text))
        elif role == "user":
            _drop_unanswered(messages)
            messages.append(Message("user", text))
        elif role == "assistant" and text.strip() and _notice_of(item) is None:
            if messages and messages[-1].role == "assistant":
                messages[-1] = Message("assistant", messages[-1].content + text)
            else:
                messages.append(Message("assistant", text))
    _drop_unanswered(messages)
    return [*messages, Message("user", _clean(question))]


def as_messages(view: View) -> list[dict[str, Any]]:
    """The answer, and below it the page's own sentence, marked so that it is no part of the conversation."""
    messages: list[dict[str, Any]] = []
    if view.text:
        messages.append({"role": "assistant", "content": verbatim(view.text)})
    notice = NOTICE_ID if view.is_finished else WAITING_ID
    if sentence := bubble(view):
        messages.append({"role": "assistant", "content": verbatim(sentence), "metadata": {"id": notice}})
    return messages


def verbatim(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]  # NOTE: Gradio strips a plain string's indentation


def without_waiting(history: Sequence[Any]) -> list[Any]:
    """What is shown, without what the page said while something was awaited."""
    return [item for item in history if _notice_of(item) != WAITING_ID]


def _drop_unanswered(messages: list[Message]) -> None:
    if messages and messages[-1].role == "user":
        messages.pop()


def _notice_of(item: Any) -> str | None:
    """Which of the page's own marks a message bears."""
    metadata = item.get("metadata")
    mark = metadata.get("id") if isinstance(metadata, dict) else None
    return mark if mark in (NOTICE_ID, WAITING_ID) else None


def _text_of(item: Any) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return _clean(content)
    parts = content if isinstance(content, list) else [content]
    return _clean("".join(_text_of_part(part) for part in parts))


def _text_of_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _clean(text: str) -> str:
    """Without lone surrogates: JSON can carry them, UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")
