"""However an answer is split, its post-processing gives what the rule gives for the whole, and waits for no more."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.models.postprocess import (
    Chain,
    FullWidth,
    Replace,
    Strip,
    Transform,
    chatglm1_response,
    chatglm2_response,
    chatglm3_response,
)
from tests.models.golden import SOURCES, golden

Rule = Callable[[str], str]

# --- The rules, for a whole text ------------------------------------------------------------------------------


def whole_chatglm2(text: str) -> str:
    return text.strip().replace("[[训练时间]]", "2023年")


def whole_full_width(text: str) -> str:
    for mark, wide in zip(",!:;?", "，！：；？", strict=True):
        text = re.sub(rf"([\u4e00-\u9fff]){re.escape(mark)}", rf"\1{wide}", text)
        text = re.sub(rf"{re.escape(mark)}([\u4e00-\u9fff])", rf"{wide}\1", text)
    return text


def whole_chatglm1(text: str) -> str:
    return whole_full_width(whole_chatglm2(text))


def whole_chatglm3(text: str) -> str:
    turns = [turn.strip() for turn in text.split("<|assistant|>")]
    return "\n".join(turn for turn in turns if turn).replace("[[训练时间]]", "2023年")


RULES: list[tuple[Callable[[], Transform], Rule]] = [
    (chatglm1_response, whole_chatglm1),
    (chatglm2_response, whole_chatglm2),
    (chatglm3_response, whole_chatglm3),
    (FullWidth, whole_full_width),
    (Strip, str.strip),
    (lambda: Replace(" n't", "n't"), lambda text: text.replace(" n't", "n't")),
    (lambda: Replace("aab", "-"), lambda text: text.replace("aab", "-")),
    (
        lambda: Chain(Replace(" .", "."), Replace(". ", "!"), Strip()),
        lambda text: text.replace(" .", ".").replace(". ", "!").strip(),
    ),
]

TEXTS = st.lists(
    st.sampled_from(
        ["你", "好", "a", "b", "aa", " ", "\n", "\u3000", ",", "!", ":", ";", "?", ".", "，", "[[训练时间]]", "[[训练",
         "[", "时间]]", "<|assistant|>", "<|assis", "<", "tant|>", " n't", "n't", "'", "2023", "\x1c"]
    ),
    max_size=14,
).map("".join)  # fmt: skip
# What may follow: each can alter what the text before it means.
REPLACED = ("[[训练时间]]", "<|assistant|>", " n't", "aab")
FOLLOWING = ["", "x", "中", " ", "\n", ".", *(word[at:] + "x" for word in REPLACED for at in range(len(word)))]


def run(transform: Transform, text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [*(transform.push(text[start:end]) for start, end in pairwise(edges)), transform.finish()]


BEGUN = "|".join(re.escape(word[:size]) for word in REPLACED[:3] for size in range(len(word) - 1, 0, -1))
WAITING = re.compile(rf"(?:[\s,!:;?]|{BEGUN})*")


def common_prefix(texts: list[str]) -> str:
    shortest = min(texts, key=len)
    same = (size for size in range(len(shortest), -1, -1) if all(text.startswith(shortest[:size]) for text in texts))
    return shortest[: next(same)]


@pytest.mark.parametrize(("make", "rule"), RULES)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=10))
@example(text="你好,", cuts=[])
@example(text="[[训练时间]],", cuts=[3, 5])
@example(text="\n先说<|assistant|>\n \n<|assistant|>get\n{}<|assistant|>", cuts=list(range(60)))
def test_any_split_gives_what_the_rule_gives_for_the_whole(
    make: Callable[[], Transform], rule: Rule, text: str, cuts: list[int]
) -> None:
    assert "".join(run(make(), text, cuts)) == rule(text)


@pytest.mark.parametrize(("make", "rule"), RULES[:6])
@given(text=TEXTS)
def test_what_is_certain_is_not_held_back(make: Callable[[], Transform], rule: Rule, text: str) -> None:
    sent = make().push(text)
    certain = common_prefix([rule(text + after) for after in FOLLOWING])
    assert certain.startswith(sent)
    # No more waits than blanks, marks and begun words that stand right before another begun word.
    assert WAITING.fullmatch(certain, len(sent))


def test_at_most_one_mark_waits_after_a_letter_and_none_after_a_chinese_character() -> None:
    transform = chatglm1_response()
    assert [transform.push(piece) for piece in ("hello", ",", " ", "world", "好", ",")] == [
        "hello", "", "", ", world", "好", "，"
    ]  # fmt: skip


# --- Golden cases -----------------------------------------------------------------------------------------------


def cases(family: str, source: str, tmp_path: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = golden(family, source, tmp_path).data["process_response"]
    assert found
    return found


@pytest.mark.parametrize("source", SOURCES[:2])
@pytest.mark.parametrize(("family", "make"), [("chatglm-6b", chatglm1_response), ("chatglm2-6b", chatglm2_response)])
def test_plain_answers_are_the_originals(
    family: str, make: Callable[[], Transform], source: str, tmp_path: Any
) -> None:
    for case in cases(family, source, tmp_path):
        assert "".join(run(make(), case["in"], list(range(100)))) == case["out"]


@pytest.mark.parametrize("source", SOURCES[:2])
@pytest.mark.parametrize("family", ["chatglm3-6b", "glm-4-9b"])
def test_answers_are_the_originals_and_tool_calls_are_their_text(family: str, source: str, tmp_path: Any) -> None:
    for case in cases(family, source, tmp_path):
        text = "".join(run(chatglm3_response(), case["in"], list(range(100))))
        if isinstance(case.get("out"), str):
            assert text == case["out"]
        elif "appended" in case:  # the original's history has every turn: all of it is there, as text
            turns = [f"{turn['metadata']}\n{turn['content']}".strip() for turn in case["appended"]]
            assert text == "\n".join(turns)
        else:  # what the original could not parse, and so could not answer
            assert text == case["in"].strip()
