"""What a browser's tab keeps of its conversation, so that it is there again after the page was loaded again.

Pure. The tab wrote it (`script.py`), and anybody may have changed it: whatever is not exactly what is expected is as
good as nothing. It is text only, so nothing in it can name a file or a component.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from webui.history import NOTICE_ID, verbatim

VERSION = 1
MAX_CHARS = 2_000_000  # more is not kept: a tab has about 5 MB
MAX_TOKEN_CHARS = 200
MAX_DRAFT_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class Kept:
    """`messages` as Gradio shows them; with a `resume_token`, the last one is the question that was being answered."""

    messages: tuple[dict[str, Any], ...] = ()
    resume_token: str = ""
    draft: str = ""  # what was being typed

    @property
    def question(self) -> str:
        return str(self.messages[-1]["content"][0]["text"]) if self.resume_token else ""


def read_kept(stored: object) -> Kept:
    """What a tab has kept; empty when that cannot be understood."""
    if not isinstance(stored, str) or not stored or len(stored) > 2 * MAX_CHARS:
        return Kept()
    try:
        values = json.loads(stored)
        if values["version"] != VERSION:
            return Kept()
        draft, token = _text(values["draft"], MAX_DRAFT_CHARS), _text(values["token"], MAX_TOKEN_CHARS)
        messages = [_message(item) for item in values["chat"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return Kept()
    if token:
        messages = _up_to_the_question(messages)
    if not messages or messages[0]["role"] != "user":
        return Kept(draft=draft)
    return Kept(tuple(messages), token, draft)


def _message(item: Any) -> dict[str, Any]:
    role, note = item["role"], item["note"]
    if role not in ("user", "assistant") or note not in ("", NOTICE_ID):
        raise ValueError("not a message of the page")
    content = verbatim(_text(item["text"], MAX_CHARS))
    return {"role": role, "content": content, "metadata": {"id": note} if note else None}


def _text(value: Any, max_chars: int) -> str:
    if not isinstance(value, str) or len(value) > max_chars:
        raise ValueError("not a text of the page")
    return value.encode("utf-8", "replace").decode("utf-8")


def _up_to_the_question(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what of the answer had come: it comes again."""
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages
