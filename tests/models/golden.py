"""What the originals gave, for the tests: a trimmed copy under tests/data, and more where the machine has it.

The optional golden data are looked for in CHATGLM_GOLDEN, or in ../shared/golden beside the repository: the whole of
the stand-in data, and cases made with the published vocabularies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
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
        return Golden(DATA / family / "checkpoint", read_json(DATA / family / "text.json"))
    if not OPTIONAL.is_dir():
        pytest.skip(f"no optional golden data in {OPTIONAL}: set CHATGLM_GOLDEN")
    if source == "stand-in":
        return Golden(OPTIONAL / family / "checkpoint", read_json(OPTIONAL / family / "golden.json"))
    return Golden(
        _published_checkpoint(family, tmp_path), read_json(OPTIONAL / "real-tokenizers" / f"{family}.golden.json")
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


def read_json(path: Path) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Asked:
    """A conversation, and what the original answers greedily in so many tokens."""

    name: str
    messages: tuple[Message, ...]
    max_new_tokens: int
    text: str


def asked(family: str, data: dict[str, Any]) -> list[Asked]:
    """The conversations whose greedy ids, or whose chat()'s answer, the original left."""
    conversations = {one["name"]: one for one in data["conversations"]}
    found = [
        Asked(
            one["name"], tuple(messages_of(conversations[one["name"]])), len(one["generated_ids"]),
            _text_of(data, one),
        )
        for one in data["generations"]
        if one["name"] in conversations
    ]  # fmt: skip
    size = 11 if family == "chatglm3-6b" else 12  # ChatGLM3's chat() drops the last token
    for one in conversations.values():
        if "chat_greedy12_response" in one and one["name"] not in ("injection", *(case.name for case in found)):
            found.append(Asked(one["name"], tuple(messages_of(one)), size, one["chat_greedy12_response"]))
    return found


def _text_of(data: dict[str, Any], generation: dict[str, Any]) -> str:
    """Without the control tokens that ChatGLM3's decoder spells out."""
    if set(generation["generated_ids"]) <= set(data.get("stop_ids", ())):
        return ""
    text: str = generation.get("processed") or generation.get("decoded_skip_special") or generation["decoded"]
    for control in ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"):
        text = text.replace(control, "")
    return text


def is_injection(text: str) -> bool:
    """Whether the originals turn part of the text into control tokens, which is the one deliberate difference."""
    return any(word in text for word in ("[MASK]", "[gMASK]", "<sop>", "<eop>", "<pad>", "<unk>", "<|endoftext|>"))


def check_steps(data: dict[str, Any], make: Callable[[], TextDecoder], shown: Callable[[str], str] = str) -> None:
    """After each id of an answer the text is the original's, as `shown`, and what was sent before never changes."""
    steps = [(one["generated_ids"], one["decoded_steps"]) for one in data.get("generations", ())]
    steps += [(one["ids"], one["steps"]) for one in data.get("decode_steps", ())]
    assert steps
    for ids, texts in steps:
        expected = list(map(shown, texts))
        assert [decode(make(), ids[: end + 1]) for end in range(len(ids))] == expected
        decoder = make()
        sent = ""
        for id, so_far in zip(ids, expected, strict=True):
            sent += decoder.push(id)
            assert so_far.startswith(sent)


def decode(decoder: TextDecoder, ids: Iterable[int]) -> str:
    return "".join(map(decoder.push, ids)) + decoder.finish()
