"""ChatGLM-6B's (v1) tokenizer and prompt, over the checkpoint's ice_text.model.

`encode*` may run on any thread; a decoder belongs to one answer. Knows no model and no torch.

    你好                                         one turn is the bare question
    [Round 0]\\n问：…\\n答：…\\n[Round 1]\\n问：…\\n答：   more turns
    text ids … [gMASK] <sop>                      the control ids come last: the prompt's text is seen both ways

Text that a user typed never becomes a control token: sentencepiece does not match its control pieces in text. The
original does turn [MASK], <sop>, <eop>, <pad> and <unk> into ids; that is the one difference. <n>, <|tab|> and
<|blank_k|> in a text mean white space, as in the original.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from service.models.errors import ModelError
from service.models.pieces import PieceDecoder, Pieces, load_processor
from service.models.postprocess import Chain, Replace, chatglm1_response
from service.models.rounds import to_rounds
from service.models.text_decoder import Transformed
from service.models.tokenizer_files import find_file, read_config
from service.protocol import Message
from service.text import TextDecoder

# White space has pieces of its own: the vocabulary's normaliser would drop it. Runs of blanks are cut at 80.
_NEWLINE, _TAB, _BLANKS = "<n>", "<|tab|>", "<|blank_{}|>"
_MAX_BLANKS = 80
_BLANK_RUN = re.compile(f" {{2,{_MAX_BLANKS}}}")
# transformers' clean_up_tokenization, in its order: on for this family, whose config says nothing about it.
_CLEAN_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class ChatGLM1Tokenizer:
    """A `ChatTokenizer`. Raises `ModelError` when the folder's files cannot be used."""

    def __init__(self, folder: Path) -> None:
        path = find_file(folder, "ice_text.model")
        config = read_config(folder)
        if config.get("num_image_tokens", 0):  # the revision of March 2023 counted 20,000 image tokens first
            raise ModelError(f"{folder} is an old revision with image tokens: download the checkpoint again")
        self._processor = load_processor(path)
        self._cleans_up = config.get("clean_up_tokenization_spaces", True)
        white_space = {_NEWLINE: "\n", _TAB: "\t"}
        white_space |= {_BLANKS.format(size): " " * size for size in range(2, _MAX_BLANKS + 1)}
        texts = {self._id(piece): text for piece, text in white_space.items()}
        unknown = self._processor.unk_id()
        texts[unknown] = self._processor.decode([unknown])
        self._pieces = Pieces(self._processor, texts=texts, ignored=frozenset({self._id("<pad>")}))
        self.suffix_ids = [self._id("[gMASK]"), self._id("<sop>")]
        self.stop_ids = frozenset({self._id("<eop>")})

    def prompt_text(self, messages: Sequence[Message]) -> str:
        rounds, question = to_rounds(messages)
        if not rounds:
            return question
        told = "".join(f"[Round {i}]\n问：{asked}\n答：{answer}\n" for i, (asked, answer) in enumerate(rounds))
        return f"{told}[Round {len(rounds)}]\n问：{question}\n答："

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the whole prompt, up to where the answer begins."""
        return [*self.encode(self.prompt_text(messages)), *self.suffix_ids]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with nothing added; never a control token's."""
        text = text.replace("\n", _NEWLINE).replace("\t", _TAB)
        text = _BLANK_RUN.sub(lambda run: _BLANKS.format(len(run[0])), text)
        ids: list[int] = self._processor.encode(text)
        return ids

    def token_bytes(self, id: int, /) -> bytes:
        """An id's bytes in the middle of an answer; `decoder` knows what depends on its neighbours."""
        return self._pieces.token_bytes(id)

    def decoder(self) -> TextDecoder:
        """What the original's `decode` gives."""
        decoder = PieceDecoder(self._pieces)
        return Transformed(decoder, Chain(*(Replace(*pair) for pair in _CLEAN_UP))) if self._cleans_up else decoder

    def answer_decoder(self) -> TextDecoder:
        """What a user sees: decoded, then `process_response`."""
        return Transformed(self.decoder(), chatglm1_response())

    def _id(self, piece: str) -> int:
        id: int = self._processor.piece_to_id(piece)
        if id == self._processor.unk_id():
            raise ModelError(f"ice_text.model has no piece {piece}: copy it from the ChatGLM-6B checkpoint again")
        return id
