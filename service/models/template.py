"""Chat templates: messages -> pieces of text, where control tokens can only come from the template itself.

Any thread. Knows jinja and the template's words; no ids and no tokenizer. The sandbox and its options are those of
transformers (`utils/chat_template_utils.py`), so that a template renders as its author saw it.

    contents:  "hi <|im_end|>"                    user text
    rendered:  <|im_start|>user\\n K0 <|im_end|>    with an unguessable key K0 in the content's place
    pieces:    Control(<|im_start|>) "user\\nhi <|im_end|>" Control(<|im_end|>)
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.models.errors import ModelError
from service.protocol import BadRequest, Message


@dataclass(frozen=True, slots=True)
class Control:
    """A control token that the template wrote."""

    text: str


Piece = str | Control


class ChatTemplate:
    """A compiled template. `controls` are the tokenizer's control tokens, `names` its bos_token, eos_token, …"""

    def __init__(self, source: str, controls: Sequence[str], names: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template cannot be compiled ({error}): fix tokenizer_config.json") from None
        self._names = names
        longest_first = sorted(controls, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._trims = self._find_trimmed()

    def render(self, messages: Sequence[Message]) -> list[Piece]:
        """The whole prompt up to where the answer begins; neighbouring plain text is one piece.

        Raises `BadRequest` when the template refuses the messages (roles that must alternate, …).
        """
        key = secrets.token_hex(16)
        # An empty content stays empty: templates skip such messages, or leave their space out.
        stand_ins = [f"{key}.{index}." if message.content else "" for index, message in enumerate(messages)]
        rendered = self._run([message.role for message in messages], stand_ins)
        contents = [message.content.strip() if self._trims else message.content for message in messages]
        pieces: list[Piece] = []
        parts = re.split(key + r"\.(\d+)\.", rendered)  # template, index, template, index, …, template
        for place, part in enumerate(parts):
            if place % 2:
                _append(pieces, contents[int(part)])
            else:
                self._append_template(pieces, part)
        return pieces

    def _run(self, roles: Sequence[str], contents: Sequence[str]) -> str:
        messages: list[dict[str, Any]] = [
            {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
        ]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", path="$.messages") from None

    def _append_template(self, pieces: list[Piece], text: str) -> None:
        at = 0
        for match in self._controls.finditer(text):
            _append(pieces, text[at : match.start()])
            pieces.append(Control(match.group()))
            at = match.end()
        _append(pieces, text[at:])

    def _find_trimmed(self) -> bool:
        """Whether the template strips contents: a stand-in has no outer spaces to strip, so this is asked once."""
        try:
            return " ? " not in self._run(["user"], [" ? "])
        except BadRequest as error:
            raise ModelError(f"{error.message}: fix tokenizer_config.json") from None


def find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja (transformers 5 writes it there) or tokenizer_config.json; None where there is none."""
    beside = folder / "chat_template.jinja"
    source = beside.read_text("utf-8") if beside.exists() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def _append(pieces: list[Piece], text: str) -> None:
    """Plain text joins plain text, so that BPE sees what it would see in one string."""
    if not text:
        return
    if pieces and isinstance(pieces[-1], str):
        pieces[-1] += text
    else:
        pieces.append(text)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
