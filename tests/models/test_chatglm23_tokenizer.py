"""ChatGLM2 and ChatGLM3: the originals' ids, prompts and texts; a user's text never becomes a control token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.models.chatglm23_tokenizer import ChatGLM2Tokenizer, ChatGLM3Tokenizer
from service.protocol import Message
from tests.models.golden import (
    CONTROL_TEXTS,
    DATA,
    SOURCES,
    Golden,
    chat_responses,
    check_steps,
    decode,
    golden,
    messages_of,
)

Tokenizer = ChatGLM2Tokenizer | ChatGLM3Tokenizer
CLASSES: dict[str, type[Tokenizer]] = {"chatglm2-6b": ChatGLM2Tokenizer, "chatglm3-6b": ChatGLM3Tokenizer}
V2 = ChatGLM2Tokenizer(DATA / "chatglm2-6b" / "checkpoint")
V3 = ChatGLM3Tokenizer(DATA / "chatglm3-6b" / "checkpoint")


@pytest.fixture(scope="module", params=[(family, source) for family in CLASSES for source in SOURCES], ids="-".join)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Golden, Tokenizer]:
    family, source = request.param
    case = golden(family, source, tmp_path_factory.mktemp("checkpoint"))
    return case, CLASSES[family](case.checkpoint)


def test_prompts_are_the_originals(both: tuple[Golden, Tokenizer]) -> None:
    case, tokenizer = both
    for conversation in case.data["conversations"]:
        messages = messages_of(conversation)
        assert tokenizer.encode_chat(messages) == conversation["input_ids"]
        if isinstance(tokenizer, ChatGLM2Tokenizer):
            assert tokenizer.prompt_text(messages) == conversation["prompt"]


def test_chatglm3_has_roles_tools_and_observations(both: tuple[Golden, Tokenizer]) -> None:
    case, tokenizer = both
    if not isinstance(tokenizer, ChatGLM3Tokenizer):
        return
    for conversation in case.data.get("role_conversations", ()):
        ids = list(tokenizer.prefix_ids)
        for message in conversation["messages"]:
            ids += tokenizer.message_ids(message["role"], content_of(message), message.get("metadata", ""))
        assert [*ids, tokenizer.control_ids["<|assistant|>"]] == conversation["input_ids"]


def content_of(message: dict[str, Any]) -> str:
    tools = message.get("tools")
    content: str = message["content"]
    return content if tools is None else f"{content}\n{json.dumps(tools, indent=4, ensure_ascii=False)}"


def test_texts_have_the_originals_ids_and_decode_to_the_same(both: tuple[Golden, Tokenizer]) -> None:
    case, tokenizer = both
    for one in case.data["tokenizer_cases"]:
        assert tokenizer.encode(one["text"]) == one["ids_no_special"]
        assert decode(tokenizer.decoder(), one["ids_no_special"]) == one["decode_no_special"]
        if "decode_with_special" in one:
            ids = [*tokenizer.prefix_ids, *one["ids_no_special"]]
            assert decode(tokenizer.decoder(), ids) == one["decode_with_special"]


def test_answers_decode_step_by_step_as_the_originals(both: tuple[Golden, Tokenizer]) -> None:
    case, tokenizer = both
    check_steps(case.data, tokenizer.decoder)


def test_answers_are_processed_as_the_originals(both: tuple[Golden, Tokenizer]) -> None:
    case, tokenizer = both
    size = 11 if isinstance(tokenizer, ChatGLM3Tokenizer) else 12  # ChatGLM3's chat() drops the last token
    for one in case.data.get("generations", ()):
        for response in chat_responses(case, one["name"]):
            assert decode(tokenizer.answer_decoder(), one["generated_ids"][:size]) == response


def test_stop_ids_are_the_originals(both: tuple[Golden, Tokenizer]) -> None:
    case, tokenizer = both
    if "stop_ids" in case.data:
        assert sorted(tokenizer.stop_ids) == sorted(case.data["stop_ids"])


@pytest.mark.parametrize("tokenizer", [V2, V3], ids=list(CLASSES))
@given(text=st.lists(st.one_of(st.sampled_from(CONTROL_TEXTS), st.text(max_size=3)), max_size=8).map("".join))
def test_a_users_text_never_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(2 < id < 1000 for id in ids)
    messages = [Message("system", text), Message("user", text), Message("assistant", text), Message("user", text)]
    controls = [id for id in tokenizer.encode_chat(messages) if id <= 2 or id >= 1000]
    roles = [1005, 1006, 1007, 1006, 1007] if tokenizer is V3 else []
    assert controls == [*tokenizer.prefix_ids, *roles]


@given(st.text(max_size=40))
def test_a_text_survives(text: str) -> None:
    text = text.replace("▁", " ")  # sentencepiece's sign for a space
    assert decode(V2.decoder(), V2.encode(text)) == text


def test_chatglm2s_system_text_goes_in_front_of_the_first_question() -> None:
    messages = [Message("system", "请用中文回答。"), Message("user", "hi")]
    assert V2.prompt_text(messages) == "[Round 1]\n\n问：请用中文回答。\nhi\n\n答："


def test_padding_and_control_ids() -> None:
    for id in (0, 1, 2, 1009, 1023, 10**6):
        assert V2.token_bytes(id) == V3.token_bytes(id) == b""
    assert V2.token_bytes(1003) == b""  # ChatGLM2 keeps silent about control tokens, ChatGLM3 spells them
    assert V3.token_bytes(1007) == b"<|assistant|>"


def test_an_answer_is_shown_stripped_and_its_turns_on_lines_of_their_own() -> None:
    ids = [*V3.encode("\n 你好 "), V3.control_ids["<|assistant|>"], *V3.encode("get_weather\n {'a': 1}\n")]
    assert decode(V3.answer_decoder(), ids) == "你好\nget_weather\n {'a': 1}"
    assert decode(V2.answer_decoder(), V2.encode(" [[训练时间]]之前 ")) == "2023年之前"
