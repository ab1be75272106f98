"""Messages and text -> token ids, and ids -> bytes, for models with a tokenizer.json.

`encode*` may run on any thread (the tokenizer is not changed after loading); knows no model and no torch.
Text that a user typed never becomes a control token: the template is rendered around stand-ins for the contents, only
the template's own control tokens become ids, and everything else is encoded with the parsing of control tokens off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from service.models.errors import ModelError
from service.models.template import ChatTemplate, Control, find_template
from service.models.tokenizer_files import read_json
from service.protocol import Message
from service.text import BytesDecoder, TextDecoder

_REMEDY = "run `make model`, or copy the checkpoint again"
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# Ends of an assistant's turn that some checkpoints leave out of eos_token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


class HubTokenizer:
    """A `ChatTokenizer` over tokenizer.json and tokenizer_config.json. Raises `ModelError` when they cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        self._tokenizer.encode_special_tokens = True  # in its words: a control token's text is encoded as text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = read_json(folder / "tokenizer_config.json", _REMEDY)
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        self._control_ids = {token.content: id for id, token in added.items() if token.special}
        names = {name: _token_text(config[name]) for name in _TOKEN_NAMES if config.get(name)}
        self._template = ChatTemplate(_template_source(folder, config), list(self._control_ids), names)
        self.stop_ids = self._find_stop_ids(folder, names)
        self._bytes = self._spell_vocabulary(added)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the whole prompt, up to where the answer begins. Raises `BadRequest` if the template refuses."""
        ids: list[int] = []
        for piece in self._template.render(messages):
            ids.extend([self._control_ids[piece.text]] if isinstance(piece, Control) else self.encode(piece))
        return ids

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with nothing added; never a control token's."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, id: int, /) -> bytes:
        """Exactly the bytes an id stands for; part of a character is possible, a control token has none."""
        return self._bytes.get(id, b"")

    def answer_decoder(self) -> TextDecoder:
        """What turns one answer's ids into text."""
        return BytesDecoder(self.token_bytes)

    # --- loading ---------------------------------------------------------------------------------------------------

    def _find_stop_ids(self, folder: Path, names: dict[str, str]) -> frozenset[int]:
        stops = {
            self._control_ids[text] for text in (names.get("eos_token"), *_END_OF_TURN) if text in self._control_ids
        }
        for name in ("generation_config.json", "config.json"):
            declared = read_json(folder / name, _REMEDY).get("eos_token_id") if (folder / name).exists() else None
            stops |= set(declared if isinstance(declared, list) else [declared] if declared is not None else [])
        if not stops:
            raise ModelError(f"{folder} names no end-of-answer token: set eos_token in tokenizer_config.json")
        return frozenset(stops)

    def _spell_vocabulary(self, added: dict[int, AddedToken]) -> dict[int, bytes]:
        """Id -> bytes, for byte-level BPE and for byte-fallback vocabularies (Llama 2, the SentencePiece kind)."""
        is_byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        alphabet = _byte_alphabet()
        spelled = {}
        for text, id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            token = added.get(id)
            if token is not None:
                spelled[id] = b"" if token.special else token.content.encode()
            elif is_byte_level:
                spelled[id] = bytes(alphabet[char] for char in text)
            elif len(text) == 6 and text.startswith("<0x"):
                spelled[id] = bytes([int(text[3:5], 16)])
            else:
                spelled[id] = text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return spelled


def _read_tokenizer(path: Path) -> Any:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise ModelError(f"cannot read {path} ({error}): {_REMEDY}") from None


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    source = find_template(folder, config)
    if source is None:
        raise ModelError(f"{folder} has no chat template: use a model made for chat")
    return source


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where it is printable Latin-1, else the next from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
