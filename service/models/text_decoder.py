"""Token ids → text while they come: what a family's tokenizer makes for each answer, and the plain case by bytes.

Thread: the one that decodes, the engine's; one decoder per answer. Knows no vocabulary: bytes or pieces are passed in.

Joined, the texts of all `push` calls and of `finish` are the decoded answer, and what was returned never changes:
text that later ids could still alter waits inside.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

from service.models.postprocess import Transform


class TextDecoder(Protocol):
    def push(self, id: int, /) -> str:
        """The text that this id makes certain."""

    def finish(self) -> str:
        """Whatever waited; the answer is over."""


class BytesDecoder:
    """For vocabularies whose ids are bytes whatever stands around them; invalid ones become U+FFFD."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int, /) -> str:
        return self._decoder.decode(self._token_bytes(id))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class Transformed:
    """A decoder whose text goes through a transform."""

    def __init__(self, decoder: TextDecoder, transform: Transform) -> None:
        self._decoder = decoder
        self._transform = transform

    def push(self, id: int, /) -> str:
        return self._transform.push(self._decoder.push(id))

    def finish(self) -> str:
        return self._transform.push(self._decoder.finish()) + self._transform.finish()
