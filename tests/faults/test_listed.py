"""The README's table of faults and the tests are the same list."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def names(*paths: Path) -> set[str]:
    return {name for path in paths for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}


def test_every_row_of_the_readme_is_a_test_and_every_fault_test_is_in_a_row() -> None:
    table = (ROOT / "README.md").read_text().partition("\n## Faults\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(test_\w+)`", table))
    assert listed <= names(*(ROOT / "tests").rglob("test_*.py")), "a row without a test"
    faults = set((ROOT / "tests" / "faults").glob("test_*.py")) - {Path(__file__)}
    assert names(*faults) <= listed, "a fault test without a row"
