"""Messages become rounds of question and answer, and no text is lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.models.rounds import to_rounds
from service.protocol import Message


def S(text: str) -> Message:
    return Message("system", text)


def U(text: str) -> Message:
    return Message("user", text)


def A(text: str) -> Message:
    return Message("assistant", text)


@pytest.mark.parametrize(
    ("messages", "rounds", "question"),
    [
        ([U("q")], [], "q"),
        ([U("q1"), A("a1"), U("q2")], [("q1", "a1")], "q2"),
        ([U("q1"), A(""), U("q2")], [("q1", "")], "q2"),
        ([S("be kind"), U("q")], [], "be kind\nq"),
        ([S("be kind"), S("be brief"), U("q1"), A("a1"), U("q2")], [("be kind\nbe brief\nq1", "a1")], "q2"),
        ([U("q1"), A("a1"), S("now in English"), U("q2")], [("q1", "a1")], "now in English\nq2"),
        ([U("q1"), U("q2")], [], "q1\nq2"),
        ([A("hello"), U("q")], [("", "hello")], "q"),
        ([U("q1"), A("a1"), A("a2"), U("q2")], [("q1", "a1"), ("", "a2")], "q2"),
        ([U("q1"), A("a1"), S("s"), A("a2"), U("q2")], [("q1", "a1"), ("", "a2")], "s\nq2"),
        ([S("only this")], [], "only this"),
    ],
)
def test_messages_become_rounds(messages: list[Message], rounds: list[tuple[str, str]], question: str) -> None:
    assert to_rounds(messages) == (rounds, question)


@given(st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=8))
def test_every_text_is_in_exactly_one_place(roles: list[str]) -> None:
    messages = [Message(role, f"<{index}>") for index, role in enumerate(roles)]  # type: ignore[arg-type]
    rounds, question = to_rounds(messages)
    everything = "\n".join([text for pair in rounds for text in pair] + [question])
    assert all(everything.count(message.content) == 1 for message in messages)
