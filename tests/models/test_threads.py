"""The thread count, and the spinning that is set before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, sys
from service.models.threads import use_threads
assert "torch" not in sys.modules
count = use_threads({asked})
import torch
print(count, torch.get_num_threads(), os.environ.get("GOMP_SPINCOUNT"))
"""


def run(asked: int, **environment: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(asked=asked)], env=clean | environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_the_default_is_every_core_and_threads_stop_spinning_early() -> None:
    cores = str(len(os.sched_getaffinity(0)))
    assert run(0) == [cores, cores, "10000"]


def test_a_given_count_and_the_operators_own_settings_win() -> None:
    assert run(1, GOMP_SPINCOUNT="7") == ["1", "1", "7"]
    assert run(1, OMP_WAIT_POLICY="passive") == ["1", "1", "None"]
