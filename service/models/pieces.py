"""A sentencepiece vocabulary seen from the answer's side: ids → text, exactly as sentencepiece decodes the whole.

`Pieces` is read-only and may be used by any thread; a `PieceDecoder` belongs to one answer, on the engine's thread.
Knows no families: which ids stand for another text than their piece is passed in.

Two things depend on what stands around an id, so its bytes alone do not decide them: blanks at the very beginning
(the encoder's dummy prefix) vanish, and bytes that are no character become one U+FFFD each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from service.models.errors import ModelError

_BLANK = "\u2581"  # sentencepiece's own sign for a space


class Pieces:
    """`texts`: ids that stand for a text of their own. `ignored`: ids that the decoder passes over."""

    def __init__(
        self, processor: SentencePieceProcessor, *, texts: Mapping[int, str], ignored: frozenset[int] = frozenset()
    ) -> None:
        self._processor = processor
        self._texts = texts
        self._num_pieces = processor.get_piece_size()
        self.ignored = ignored
        # The normaliser's remove_extra_whitespaces, which the processor does not tell but shows.
        self.strips_all_blanks = processor.decode_pieces([_BLANK, _BLANK]) == ""

    def byte(self, id: int) -> int | None:
        """The byte that a byte-fallback piece like <0xE4> stands for."""
        if id in self._texts or not 0 <= id < self._num_pieces or not self._processor.is_byte(id):
            return None
        return int(self._processor.id_to_piece(id)[3:5], 16)

    def text(self, id: int) -> str:
        """The id's text in the middle of an answer; "" for control pieces and ids beyond the vocabulary."""
        text = self._texts.get(id)
        if text is not None:
            return text
        if not 0 <= id < self._num_pieces or self._processor.is_control(id):
            return ""
        return str(self._processor.id_to_piece(id)).replace(_BLANK, " ")

    def has_own_text(self, id: int) -> bool:
        return id in self._texts

    def token_bytes(self, id: int) -> bytes:
        """The id's bytes in the middle of an answer."""
        byte = self.byte(id)
        return self.text(id).encode() if byte is None else bytes([byte])


class PieceDecoder:
    """`TextDecoder` over `Pieces`."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._is_at_start = True
        self._pending = b""  # the current run's bytes that may yet become a character

    def push(self, id: int, /) -> str:
        if id in self._pieces.ignored:
            return ""
        byte = self._pieces.byte(id)
        if byte is not None:
            self._is_at_start = False
            self._pending += bytes([byte])
            return self._settle(is_run_over=False)
        return self._settle(is_run_over=True) + self._piece(id)

    def finish(self) -> str:
        return self._settle(is_run_over=True)

    def _piece(self, id: int) -> str:
        text = self._pieces.text(id)
        if self._is_at_start and text.startswith(" ") and not self._pieces.has_own_text(id):
            text = text[1:]
            self._is_at_start = self._pieces.strips_all_blanks
        if text:
            self._is_at_start = False
        return text

    def _settle(self, *, is_run_over: bool) -> str:
        """Whole characters of the pending bytes, and U+FFFD for each byte that can no longer become one."""
        out = ""
        while self._pending:
            try:
                return out + self._take(len(self._pending))
            except UnicodeDecodeError as error:
                out += self._take(error.start)
                # "unexpected end": all bytes from here on are the beginning of a character.
                if error.reason == "unexpected end of data" and not is_run_over:
                    break
                out += "\ufffd"
                self._pending = self._pending[1:]
        return out

    def _take(self, num_bytes: int) -> str:
        text = self._pending[:num_bytes].decode()
        self._pending = self._pending[num_bytes:]
        return text


def load_processor(path: Path) -> SentencePieceProcessor:
    """Raises `ModelError` when the file is not a sentencepiece model."""
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        raise ModelError(f"{path} is not a sentencepiece model: copy it from the checkpoint again") from None
