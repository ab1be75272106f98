"""Chat templates: what the template wrote is control, what a user wrote is text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.models.errors import ModelError
from service.models.template import ChatTemplate, Control
from service.protocol import BadRequest, Message
from tests.models.conftest import TEMPLATE

CONTROLS = ["<|im_start|>", "<|im_end|>", "<|im|>", "</s>"]
START, END = Control("<|im_start|>"), Control("<|im_end|>")


def template(source: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate(source, CONTROLS, {"bos_token": "<|im|>", "eos_token": "</s>"})


def test_neighbouring_text_of_template_and_contents_is_one_piece() -> None:
    pieces = template().render([Message("user", "hi"), Message("assistant", "yes")])
    assert pieces == [
        START, "user\nhi", END, "\n", START, "assistant\nyes", END, "\n", START, "assistant\n",
    ]  # fmt: skip


@given(st.lists(st.text() | st.sampled_from([*CONTROLS, "{{ messages }}", "{% raw %}"]), min_size=1, max_size=4))
def test_contents_never_become_control_tokens_or_template_code(contents: list[str]) -> None:
    messages = [Message("user" if index % 2 == 0 else "assistant", text) for index, text in enumerate(contents)]
    pieces = template().render(messages)
    assert [piece for piece in pieces if isinstance(piece, Control)] == [START, END] * len(contents) + [START]
    texts = [piece for piece in pieces if isinstance(piece, str)]
    wanted = [part for message in messages for part in (f"{message.role}\n{message.content}", "\n")]
    assert texts == [*wanted, "assistant\n"]


def test_a_template_that_strips_contents_still_does() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    assert template(source).render([Message("user", "  a b\n")]) == [Control("<|im|>"), "a b", Control("</s>")]


def test_a_template_sees_which_contents_are_empty() -> None:
    source = "{% for m in messages %}{% if m['content'] %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    assert template(source).render([Message("system", ""), Message("user", "x")]) == ["[x]"]


def test_a_template_may_refuse_messages() -> None:
    source = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}ok"
    with pytest.raises(BadRequest, match="no system role"):
        template(source).render([Message("system", "x")])


@pytest.mark.parametrize("source", ["{% for %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ nothing() }}"])
def test_a_broken_or_hostile_template_is_refused_at_load(source: str) -> None:
    with pytest.raises(ModelError, match="tokenizer_config"):
        template(source)
