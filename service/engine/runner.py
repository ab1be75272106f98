"""`Runner` over torch: a decoder's forwards, each row's sampler, and errors in words that the engine knows.

Thread: the engine's, for everything after construction. Knows no requests, no text and no queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from service.engine.base import Capabilities, OutOfMemory
from service.models import LoadedModel
from service.protocol import Params
from service.sampling import RowSampler, sample


class TorchRunner:
    """The engine's runner. Slots are numbered 0 … num_slots - 1."""

    def __init__(self, model: LoadedModel) -> None:
        self._decoder = model.decoder
        self._capabilities = model.capabilities
        self._device = model.decoder.device
        self._samplers: dict[int, RowSampler] = {}

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def open(self, slot: int, params: Params, prompt: Sequence[int]) -> None:
        self._samplers[slot] = RowSampler(params, prompt, self._device)

    def prefill(
        self, slot: int, start: int, ids: Sequence[int], *, is_last: bool, should_abort: Callable[[], bool]
    ) -> int | None:
        with _translated():
            logits = self._decoder.prefill(slot, start, ids, wants_logits=is_last, should_abort=should_abort)
            return None if logits is None else sample(logits, [self._samplers[slot]])[0]

    def decode(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> list[int | None]:
        with _translated():
            logits = self._decoder.decode(slots, ids, positions)
            return sample(logits, [self._samplers[slot] for slot in slots])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        with _translated():
            self._decoder.kv.copy_prefix(source, target, length)

    def close(self, slot: int) -> None:
        self._samplers.pop(slot, None)

    def warm_up(self) -> None:
        """Run every batch size once, and a long and a short prefill, so that no request pays for first calls."""
        limit = self._capabilities.context_limit
        for size in (1, min(64, limit - 2), min(512, limit - 2)):
            self.open(0, Params(), [0])
            self.prefill(0, 0, [0] * size, is_last=True, should_abort=lambda: False)
        slots = range(self._capabilities.num_slots)
        for slot in slots:
            self.open(slot, Params(), [0])
        for count in range(1, len(slots) + 1):
            self.decode(slots[:count], [0] * count, [0] * count)
        for slot in slots:
            self.close(slot)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Inference mode; whatever torch says of memory becomes `OutOfMemory`."""
    try:
        with torch.inference_mode():
            yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(str(error).splitlines()[0] if str(error) else "host memory") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # the CPU allocator raises a plain RuntimeError
            raise
        raise OutOfMemory(str(error).splitlines()[0]) from error
