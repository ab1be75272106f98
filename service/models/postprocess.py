"""The families' `process_response`, done while the text streams.

Pure; one object per answer. A transform takes text piece by piece and returns what is certain: joined, its output is
the rule applied to the whole text, however that was split, and what was returned never changes. Held back is only
what the next characters could still alter: a run of blanks (is it the end?), the beginning of something that is
replaced, v1's comma after a letter (does a Chinese character follow?).

Tool calls (ChatGLM3, GLM-4) stay text: a line with the tool's name, then its argument. Nothing in it is evaluated.
"""

from __future__ import annotations

from typing import Protocol

# What the models were trained to say for "the time I was trained"; the originals put the date in.
_TRAINING_TIME = ("[[训练时间]]", "2023年")
_NEXT_TURN = "<|assistant|>"
_FULL_WIDTH = {",": "，", "!": "！", ":": "：", ";": "；", "?": "？"}


class Transform(Protocol):
    def push(self, text: str, /) -> str:
        """The text that is certain now."""

    def finish(self) -> str:
        """Whatever was held back; nothing follows."""


class Chain:
    """Transforms one after the other."""

    def __init__(self, *transforms: Transform) -> None:
        self._transforms = transforms

    def push(self, text: str, /) -> str:
        for transform in self._transforms:
            text = transform.push(text)
        return text

    def finish(self) -> str:
        text = ""
        for transform in self._transforms:
            text = transform.push(text) + transform.finish()
        return text


class Replace:
    """`str.replace`."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, text: str, /) -> str:
        *before, rest = (self._held + text).split(self._old)
        self._held = _open_suffix(rest, self._old)
        return "".join(part + self._new for part in before) + rest[: len(rest) - len(self._held)]

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


class Strip:
    """`str.strip`. After `break_line` a new part begins, stripped by itself and on a line of its own."""

    def __init__(self) -> None:
        self._skips_blanks = True
        self._has_text = False
        self._gap = ""  # blanks after the last text

    def push(self, text: str, /) -> str:
        if self._skips_blanks:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._gap += text
            return ""
        out = self._gap + body
        self._gap = text[len(body) :]
        self._skips_blanks, self._has_text = False, True
        return out

    def break_line(self) -> None:
        self._gap = "\n" if self._has_text else ""
        self._skips_blanks = True

    def finish(self) -> str:
        return ""


class Turns:
    """Several turns in one answer (text, then a tool call): each stripped, the empty ones left out, one per line."""

    def __init__(self) -> None:
        self._strip = Strip()
        self._held = ""

    def push(self, text: str, /) -> str:
        *ended, rest = (self._held + text).split(_NEXT_TURN)
        out = ""
        for turn in ended:
            out += self._strip.push(turn)
            self._strip.break_line()
        self._held = _open_suffix(rest, _NEXT_TURN)
        return out + self._strip.push(rest[: len(rest) - len(self._held)])

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return self._strip.push(rest)


class FullWidth:
    """, ! : ; ? next to a Chinese character, on either side, become full-width."""

    def __init__(self) -> None:
        self._before = ""  # the last character that is certain
        self._held = ""  # one of the five marks, with no Chinese character before it

    def push(self, text: str, /) -> str:
        out = []
        for char in text:
            if self._held:
                out.append(_FULL_WIDTH[self._held] if _is_chinese(char) else self._held)
                self._before, self._held = self._held, ""
            if char not in _FULL_WIDTH:
                out.append(char)
            elif _is_chinese(self._before):
                out.append(_FULL_WIDTH[char])
            else:
                self._held = char
                continue
            self._before = char
        return "".join(out)

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


# --- What the families do -----------------------------------------------------------------------------------------


def chatglm1_response() -> Transform:
    return Chain(Replace(*_TRAINING_TIME), Strip(), FullWidth())


def chatglm2_response() -> Transform:
    return Chain(Replace(*_TRAINING_TIME), Strip())


def chatglm3_response() -> Transform:
    """Also GLM-4's. The originals return a tool call as an object, and only the last turn; here all of it is text."""
    return Chain(Replace(*_TRAINING_TIME), Turns())


def _is_chinese(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"


def _open_suffix(text: str, word: str) -> str:
    """The longest suffix of `text` that could still become `word`."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return word[:size]
    return ""
