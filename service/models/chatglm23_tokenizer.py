"""ChatGLM2-6B's and ChatGLM3-6B's tokenizers and prompts, over the same tokenizer.model.

`encode*` may run on any thread; a decoder belongs to one answer. Knows no model and no torch.

    ChatGLM2   [gMASK] sop, then the ids of "[Round 1]\\n\\n问：…\\n\\n答：…\\n\\n[Round 2]\\n\\n问：…\\n\\n答："
    ChatGLM3   [gMASK] sop, then per message: role id, ids of "\\n", ids of the content; then <|assistant|>

Text that a user typed never becomes a control token: the control ids lie beyond the vocabulary that text is encoded
with, and <s>, </s>, <unk> in a text are not matched by sentencepiece. Here that is the originals' behaviour too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from service.models.pieces import PieceDecoder, Pieces, load_processor
from service.models.postprocess import chatglm2_response, chatglm3_response
from service.models.rounds import to_rounds
from service.models.text_decoder import Transformed
from service.models.tokenizer_files import find_file
from service.protocol import Message
from service.text import TextDecoder

# The control tokens, numbered from the vocabulary's end; ChatGLM2 has the first five.
_CONTROLS = (
    "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip


class _Tokenizer:
    """What the two have in common. `num_controls` of `_CONTROLS` exist; they are decoded as text, or not at all."""

    def __init__(self, folder: Path, *, num_controls: int, shows_controls: bool) -> None:
        self._processor = load_processor(find_file(folder, "tokenizer.model"))
        first = self._processor.get_piece_size()
        self.control_ids = {name: first + index for index, name in enumerate(_CONTROLS[:num_controls])}
        self.prefix_ids = [self.control_ids["[gMASK]"], self.control_ids["sop"]]
        self._end_id: int = self._processor.eos_id()
        silent = {self._processor.unk_id(): ""}  # it is the padding token here
        shown = {id: name if shows_controls else "" for name, id in self.control_ids.items()}
        self._pieces = Pieces(self._processor, texts=silent | shown)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with nothing added; never a control token's."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def token_bytes(self, id: int, /) -> bytes:
        """An id's bytes in the middle of an answer; `decoder` knows what depends on its neighbours."""
        return self._pieces.token_bytes(id)

    def decoder(self) -> TextDecoder:
        """What the original's `decode` gives."""
        return PieceDecoder(self._pieces)


class ChatGLM2Tokenizer(_Tokenizer):
    """A `ChatTokenizer`. Raises `ModelError` when the folder's files cannot be used."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, num_controls=5, shows_controls=False)
        self.stop_ids = frozenset({self._end_id})

    def prompt_text(self, messages: Sequence[Message]) -> str:
        rounds, question = to_rounds(messages)
        told = "".join(
            f"[Round {i}]\n\n问：{asked}\n\n答：{answer}\n\n" for i, (asked, answer) in enumerate(rounds, start=1)
        )
        return f"{told}[Round {len(rounds) + 1}]\n\n问：{question}\n\n答："

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the whole prompt, up to where the answer begins."""
        return [*self.prefix_ids, *self.encode(self.prompt_text(messages))]

    def answer_decoder(self) -> TextDecoder:
        """What a user sees: decoded, then `process_response`."""
        return Transformed(self.decoder(), chatglm2_response())


class ChatGLM3Tokenizer(_Tokenizer):
    """A `ChatTokenizer`. Raises `ModelError` when the folder's files cannot be used.

    NOTE: later checkpoints' tokenizer_config.json carries a chat template; it gives other ids than the model was
    trained on (the role tokens become text), so it is not used.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, num_controls=len(_CONTROLS), shows_controls=True)
        ends = (self.control_ids["<|user|>"], self.control_ids["<|observation|>"])
        self.stop_ids = frozenset({self._end_id, *ends})

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the whole prompt, up to where the answer begins."""
        ids = list(self.prefix_ids)
        for message in messages:
            ids += self.message_ids(message.role, message.content)
        return [*ids, self.control_ids["<|assistant|>"]]

    def message_ids(self, role: str, content: str, metadata: str = "") -> list[int]:
        """One message. `metadata` is a tool's name; the two parts are encoded apart, each with its dummy prefix."""
        return [self.control_ids[f"<|{role}|>"], *self.encode(f"{metadata}\n"), *self.encode(content)]

    def answer_decoder(self) -> TextDecoder:
        """What a user sees: decoded, then `process_response`; a tool call stays text."""
        return Transformed(self.decoder(), chatglm3_response())
