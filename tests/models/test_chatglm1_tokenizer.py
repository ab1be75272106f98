"""ChatGLM-6B: the original's ids, prompts and texts; but a user's text never becomes a control token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.models.chatglm1_tokenizer import ChatGLM1Tokenizer
from service.models.errors import ModelError
from service.protocol import Message
from tests.models.golden import (
    CONTROL_TEXTS,
    DATA,
    Golden,
    chat_responses,
    check_steps,
    decode,
    is_injection,
    messages_of,
)

FAMILY = "chatglm-6b"
# [MASK] … <dBLOCK> stand in a row in the vocabulary; <n>, <|tab|> and <|blank_k|> are white space, not control.
CONTROLS = ("<s>", "</s>", "<pad>", "<unk>", "[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>",
            "<dBLOCK>")  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(case: Golden) -> ChatGLM1Tokenizer:
    return ChatGLM1Tokenizer(case.checkpoint)


@pytest.fixture(scope="module")
def small() -> ChatGLM1Tokenizer:
    return ChatGLM1Tokenizer(DATA / FAMILY / "checkpoint")


def test_prompts_are_the_originals(case: Golden, tokenizer: ChatGLM1Tokenizer) -> None:
    for conversation in case.data["conversations"]:
        messages = messages_of(conversation)
        assert tokenizer.prompt_text(messages) == conversation["prompt"]
        if not is_injection(conversation["prompt"]):
            assert tokenizer.encode_chat(messages) == conversation["input_ids"]


def test_texts_have_the_originals_ids_and_decode_to_the_same(case: Golden, tokenizer: ChatGLM1Tokenizer) -> None:
    for one in case.data["tokenizer_cases"]:
        ids = one["ids_no_special"]
        assert decode(tokenizer.decoder(), ids) == one["decode_no_special"]
        if not is_injection(one["text"]):
            assert tokenizer.encode(one["text"]) == ids


def test_answers_decode_step_by_step_as_the_originals(case: Golden, tokenizer: ChatGLM1Tokenizer) -> None:
    check_steps(case.data, tokenizer.decoder)


def test_answers_are_processed_as_the_originals(case: Golden, tokenizer: ChatGLM1Tokenizer) -> None:
    for one in case.data.get("generations", ()):
        ids = [id for id in one["generated_ids"] if id not in tokenizer.stop_ids]
        assert decode(tokenizer.answer_decoder(), ids) == one["processed"]
        for response in chat_responses(case, one["name"]):
            assert decode(tokenizer.answer_decoder(), ids[:12]) == response


@given(st.lists(st.one_of(st.sampled_from(CONTROL_TEXTS), st.text(max_size=3)), max_size=8).map("".join))
def test_a_users_text_never_becomes_a_control_token(small: ChatGLM1Tokenizer, text: str) -> None:
    controls = {small._id(name) for name in CONTROLS if name != "<unk>"} | {0}
    assert controls.isdisjoint(small.encode(text))
    messages = [Message("system", text), Message("user", text), Message("assistant", text), Message("user", text)]
    ids = small.encode_chat(messages)
    assert ids[-2:] == small.suffix_ids
    assert controls.isdisjoint(ids[:-2])


def test_a_system_text_goes_in_front_of_the_first_question(small: ChatGLM1Tokenizer) -> None:
    system, first = Message("system", "请用中文回答。"), Message("user", "hi")
    answer, second = Message("assistant", "你好"), Message("user", "再见")
    assert small.prompt_text([system, first]) == "请用中文回答。\nhi"
    told = "[Round 0]\n问：请用中文回答。\nhi\n答：你好\n[Round 1]\n问：再见\n答："
    assert small.prompt_text([system, first, answer, second]) == told


@given(st.text(alphabet=" \t\nab你", max_size=200))
def test_inner_white_space_survives(small: ChatGLM1Tokenizer, text: str) -> None:
    text = f"a{text}b"
    decoded = b"".join(map(small.token_bytes, small.encode(text))).decode()
    assert decoded.removeprefix(" ") == text


def test_stop_and_padding_ids_are_silent(small: ChatGLM1Tokenizer) -> None:
    assert small.stop_ids == {489}
    for id in (489, 3, 828, 831, 10**6):
        assert small.token_bytes(id) == b""
        assert decode(small.answer_decoder(), [58, id]) == "你好"


def test_padding_is_passed_over_even_inside_a_character(small: ChatGLM1Tokenizer) -> None:
    first, *others = (small._id(f"<0x{byte:02X}>") for byte in "你".encode())
    assert decode(small.decoder(), [first, 3, *others]) == "你"


def test_blanks_are_cleaned_up_before_marks_and_english_endings(small: ChatGLM1Tokenizer) -> None:
    text = "a , b . c ! d ? e ' f n't g 'm h 's i 've j 're k"
    assert decode(small.decoder(), small.encode(text)) == "a, b. c! d? e'fn't g'm h's i've j're k"


@pytest.mark.parametrize("cleans_up", [False, True])
def test_the_config_may_switch_the_cleaning_of_blanks_off(tmp_path: Path, cleans_up: bool) -> None:
    shutil.copyfile(DATA / FAMILY / "checkpoint" / "ice_text.model", tmp_path / "ice_text.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": cleans_up}))
    tokenizer = ChatGLM1Tokenizer(tmp_path)
    assert decode(tokenizer.decoder(), tokenizer.encode("a . b 's")) == ("a. b's" if cleans_up else "a . b 's")


def test_an_old_revision_is_refused(tmp_path: Path) -> None:
    shutil.copyfile(DATA / FAMILY / "checkpoint" / "ice_text.model", tmp_path / "ice_text.model")
    (tmp_path / "tokenizer_config.json").write_text('{"num_image_tokens": 20000}')
    with pytest.raises(ModelError, match="old revision"):
        ChatGLM1Tokenizer(tmp_path)


def test_another_familys_vocabulary_is_refused(tmp_path: Path) -> None:
    shutil.copyfile(DATA / "chatglm2-6b" / "checkpoint" / "tokenizer.model", tmp_path / "ice_text.model")
    with pytest.raises(ModelError, match=r"no piece <n>"):
        ChatGLM1Tokenizer(tmp_path)
