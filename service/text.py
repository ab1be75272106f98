"""Token ids → text, safe at UTF-8 and stop-string boundaries; and merging of text at natural boundaries.

Pure: what an id stands for and the clock's reading are passed in. Joined, the pieces are exactly the decoded answer.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Ids → text for one answer, made by its family's tokenizer. What was returned never changes."""

    def push(self, id: int, /) -> str:
        """The text that this id makes certain."""

    def finish(self) -> str:
        """Whatever waited; the answer is over."""


class BytesDecoder:
    """For vocabularies whose ids are bytes whatever stands around them.

    Never half a character: bytes that are not yet one wait; invalid ones become U+FFFD, as `bytes.decode` with
    "replace" gives for the whole.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int, /) -> str:
        return self._decoder.decode(self._token_bytes(id))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class TextStream:
    """The text of one answer, token by token.

    Never part of a stop string: the longest suffix that could still become one waits.
    """

    def __init__(self, decoder: TextDecoder, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held = ""

    def push(self, id: int) -> str:
        """The text that this token makes safe to send; nothing once `stopped`."""
        return self._sift(self._decoder.push(id))

    def finish(self) -> str:
        """Whatever was held back; the answer is over."""
        rest = self._sift(self._decoder.finish())
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _sift(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stop:
            return text
        self._held += text
        # NOTE: the match that is complete first, not the one that begins first: else the text would depend on how
        # the tokens split it. Of two that end together, the longer.
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            safe, self._held = self._held[: min(found)[1]], ""
            return safe
        keep = max(self._open_suffix(stop) for stop in self._stop)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def _open_suffix(self, stop: str) -> int:
        """Length of the longest suffix of the held text that is a proper prefix of `stop`."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0


# After one of these, a reader loses nothing by waiting no longer: sentence marks, commas, spaces, line ends.
_BOUNDARY = re.compile(r".*[\s,.;:!?，。；：！？、…—）)\]】」』”]", re.DOTALL)


class Merger:
    """Merges text up to a boundary, or until `max_delay_s` has passed since the oldest of it came.

    The first text is never delayed; a delay of 0 passes everything through. `push` and `flush` return (text, tokens)
    or None. A piece that ends inside what was pushed takes all token counts so far with it.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._is_first = True
        self._text = ""
        self._tokens = 0
        self._since: float | None = None

    def push(self, text: str, tokens: int, now: float) -> tuple[str, int] | None:
        self._text += text
        self._tokens += tokens
        if not self._text:  # a token that only began a character: neither the first text nor one that waits
            return None
        if self._since is None:
            self._since = now
        if self._is_first or now - self._since >= self._max_delay_s:
            self._is_first = False
            return self.flush()
        boundary = _BOUNDARY.match(self._text)
        if boundary is None:
            return None
        piece, self._text = boundary[0], self._text[boundary.end() :]
        counted, self._tokens = self._tokens, 0
        self._since = now if self._text else None
        return piece, counted

    def due_at(self) -> float | None:
        """When the held text must go, or None when nothing is held."""
        return None if self._since is None else self._since + self._max_delay_s

    def flush(self) -> tuple[str, int] | None:
        if not self._text and not self._tokens:
            return None
        piece = (self._text, self._tokens)
        self._text, self._tokens, self._since = "", 0, None
        return piece
