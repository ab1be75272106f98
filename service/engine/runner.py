"""The torch runner: steps over KV slots, for the local engine, with as many threads as pay at the moment.

The engine thread's, every method. Knows the decoder and the samplers; token ids in, token ids out. Knows no text, no
requests and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch

from service.engine.base import Capabilities, OutOfMemory
from service.models import LoadedModel
from service.models.threads import ThreadChooser, use_threads
from service.protocol import Params
from service.sampling import RowSampler, sample

__all__ = ["TorchRunner", "use_threads"]

_WARM_UP_TOKENS = 256
_FEW_TOKENS = 8
_SLOW_STEP_S = 0.08  # of a decode: 6 B parameters on a CPU take 0.2 s, and 10 s for a prompt of 256 tokens


class TorchRunner:
    """A `Runner` over a loaded model."""

    def __init__(self, model: LoadedModel) -> None:
        self._decoder = model.decoder
        self._capabilities = model.capabilities
        self._samplers: dict[int, RowSampler] = {}
        self._threads = ThreadChooser(torch.get_num_threads())

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def warm_up(self) -> None:
        """Run each kind of step once, so that the first request does not pay for what is set up lazily."""
        for num_rows in {1, self._capabilities.num_slots}:
            for slot in range(num_rows):
                self.open(slot, Params(temperature=0), [])
            self.decode(range(num_rows), [0] * num_rows, [0] * num_rows)
            for slot in range(num_rows):
                self.close(slot)
        self.open(0, Params(temperature=1, top_p=0.8, seed=0), [])
        started = perf_counter()
        self.decode([0], [0], [0])
        wanted = _WARM_UP_TOKENS if perf_counter() - started < _SLOW_STEP_S else _FEW_TOKENS
        num_tokens = min(wanted, self._capabilities.context_limit - 1)
        self.prefill(0, 0, [0] * num_tokens, is_last=True, should_abort=lambda: False)
        self.prefill(0, num_tokens // 2, [0] * (num_tokens // 2), is_last=True, should_abort=lambda: False)
        self.close(0)

    def open(self, slot: int, params: Params, prompt: Sequence[int], saved: bytes = b"") -> None:
        self._samplers[slot] = RowSampler(params, prompt, saved)

    def save_sampler(self, slot: int) -> bytes:
        return self._samplers[slot].save()

    def prefill(
        self, slot: int, start: int, ids: Sequence[int], *, is_last: bool, is_replay: bool = False,
        should_abort: Callable[[], bool],
    ) -> int | None:  # fmt: skip
        torch.set_num_threads(self._threads.current)
        with _step():
            logits = self._decoder.prefill(
                slot, start, ids, wants_logits=is_last, is_replay=is_replay, should_abort=should_abort
            )
            return None if logits is None else sample(logits, [self._samplers[slot]])[0]

    def decode(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> list[int | None]:
        torch.set_num_threads(self._threads.choose())
        started = perf_counter()
        with _step():
            next_ids = sample(self._decoder.decode(slots, ids, positions), [self._samplers[slot] for slot in slots])
        self._threads.record(perf_counter() - started, len(slots))
        return next_ids

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        with _step():
            self._decoder.kv.copy_prefix(source, target, length)

    def close(self, slot: int) -> None:
        self._samplers.pop(slot, None)


@contextmanager
def _step() -> Iterator[None]:
    """Inference mode is the thread's, so each step sets it; running out of memory has one name, whatever ran out."""
    try:
        with torch.inference_mode():
            yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(str(error)) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # the CPU allocator's words
            raise
        raise OutOfMemory(str(error)) from error
