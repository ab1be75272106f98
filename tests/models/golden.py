"""What the originals gave, for the tests: a trimmed copy under tests/data, and more where the machine has it.

The optional golden data are looked for in CHATGLM_GOLDEN, or in ../shared/golden beside the repository: the whole of
the stand-in data, and cases made with the published vocabularies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.protocol import Message
from service.text import TextDecoder

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data"
OPTIONAL = Path(os.environ.get("CHATGLM_GOLDEN") or ROOT.parent / "shared" / "golden")
SOURCES = ("own", "stand-in", "published")

# What users might type to break out of their turn, in any family's words.
CONTROL_TEXTS = (
    "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "sop", "eop", "<s>", "</s>", "<unk>", "<pad>", "<ENC>",
    "<dBLOCK>", "<unused_0>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<0x41>", "<n>", "<|tab|>",
    "<|blank_4|>", "[Round 1]", "问：", "答：", "{{ x }}", "{% endfor %}", "<|", "|>", "[", "]", "<", ">", "▁",
)  # fmt: skip


@dataclass(frozen=True)
class Golden:
    checkpoint: Path  # the folder with the tokenizer's files
    data: dict[str, Any]


def golden(family: str, source: str, tmp_path: Path) -> Golden:
    """`source`: "own" = the trimmed copy, the others are optional. Skips the test when they are not here."""
    if source == "own":
        return Golden(DATA / family / "checkpoint", _read(DATA / family / "text.json"))
    if not OPTIONAL.is_dir():
        pytest.skip(f"no optional golden data in {OPTIONAL}: set CHATGLM_GOLDEN")
    if source == "stand-in":
        return Golden(OPTIONAL / family / "checkpoint", _read(OPTIONAL / family / "golden.json"))
    return Golden(
        _published_checkpoint(family, tmp_path), _read(OPTIONAL / "real-tokenizers" / f"{family}.golden.json")
    )


def _published_checkpoint(family: str, tmp_path: Path) -> Path:
    """The published vocabulary and config, side by side as in a checkpoint."""
    folder = {"chatglm2-6b": "chatglm2-6b_chatglm3-6b", "chatglm3-6b": "chatglm2-6b_chatglm3-6b"}.get(family, family)
    config = {"glm-4-9b": "glm-4-9b-chat"}.get(family, family)
    for path in (
        *(OPTIONAL / "real-tokenizers" / folder).iterdir(),
        OPTIONAL / "real-configs" / config / "tokenizer_config.json",
    ):
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def messages_of(conversation: dict[str, Any]) -> list[Message]:
    if "messages" in conversation:
        return [Message(one["role"], one["content"]) for one in conversation["messages"]]
    messages = []
    for question, answer in conversation["history"]:
        messages += [Message("user", question), Message("assistant", answer)]
    return [*messages, Message("user", conversation["query"])]


def chat_responses(case: Golden, name: str) -> list[str]:
    """What the original's chat() answered to this conversation in at most 12 tokens; nothing if it was not asked."""
    return [one["chat_greedy12_response"] for one in case.data["conversations"] if one["name"] == name]


def is_injection(text: str) -> bool:
    """Whether the originals turn part of the text into control tokens, which is the one deliberate difference."""
    return any(word in text for word in ("[MASK]", "[gMASK]", "<sop>", "<eop>", "<pad>", "<unk>", "<|endoftext|>"))


def decode(decoder: TextDecoder, ids: Iterable[int]) -> str:
    return "".join(map(decoder.push, ids)) + decoder.finish()
