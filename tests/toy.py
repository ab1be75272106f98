"""A runner and a tokenizer without torch, for the tests of everything around the model.

The toy's "KV" is real storage: one cell per slot and position. A cell is a hash of its position, its id and every
cell it could see when it was written, as in a deep model; the next id is a hash of *all* cells in [0, n). So a wrong
reuse, a wrong order of chunks, an alias or a stale cell changes the text from there on. Cells that were never
written, and cells of an aborted or failed step, hold garbage that never repeats.

As in ChatGLM-6B, with causal_prompt=False each prompt cell sees the whole prompt, later ids too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from service.engine.base import Aborted, Capabilities
from service.protocol import Message, Params
from service.text import BytesDecoder, TextDecoder

END_ID = 256
_ROLE_IDS = {"system": 257, "user": 258, "assistant": 259}
_FIRST_PIECE_ID = 260
# Whole pieces, then characters in two halves: a token stream that splits them, as real byte-level vocabularies do.
_PIECES = (
    "你", "好", "，", "。", "世界", "\n", " ", ", ", ". ", "the ", "cat ", "and ", "é", "😀", "a", "b", "x1", "END",
)  # fmt: skip
_HALVES = (("龙".encode()[:2], "龙".encode()[2:]), ("🙂".encode()[:3], "🙂".encode()[3:]))
_FIRST_HALF_ID = _FIRST_PIECE_ID + len(_PIECES)


class ToyTokenizer:
    """Ids 0-255 are bytes, END_ID ends an answer, three ids mark roles, and a few pieces follow."""

    stop_ids = frozenset({END_ID})

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [_ROLE_IDS[message.role], *self.encode(message.content), END_ID]
        return [*ids, _ROLE_IDS["assistant"]]

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes; none for the control ids."""
        if token_id < END_ID:
            return bytes([token_id])
        if token_id >= _FIRST_HALF_ID:
            which, part = divmod(token_id - _FIRST_HALF_ID, 2)
            return _HALVES[which][part]
        return _PIECES[token_id - _FIRST_PIECE_ID].encode() if token_id >= _FIRST_PIECE_ID else b""

    def answer_decoder(self) -> TextDecoder:
        return BytesDecoder(self.token_bytes)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


@dataclass(frozen=True)
class ToyCost:
    """Seconds of a step on the CPU that DESIGN.md measured: decode 15-20 ms, a chunk about 50 ms + 1 ms a token.

    `prefill_pair_s`: of attention, for each pair of a token and a position that it sees.
    """

    decode_s: float = 0.015
    decode_row_s: float = 0.001
    prefill_s: float = 0.05
    prefill_token_s: float = 0.001
    prefill_pair_s: float = 0.0

    def decode(self, num_rows: int) -> float:
        return self.decode_s + self.decode_row_s * num_rows

    def prefill(self, num_tokens: int, start: int = 0) -> float:
        pairs = num_tokens * (start + num_tokens / 2)
        return self.prefill_s + self.prefill_token_s * num_tokens + self.prefill_pair_s * pairs


Call = Literal["open", "prefill", "decode", "copy_prefix"]
# Asked before each call, per slot: None = go on, an exception = raise it, "nan" = this row's logits are not finite.
Fault = Callable[[Call, int], "Exception | Literal['nan'] | None"]


def no_fault(call: Call, slot: int) -> None:
    """The default: nothing fails."""


