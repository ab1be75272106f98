"""Messages → rounds of question and answer, for the families whose prompt is numbered rounds (ChatGLM-6B, ChatGLM2).

Pure. These families know no system messages: such a text goes in front of the question that follows it, so the usual
one, at the beginning, goes in front of the first question.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.protocol import Message

Round = tuple[str, str]  # question, answer


def to_rounds(messages: Sequence[Message]) -> tuple[list[Round], str]:
    """The rounds that are over, and the question to answer now.

    Questions in a row are one question; an answer without a question (its turn was dropped) has an empty one.
    """
    rounds: list[Round] = []
    question: list[str] = []
    is_asked = False
    for message in messages:
        if message.role != "assistant":
            question.append(message.content)
            is_asked = is_asked or message.role == "user"
        elif is_asked or not rounds:
            rounds.append(("\n".join(question), message.content))
            question, is_asked = [], False
        else:  # a second answer in a row: a system text before it still waits for its question
            rounds.append(("", message.content))
    return rounds, "\n".join(question)
