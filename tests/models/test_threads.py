"""The thread count, and the spinning that is set before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

from service.models.threads import ThreadChooser

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


def run_steps(chooser: ThreadChooser, cost: dict[int, float], num_steps: int, num_rows: int = 1) -> list[int]:
    """The counts used in `num_steps` steps, where a step takes cost[count] seconds for one row."""
    used = []
    for _ in range(num_steps):
        count = chooser.choose()
        chooser.record(cost[count] * (4 + num_rows) / 5, num_rows)
        used.append(count)
    return used


QUIET, BUSY = {1: 0.020, 4: 0.0135}, {1: 0.026, 4: 0.100}


def test_all_threads_stay_while_they_are_faster_and_probes_get_rare() -> None:
    used = run_steps(ThreadChooser(4), QUIET, 5000)
    assert used[:16] == [4] * 16
    assert used.count(1) < 40
    assert used[-1000:].count(1) <= 4


def test_one_thread_takes_over_soon_after_the_machine_gets_busy_and_gives_back_when_it_is_quiet() -> None:
    chooser = ThreadChooser(4)
    run_steps(chooser, QUIET, 3000)
    assert run_steps(chooser, BUSY, 40).count(4) <= 20
    assert chooser.current == 1
    assert run_steps(chooser, QUIET, 700)[-50:] == [4] * 50


def test_a_single_slow_step_changes_nothing() -> None:
    chooser = ThreadChooser(4)
    run_steps(chooser, QUIET, 100)
    chooser.record(1.0, 1)
    assert chooser.current == 4
    run_steps(chooser, QUIET, 40)
    assert chooser.current == 4


def test_two_slow_steps_that_are_over_when_the_other_count_has_been_tried_change_nothing() -> None:
    chooser = ThreadChooser(2)
    quiet = {1: 0.013, 2: 0.009}
    run_steps(chooser, quiet, 100)
    for _ in range(20):
        run_steps(chooser, {2: 0.025, 1: 0.013}, 2)
        assert run_steps(chooser, quiet, 2) == [1, 1], "it does not look at once"
        run_steps(chooser, quiet, 30)
        assert chooser.current == 2


def test_another_batch_size_is_no_reason_to_look() -> None:
    chooser = ThreadChooser(4)
    run_steps(chooser, QUIET, 1000)
    assert run_steps(chooser, QUIET, 10, num_rows=8) == [4] * 10


def test_one_core_has_nothing_to_choose() -> None:
    assert set(run_steps(ThreadChooser(1), {1: 0.1}, 200)) == {1}


def test_in_doubt_all_threads_are_given_back_as_prompts_gain_most_from_them() -> None:
    """A compiled step takes nearly as long with one thread as with two, a prompt twice as long."""
    chooser = ThreadChooser(2)
    run_steps(chooser, {1: 0.010, 2: 0.030}, 60)
    assert chooser.current == 1
    run_steps(chooser, {1: 0.010, 2: 0.0097}, 200)
    assert chooser.current == 2
    assert run_steps(chooser, {1: 0.0095, 2: 0.010}, 200).count(1) < 20
