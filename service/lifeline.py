"""Leave when the supervisor dies: a service that nobody watches would keep the socket and the memory.

Linux only (`prctl(2)`, PR_SET_PDEATHSIG). Called once at start, before any thread.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for TERM when the parent dies. Raises SystemExit when it has died already.

    `parent_pid` is the parent at program start: a parent that died in between leaves another one behind.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit(0)
