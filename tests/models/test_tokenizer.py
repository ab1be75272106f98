"""The tokenizer against transformers' own, and control tokens out of a user's reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.models.errors import ModelError
from service.models.tokenizer import HubTokenizer
from service.protocol import Message
from tests.models.conftest import DEFAULT_FOLDER, MakeFolder

CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>")
# The model's vocabulary lacks six control characters and the bytes F1 and F2 (planes 4 to 11, none assigned): they get
# no ids at all, here as in transformers.
_CHARACTERS = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")
TEXTS = st.text(_CHARACTERS, max_size=60) | st.sampled_from(
    ["don't  stop", "a1b22 333", "  1", "½x²", "你好，世界\n\n", "\t\r\n é😀 "]
)
ROLES = st.sampled_from(["user", "assistant", "system"])


@pytest.fixture(scope="module")
def tokenizer(default_folder: Path) -> HubTokenizer:
    return HubTokenizer(default_folder)


@pytest.fixture(scope="module")
def reference(default_folder: Path) -> Any:
    """transformers over the same tokenizer.json: its template code, its parsing of control tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_folder)


@settings(deadline=None, max_examples=150)
@given(turns=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=5))
def test_chat_ids_equal_transformers(turns: list[tuple[Any, str]], tokenizer: HubTokenizer, reference: Any) -> None:
    dicts = [{"role": role, "content": text} for role, text in turns]
    wanted = reference.apply_chat_template(dicts, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat([Message(role, text) for role, text in turns]) == wanted


def test_the_vocabulary_is_the_one_transformers_reads_from_the_gguf_file(
    default_folder: Path, tokenizer: HubTokenizer
) -> None:
    """transformers' GGUF conversion leaves SmolLM's digit splitting out, so texts without numbers are compared."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_folder, gguf_file=next(default_folder.glob("*.gguf")).name)
    for text in ("What is the capital of France?", "  don't\n\n\tstop… 早上好 😀é", "def f(x):\n    return x\n"):
        assert tokenizer.encode(text) == theirs.encode(text)


@settings(deadline=None, max_examples=150)
@given(parts=st.lists(TEXTS | st.sampled_from(CONTROLS), max_size=6))
def test_a_users_text_never_becomes_a_control_token_and_survives(parts: list[str], tokenizer: HubTokenizer) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert not any(id < 17 for id in ids)  # this vocabulary's control tokens
    chat = tokenizer.encode_chat([Message("user", text)])
    empty = tokenizer.encode_chat([Message("user", "")])
    assert [id for id in chat if id < 17] == [id for id in empty if id < 17]
    rendered = b"".join(map(tokenizer.token_bytes, chat)).decode()
    assert rendered == (
        "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
        f"user\n{text}\nassistant\n"
    )  # fmt: skip


def test_control_tokens_have_no_bytes_and_the_answer_ends_at_one(tokenizer: HubTokenizer) -> None:
    assert tokenizer.stop_ids == {2}
    assert [tokenizer.token_bytes(id) for id in (0, 1, 2, 10**9)] == [b""] * 4


def test_a_character_of_several_tokens_comes_in_exact_bytes(tokenizer: HubTokenizer) -> None:
    ids = tokenizer.encode("龘")
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "龘".encode()


def test_stop_ids_come_from_every_file_that_names_them(make_folder: MakeFolder) -> None:
    folder, _ = make_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 5]}))
    assert HubTokenizer(folder).stop_ids == {257, 5}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "cannot read"),
        ("tokenizer_config.json", "{", "cannot read"),
        ("tokenizer_config.json", "{}", "no chat template"),
    ],
)
def test_files_that_cannot_be_used_are_refused(name: str, content: str, words: str, make_folder: MakeFolder) -> None:
    folder, _ = make_folder()
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=words):
        HubTokenizer(folder)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="make model"):
        HubTokenizer(tmp_path)


def test_the_default_folder_is_the_one_make_prepares() -> None:
    assert DEFAULT_FOLDER.name == "smollm2-135m-instruct"
