"""GLM-4's tokenizer and prompt: tiktoken ranks (tokenizer.model) and the checkpoint's own chat template.

`encode*` may run on any thread; a decoder belongs to one answer. Knows no model and no torch.

tiktoken and not `tokenizers`: it takes the ranks as they are and is ready in 0.4 s, where `tokenizers` first needs
the 150,000 merges worked out from them.

Text that a user typed never becomes a control token: only what the template wrote does (template.py), the rest is
encoded without looking for them. The original does look for them; that is the one difference.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiktoken import Encoding

from service.models.errors import ModelError
from service.models.postprocess import chatglm3_response
from service.models.template import ChatTemplate, Control, find_template
from service.models.text_decoder import Transformed
from service.models.tokenizer_files import find_file, read_config
from service.protocol import Message
from service.text import BytesDecoder, TextDecoder

log = logging.getLogger(__name__)

# How text is split before the byte pairs are merged: cl100k's rule, with which the ranks were trained.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PREFIX = ("[gMASK]", "<sop>")
_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_NEXT_TURN = "<|assistant|>"
# The family's layout, for a checkpoint without a template of its own (the base model).
_TEMPLATE = (
    "[gMASK]<sop>{% for item in messages %}{% if item['content'] %}"
    "<|{{ item['role'] }}|>\n{{ item['content'] }}{% endif %}{% endfor %}<|assistant|>"
)


class GLM4Tokenizer:
    """A `ChatTokenizer`. Raises `ModelError` when the folder's files cannot be used."""

    def __init__(self, folder: Path) -> None:
        ranks = _read_ranks(find_file(folder, "tokenizer.model"))
        config = read_config(folder)
        self.control_ids = _control_ids(folder, config)
        self._encoding = Encoding(
            "glm-4", pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens=dict(self.control_ids)
        )  # fmt: skip
        self._template = ChatTemplate(_template_source(folder, config), list(self.control_ids), {})
        self.prefix_ids = [self.control_ids[name] for name in _PREFIX]
        self.stop_ids = frozenset(self.control_ids[name] for name in _ENDS)
        # Silent but for the one that divides an answer's turns, which the answer's rule looks for.
        self._control_bytes = {id: b"" for id in self.control_ids.values()}
        self._control_bytes[self.control_ids[_NEXT_TURN]] = _NEXT_TURN.encode()

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the whole prompt, up to where the answer begins. Raises `BadRequest` if the template refuses."""
        ids: list[int] = []
        for piece in self._template.render(messages):
            ids += [self.control_ids[piece.text]] if isinstance(piece, Control) else self.encode(piece)
        return ids if ids[: len(self.prefix_ids)] == self.prefix_ids else [*self.prefix_ids, *ids]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with nothing added; never a control token's."""
        return self._encoding.encode_ordinary(text)

    def token_bytes(self, id: int, /) -> bytes:
        """Exactly the bytes an id stands for; part of a character is possible, a control token has none."""
        control = self._control_bytes.get(id)
        if control is not None:
            return control
        try:
            return self._encoding.decode_single_token_bytes(id)
        except KeyError:  # the matrix has more rows than the vocabulary has tokens
            return b""

    def decoder(self) -> TextDecoder:
        """What the original's `decode` gives with control tokens skipped, but for <|assistant|>."""
        return BytesDecoder(self.token_bytes)

    def answer_decoder(self) -> TextDecoder:
        """What a user sees: decoded, then `process_response`; a tool call stays text."""
        return Transformed(self.decoder(), chatglm3_response())


def _read_ranks(path: Path) -> dict[bytes, int]:
    """tiktoken's text format: a line is a token in base64, a space, its rank."""
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise ModelError(f"{path} is not a list of tiktoken ranks: copy it from the checkpoint again") from None


def _control_ids(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    added = config.get("added_tokens_decoder", {})
    ids = {str(token["content"]): int(id) for id, token in added.items()}
    missing = [name for name in (*_PREFIX, *_ENDS, _NEXT_TURN) if name not in ids]
    if missing:
        raise ModelError(f"{folder}/tokenizer_config.json names no {missing[0]}: copy it from the checkpoint again")
    return ids


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    source = find_template(folder, config)
    if source is not None:
        return source
    log.warning("%s has no chat template (a base model?): the family's usual layout is used", folder)
    return _TEMPLATE
