"""The daemon with a toy model as a process, for the fault rows."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.processes import clean_environment, running, wait_ready


def toy_command(path: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.faults.toy_process", "--socket-path", str(path), *flags]


@contextlib.contextmanager
def running_toy(
    tmp_path: Path, *flags: str, log: str = "daemon.log", **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Ready, on tmp_path/s. `options` are those of `toy_process`."""
    path = tmp_path / "s"
    environ = clean_environment(TOY=json.dumps(options))
    with running(toy_command(path, *flags), log=tmp_path / log, environ=environ) as process:
        wait_ready(path, log=tmp_path / log, process=process)
        yield process, path