class ToyRunner:
    """`Runner` of service/engine/base.py. Breaks its contract's preconditions loudly (AssertionError).

    cost, spend: each step calls `spend(seconds)` (time.sleep, or a virtual clock's advance), a prefill in
    `num_layers` parts between which it asks `should_abort`. end_one_in: the mean length of an answer; 0 = endless.
    """

    num_layers = 4

    def __init__(
        self,
        num_slots: int = 3,
        context_limit: int = 2048,
        causal_prompt: bool = True,
        *,
        end_one_in: int = 40,
        cost: ToyCost | None = None,
        spend: Callable[[float], None] = lambda seconds: None,
        fault: Fault = no_fault,
    ) -> None:
        self._capabilities = Capabilities(num_slots, context_limit, causal_prompt)
        self._end_one_in = end_one_in
        self._cost = cost
        self._spend = spend
        self.fault = fault  # tests replace it between steps
        self._garbage = count(1)
        self._cells = [[self._trash() for _ in range(context_limit)] for _ in range(num_slots)]
        self._ids = [[-1] * context_limit for _ in range(num_slots)]
        self._samplers: dict[int, random.Random | None] = {}  # by slot; None = greedy
        self.num_computed = 0  # prompt tokens computed so far: what reuse saves

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def open_slots(self) -> set[int]:
        return set(self._samplers)

    def open(self, slot: int, params: Params, prompt: Sequence[int], saved: bytes = b"") -> None:
        assert slot not in self._samplers, f"slot {slot} is open already"
        assert prompt, "no prompt"
        self._strike("open", slot)
        sampler = self._samplers[slot] = None if params.temperature == 0 else random.Random(params.seed)
        if sampler is not None and saved:
            version, state, gauss = json.loads(saved)
            sampler.setstate((version, tuple(state), gauss))

    def save_sampler(self, slot: int) -> bytes:
        sampler = self._samplers[slot]
        return b"" if sampler is None else json.dumps(sampler.getstate()).encode()

    def prefill(
        self, slot: int, start: int, ids: Sequence[int], *, is_last: bool, is_replay: bool = False,
        should_abort: Callable[[], bool],
    ) -> int | None:  # fmt: skip
        assert slot in self._samplers and ids
        end = start + len(ids)
        assert end <= self._capabilities.context_limit, "past the context"
        for position in range(start, end):
            self._cells[slot][position] = self._trash()
        is_nan = self._strike("prefill", slot)
        for _ in range(self.num_layers):
            if should_abort():
                raise Aborted
            if self._cost is not None:
                self._spend(self._cost.prefill(len(ids), start) / self.num_layers)
        self._ids[slot][start:end] = ids
        self.num_computed += len(ids)
        seen = 0 if self._capabilities.causal_prompt else hash(tuple(self._ids[slot][:end]))
        for position in range(start, end):
            self._write(slot, position, seen)
        return self._next_id(slot, end) if is_last and not is_nan else None

    def decode(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> list[int | None]:
        assert len(slots) == len(ids) == len(positions) == len(set(slots)) > 0
        assert set(slots) <= self.open_slots
        for slot, position in zip(slots, positions, strict=True):
            assert position < self._capabilities.context_limit, "past the context"
            self._cells[slot][position] = self._trash()
        nans = [self._strike("decode", slot) for slot in slots]
        if self._cost is not None:
            self._spend(self._cost.decode(len(slots)))
        next_ids: list[int | None] = []
        for slot, token_id, position, is_nan in zip(slots, ids, positions, nans, strict=True):
            self._ids[slot][position] = token_id
            self._write(slot, position, 0)
            next_ids.append(None if is_nan else self._next_id(slot, position + 1))
        return next_ids

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        assert source != target and 0 < length <= self._capabilities.context_limit
        self._strike("copy_prefix", target)
        self._cells[target][:length] = self._cells[source][:length]
        self._ids[target][:length] = self._ids[source][:length]

    def close(self, slot: int) -> None:
        self._samplers.pop(slot, None)

    def _write(self, slot: int, position: int, seen: int) -> None:
        visible = tuple(self._cells[slot][:position])
        self._cells[slot][position] = hash((position, self._ids[slot][position], seen, visible))

    def _next_id(self, slot: int, length: int) -> int:
        last = self._ids[slot][length - 1]
        if last >= _FIRST_HALF_ID and (last - _FIRST_HALF_ID) % 2 == 0:
            return last + 1  # a character that was begun is completed
        sampler = self._samplers[slot]
        drawn = 0 if sampler is None else sampler.getrandbits(32)
        state = hash((drawn, *self._cells[slot][:length])) & 0x7FFFFFFF
        if self._end_one_in and state % self._end_one_in == 0:
            return END_ID
        pick = state // 97 % (len(_PIECES) + len(_HALVES))
        return _FIRST_PIECE_ID + pick if pick < len(_PIECES) else _FIRST_HALF_ID + 2 * (pick - len(_PIECES))

    def _strike(self, call: Call, slot: int) -> bool:
        """Let the test's fault happen; True = this row's logits are not finite."""
        blow = self.fault(call, slot)
        if isinstance(blow, Exception):
            raise blow
        return blow == "nan"

    def _trash(self) -> int:
        return -next(self._garbage)
