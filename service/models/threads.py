"""How many CPU threads torch computes with, and how long an idle one spins. Imports torch only when asked to.

libgomp's threads spin between two parallel regions (150 a token here) and sleep when that takes too long. By default
they spin for about 16 ms: beside one other busy process on two cores each waits, spinning, for a thread that cannot
run because of it. Measured here (2 cores, default model), ms per token / ms for a 256-token prefill:

    GOMP_SPINCOUNT    default      1,000      10,000     100,000
    alone             13.5 / 100   28 / 211   14.9 / 129  13.5 / 100
    beside others     148 / 4916   55 / 411   97 / 695   76 (p95 425) / 636

10,000 (about half a millisecond) covers the gaps within a step and little else.
"""

from __future__ import annotations

import os

_SPIN_COUNT = "10000"


def use_threads(num_threads: int) -> int:
    """Set torch's thread count, 0 = one per core this process may run on; returns it. Call before torch is imported.

    The default is every core: a token takes 20 ms with one thread here and 13.5 ms with two.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # NOTE: libgomp reads it once, when torch is imported
    import torch

    chosen = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    return chosen
