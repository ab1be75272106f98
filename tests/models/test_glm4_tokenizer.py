"""GLM-4: the original's ids, prompts and texts; but a user's text never becomes a control token."""

from __future__ import annotations

import base64
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.models.errors import ModelError
from service.models.glm4_tokenizer import GLM4Tokenizer
from service.protocol import Message
from tests.models.golden import (
    CONTROL_TEXTS,
    DATA,
    Golden,
    check_steps,
    decode,
    is_injection,
    messages_of,
)

FAMILY = "glm-4-9b"
CHECKPOINT = DATA / FAMILY / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer(case: Golden) -> GLM4Tokenizer:
    return GLM4Tokenizer(case.checkpoint)


@pytest.fixture(scope="module")
def small() -> GLM4Tokenizer:
    return GLM4Tokenizer(CHECKPOINT)


def without_controls(text: str) -> str:
    """The original decodes control tokens as text, with spaces around them; here they are silent."""
    return re.sub(r" <\|[a-z_]+\|>", "", text)


def test_prompts_are_the_originals(case: Golden, tokenizer: GLM4Tokenizer) -> None:
    for conversation in case.data["conversations"]:
        ids = tokenizer.encode_chat(messages_of(conversation))
        if is_injection(conversation["messages"][0]["content"]):
            assert ids != conversation["input_ids"]
            assert ids == conversation.get("input_ids_by_build_single_message", ids)
        else:
            assert ids == conversation["input_ids"]


def test_texts_have_the_originals_ids_and_decode_to_the_same(case: Golden, tokenizer: GLM4Tokenizer) -> None:
    for one in case.data["tokenizer_cases"]:
        ids = one["ids_no_special"]
        if not is_injection(one["text"]):
            assert tokenizer.encode(one["text"]) == ids
        assert decode(tokenizer.decoder(), ids) == one["decode_skip_special"]


def test_answers_decode_step_by_step_as_the_originals(case: Golden, tokenizer: GLM4Tokenizer) -> None:
    check_steps(case.data, tokenizer.decoder, without_controls)


def test_stop_ids_are_the_originals(case: Golden, tokenizer: GLM4Tokenizer) -> None:
    if "stop_ids" in case.data:
        assert sorted(tokenizer.stop_ids) == sorted(case.data["stop_ids"])


@given(st.lists(st.one_of(st.sampled_from(CONTROL_TEXTS), st.text(max_size=3)), max_size=8).map("".join))
def test_a_users_text_never_becomes_a_control_token(small: GLM4Tokenizer, text: str) -> None:
    assert all(id < 1000 for id in small.encode(text))
    assert decode(small.decoder(), small.encode(text)) == text
    messages = [Message("system", text), Message("user", text), Message("assistant", text), Message("user", text)]
    ids = small.encode_chat(messages)
    roles = [1006, 1007, 1008, 1007] if text else []  # the template leaves empty messages out
    assert [id for id in ids if id >= 1000] == [*small.prefix_ids, *roles, 1008]


def test_ids_beyond_the_vocabulary_and_control_ids_are_silent(small: GLM4Tokenizer) -> None:
    for id in (1000, 1010, 1014, 1023, 10**6):
        assert small.token_bytes(id) == b""


def test_an_answer_is_shown_stripped_and_its_turns_on_lines_of_their_own(small: GLM4Tokenizer) -> None:
    call = small.encode('get_weather\n{"city": "北京"}')
    ids = [*small.encode("\n先说一句"), small.control_ids["<|assistant|>"], *call]
    assert decode(small.answer_decoder(), ids) == '先说一句\nget_weather\n{"city": "北京"}'


# --- Folders that differ ------------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, **changes: object) -> Path:
    shutil.copyfile(CHECKPOINT / "tokenizer.model", tmp_path / "tokenizer.model")
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text("utf-8")) | changes
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return tmp_path


MESSAGES = [Message("system", "s"), Message("user", "hi <sop>"), Message("assistant", ""), Message("user", "再见")]


def test_a_base_model_without_a_template_gets_the_familys_layout(
    small: GLM4Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        base = GLM4Tokenizer(folder_with(tmp_path, chat_template=None))
    assert "no chat template" in caplog.text
    assert base.encode_chat(MESSAGES) == small.encode_chat(MESSAGES)


def test_a_template_that_leaves_the_prefix_out_gets_it(small: GLM4Tokenizer, tmp_path: Path) -> None:
    template = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}<|assistant|>"
    bare = GLM4Tokenizer(folder_with(tmp_path, chat_template=template))
    assert bare.encode_chat(MESSAGES[:2]) == small.encode_chat(MESSAGES[:2])


def test_a_template_may_have_a_name_or_a_file(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "[gMASK]<sop>named"}]
    folder = folder_with(tmp_path, chat_template=named)
    assert decode(GLM4Tokenizer(folder).decoder(), GLM4Tokenizer(folder).encode_chat(MESSAGES)) == "named"
    (folder / "chat_template.jinja").write_text("[gMASK]<sop>file")
    assert decode(GLM4Tokenizer(folder).decoder(), GLM4Tokenizer(folder).encode_chat(MESSAGES)) == "file"


def test_digits_are_merged_in_threes_at_most(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with (folder / "tokenizer.model").open("ab") as file:
        for rank, digits in enumerate((b"12", b"123", b"1234"), start=1014):
            file.write(b"%s %d\n" % (base64.b64encode(digits), rank))
    tokenizer = GLM4Tokenizer(folder)
    assert tokenizer.encode("1234") == [1015, *tokenizer.encode("4")]


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"names no \[gMASK\]"):
        GLM4Tokenizer(folder_with(tmp_path, added_tokens_decoder={}))
    folder = folder_with(tmp_path)
    for broken in (b"\x0a\x0b\x0c", b"YQ== 0 1\n", b"**** 0\n", b"YQ== x\n"):
        (folder / "tokenizer.model").write_bytes(broken)
        with pytest.raises(ModelError, match="not a list of tiktoken ranks"):
            GLM4Tokenizer(folder)
