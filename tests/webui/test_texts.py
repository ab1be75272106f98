"""Both languages say the same, and the browser chooses."""

from __future__ import annotations

import pytest

from webui.texts import SENTENCES, preferred_language


def test_every_sentence_names_the_same_values_in_both_languages() -> None:
    for key, (chinese, english) in SENTENCES.items():
        names = [{part.split("}")[0] for part in text.split("{")[1:]} for text in (chinese, english)]
        assert names[0] == names[1], key


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("en-US,en;q=0.9,zh;q=0.8", "en"),
        ("fr-FR,zh-TW;q=0.7,en;q=0.6", "zh"),
        ("de", "en"),
        ("", "en"),
        ("zh;q=what", "en"),
    ],
)
def test_the_language_is_the_browsers_choice(header: str, language: str) -> None:
    assert preferred_language(header) == language
