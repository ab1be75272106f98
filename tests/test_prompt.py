"""What stays and what goes when a conversation is longer than the context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.prompt import build_prompt
from service.protocol import Message, TooLong
from tests.toy import ToyTokenizer

TOKENIZER = ToyTokenizer()
TEXTS = st.text(st.characters(codec="ascii"), max_size=30)


def chat(*turns: tuple[str, str]) -> list[Message]:
    return [Message(role, text) for role, text in turns]  # type: ignore[arg-type]


def test_what_fits_is_kept_whole() -> None:
    messages = chat(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    prompt = build_prompt(TOKENIZER, messages, context_limit=100, max_new_tokens=10)
    assert prompt.dropped == () and prompt.ids == TOKENIZER.encode_chat(messages)


def test_the_oldest_turns_go_as_a_whole_and_the_system_message_stays() -> None:
    messages = chat(
        ("system", "s" * 10), ("user", "a" * 20), ("assistant", "b" * 20), ("user", "c" * 20), ("assistant", "d"),
        ("user", "e"),
    )  # fmt: skip
    prompt = build_prompt(TOKENIZER, messages, context_limit=80, max_new_tokens=1000)
    assert prompt.dropped == (1, 2)
    assert prompt.ids == TOKENIZER.encode_chat([messages[0], *messages[3:]])


def test_the_last_turn_is_kept_with_little_room_and_refused_with_none() -> None:
    # Content, role and end mark, the assistant's role: 3 tokens more than the text.
    messages = chat(("user", "x" * 81))
    assert len(build_prompt(TOKENIZER, messages, context_limit=100, max_new_tokens=1000).ids) == 84
    with pytest.raises(TooLong, match="takes 85 tokens with its prompt; at most 84 of the context's 100"):
        build_prompt(TOKENIZER, chat(("user", "x" * 82)), context_limit=100, max_new_tokens=1000)


@given(
    st.lists(TEXTS, max_size=2),
    st.lists(st.tuples(TEXTS, TEXTS), max_size=6),
    st.integers(40, 200),
    st.integers(1, 300),
)
def test_no_more_is_dropped_than_must_be(
    system: list[str], turns: list[tuple[str, str]], limit: int, max_new_tokens: int
) -> None:
    head = chat(*(("system", text) for text in system))
    pairs = [chat(("user", question), ("assistant", answer)) for question, answer in turns]
    last = Message("user", "last")

    def ids(num_dropped: int) -> list[int]:
        return TOKENIZER.encode_chat([*head, *(message for pair in pairs[num_dropped:] for message in pair), last])

    messages = [*head, *(message for pair in pairs for message in pair), last]
    must_fit = limit - min(max_new_tokens, 16)
    should_fit = min(must_fit, limit - min(max_new_tokens, limit // 4))
    fitting = [number for number in range(len(pairs) + 1) if len(ids(number)) <= should_fit]
    num_dropped = fitting[0] if fitting else len(pairs)
    if len(ids(num_dropped)) > must_fit:
        with pytest.raises(TooLong):
            build_prompt(TOKENIZER, messages, context_limit=limit, max_new_tokens=max_new_tokens)
        return
    prompt = build_prompt(TOKENIZER, messages, context_limit=limit, max_new_tokens=max_new_tokens)
    assert prompt.ids == ids(num_dropped)
    assert prompt.dropped == tuple(range(len(head), len(head) + 2 * num_dropped))
