"""How many CPU threads torch computes with. Imports torch only when asked to.

The engine thread's, but for `use_threads`, which is called before torch is imported.
libgomp's threads spin between two parallel regions and at barriers (150 a token here), and sleep when that takes too
long. By default they spin for about 16 ms: beside other busy processes each waits, spinning, for a thread that cannot
run because of it. Measured here (2 cores, default model), ms per token / ms for a 256-token prefill:

    GOMP_SPINCOUNT       default       10,000      0           (one thread)
    alone                7.5 / 124     8.4 / 121   13 / 194    11 / 186
    beside 3 processes   88 / 1860     32 / 634    39 / 585    11 / 192

So 10,000 (about half a millisecond), which covers the gaps within a step, and one thread while others need the cores:
`ThreadChooser` finds out which is faster at the moment. What is compiled gives bit for bit the same with either; a
prompt that torch computes differs in the last bits, as it does when it is cut into other chunks.
"""

from __future__ import annotations

import os
from collections import deque
from statistics import median

_SPIN_COUNT = "10000"
_FIRST_INTERVAL, _MAX_INTERVAL = 16, 512  # steps between two looks at the other count
_PROBE_STEPS = 2  # the first step after a change wakes threads up
_CLEARLY = 0.9  # a change must gain a tenth, or noise would make it flip
_SUDDENLY = 1.5  # two steps that slow are reason to look at once
_NUM_RECENT = 8


def use_threads(num_threads: int) -> int:
    """Set torch's thread count, 0 = one per core this process may run on; returns it. Call before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # NOTE: libgomp reads it once, when torch is imported
    import torch

    chosen = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    return chosen


class ThreadChooser:
    """One thread or all of them for the next decode step, by what such steps took lately. Pure: no clock, no torch.

    `current` is the better count as far as is known. The other is tried for two steps now and then, ever less often
    while that does not pay, and at once when steps suddenly get slow. It must be better than `current` both before and
    after: or two slow steps, which are no rarity, would be taken for a busy machine, and prompts take twice as long.
    """

    def __init__(self, max_threads: int) -> None:
        self.current = max_threads
        self._other = 1
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)  # costs of steps with `current`, since the last change
        self._probe: list[float] = []  # costs of steps with the other count
        self._num_after = 0  # steps with `current` since they are complete
        self._interval = _FIRST_INTERVAL
        self._num_since_probe = 0

    def choose(self) -> int:
        """The count for the next step, whose time `record` must be told."""
        return self._other if self._is_probing else self.current

    def record(self, seconds: float, num_rows: int) -> None:
        """What the step took with the count that `choose` gave."""
        cost = 5 * seconds / (4 + num_rows)  # 1, 2, 4 and 8 rows take about 7.1, 7.9, 10.5 and 16.1 ms
        if self._is_probing:
            self._probe.append(cost)
            return
        self._recent.append(cost)
        if not self._probe:
            self._num_since_probe += 1
            return
        self._num_after += 1
        if self._num_after == _PROBE_STEPS:
            gain = _CLEARLY if self._other == 1 else 1.0  # in doubt all of them: a prompt gains more than a decode does
            self._conclude(min(self._probe) < gain * min(self._latest(2 * _PROBE_STEPS)))

    def _latest(self, num: int) -> list[float]:
        return list(self._recent)[-num:]

    @property
    def _is_probing(self) -> bool:
        if self._probe:
            return len(self._probe) < _PROBE_STEPS
        if self.current == self._other or self._num_since_probe < _FIRST_INTERVAL:
            return False
        is_slow = min(self._latest(_PROBE_STEPS)) > _SUDDENLY * median(self._recent)
        return is_slow or self._num_since_probe >= self._interval

    def _conclude(self, is_better: bool) -> None:
        if is_better:
            self.current, self._other = self._other, self.current
            self._recent.clear()
        self._interval = _FIRST_INTERVAL if is_better else min(2 * self._interval, _MAX_INTERVAL)
        self._probe = []
        self._num_after = self._num_since_probe = 0
