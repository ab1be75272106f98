"""Messages → token ids within the context, and which messages were left out.

Pure: the tokenizer is passed in. The system messages and the newest turns stay, the oldest turns go, whole turns at
a time, until the answer has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from service.protocol import Message, TooLong

# An answer gets at least this much room, else the question does not fit.
MIN_ANSWER_TOKENS = 16


class ChatEncoder(Protocol):
    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The whole prompt's ids, up to where the answer begins."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`dropped` are indices into the messages that were given."""

    ids: list[int]
    dropped: tuple[int, ...]


def build_prompt(
    encoder: ChatEncoder, messages: Sequence[Message], *, context_limit: int, max_new_tokens: int
) -> Prompt:
    """The prompt that fits. Raises `TooLong` when system messages and the last turn alone do not.

    Turns are dropped until min(max_new_tokens, a quarter of the context) is free for the answer; the last turn is
    kept as long as MIN_ANSWER_TOKENS are.
    """
    turns = _turns(messages)

    def encode(num_dropped: int) -> Prompt:
        dropped = tuple(sorted(index for turn in turns[:num_dropped] for index in turn))
        kept = [message for index, message in enumerate(messages) if index not in set(dropped)]
        return Prompt(encoder.encode_chat(kept), dropped)

    limit = context_limit - min(max_new_tokens, MIN_ANSWER_TOKENS)
    roomy = min(limit, context_limit - min(max_new_tokens, context_limit // 4))
    low, high = 0, len(turns) - 1  # the fewest turns to drop lies within
    best = encode(0)
    if len(best.ids) <= roomy:
        return best
    while low < high:
        middle = (low + high) // 2
        attempt = encode(middle)
        low, high = (low, middle) if len(attempt.ids) <= roomy else (middle + 1, high)
    best = encode(low)
    if len(best.ids) > limit:
        raise TooLong(
            f"the last message takes {len(best.ids)} tokens with its prompt; at most {limit} of the context's "
            f"{context_limit} are left for it"
        )
    return best


def _turns(messages: Sequence[Message]) -> list[list[int]]:
    """Indices of the messages, grouped into turns that each begin with the user; system messages are in none."""
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        if message.role == "system":
            continue
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    return turns
