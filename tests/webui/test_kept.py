"""What a tab has kept is shown again, and whatever else is stored there is as good as nothing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from webui.history import NOTICE_ID, to_messages, verbatim
from webui.kept import MAX_CHARS, Kept, read_kept


def item(role: str, text: Any, note: str = "") -> dict[str, Any]:
    return {"role": role, "text": text, "note": note}


def stored(*chat: Any, token: Any = "", draft: Any = "", version: Any = 1) -> str:
    return json.dumps({"version": version, "token": token, "chat": list(chat), "draft": draft})


def test_a_conversation_is_kept_with_its_notes_and_the_draft() -> None:
    kept = read_kept(
        stored(item("user", "  a\n\tb"), item("assistant", "c"), item("assistant", "⚠️", NOTICE_ID), draft="d")
    )
    assert [message["content"] for message in kept.messages] == [verbatim(text) for text in ("  a\n\tb", "c", "⚠️")]
    assert [message["metadata"] for message in kept.messages] == [None, None, {"id": NOTICE_ID}]
    assert (kept.resume_token, kept.question, kept.draft) == ("", "", "d")
    assert [message.content for message in to_messages(kept.messages, "e")] == ["  a\n\tb", "c", "e"]


def test_while_an_answer_runs_the_question_is_last_because_the_answer_comes_again() -> None:
    kept = read_kept(
        stored(item("user", "a"), item("assistant", "b"), item("user", "c"), item("assistant", "d"), token="t")
    )
    assert (kept.resume_token, kept.question, len(kept.messages)) == ("t", "c", 3)
    assert read_kept(stored(item("assistant", "d"), token="t")) == Kept()


def test_anything_else_is_nothing() -> None:
    good = item("user", "a")
    assert read_kept(stored(good)).messages
    for value in (
        None, 7, "", "{", "null", "[]", "7", "NaN", "[" * 100_000, stored(good, version=2), stored(good, token=7),
        stored(good, token="t" * 201), stored(item("system", "x")), stored(item("user", ["x"])), stored(7),
        stored(None),
        stored(item("user", "x", "waiting")), stored({"role": "user"}), stored(item("user", "x" * (MAX_CHARS + 1))),
        stored(good, draft=7), json.dumps({"version": 1}),
    ):  # fmt: skip
        assert read_kept(value) == Kept(), str(value)[:80]


def test_a_lone_surrogate_does_not_break_it() -> None:
    assert read_kept(stored(item("user", "a\ud800b"))).messages[0]["content"] == verbatim("a?b")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["version", "token", "chat", "draft", "role", "text", "note"]), inner, max_size=5
        )
    ),
    max_leaves=8,
)


@given(JSON | st.builds(lambda chat: {"version": 1, "token": "", "draft": "", "chat": chat}, JSON))
def test_no_value_raises(value: Any) -> None:
    read_kept(json.dumps(value))
