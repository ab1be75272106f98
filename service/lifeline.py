"""Manners under Supervisor: leave when it dies, and exit so that it sees the exit code.

Linux only (`prctl(2)`, PR_SET_PDEATHSIG). Called once at start, before any thread, and at the end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Above `startsecs` of supervisord.conf: an exit before that is retried whatever its code.
SETTLE_S = 2.0


def is_supervised() -> bool:
    """Supervisor sets this variable for its children."""
    return "SUPERVISOR_ENABLED" in os.environ


def leave(code: int) -> NoReturn:
    """Exit with a code that no restart can mend; under Supervisor not before it takes exit codes seriously.

    NOTE: an exit within `startsecs` makes Supervisor ignore `exitcodes` and try again.
    """
    if code and is_supervised():
        time.sleep(SETTLE_S)
    sys.exit(code)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for TERM when the parent dies. Raises SystemExit when it has died already.

    `parent_pid` is the parent at program start: a parent that died in between leaves another one behind.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit(0)
