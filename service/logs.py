"""The log: lines to stderr, written by a thread of its own.

Covers: the bounded queue between whoever logs and stderr, a stderr that nobody reads, the last lines before the end.
Does not cover: what is logged.

Threads: any may log, and none of them waits, for a stopped reader of stderr must not stop the engine: when the queue is
full, lines are dropped and counted. The writer thread has the file descriptor.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

# Lines that may wait for a slow reader: some seconds of the busiest daemon, and about 1 MiB with what they hold.
MAX_WAITING = 4096

# Time for the last lines at the end of the process.
FLUSH_S = 0.5

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogWriter(logging.Handler):
    """Writes to a file descriptor what is logged. `on_drop` is called with a count, on whichever thread lost lines.

    NOTE: not through `sys.stderr`: a thread that hangs in it would hold a lock that Python wants at exit.
    """

    def __init__(self, fd: int, *, on_drop: Callable[[int], None], max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self._fd = fd
        self._on_drop = on_drop
        self._counting = threading.Lock()
        self._num_dropped = 0
        self._waiting: queue.Queue[str | threading.Event] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line. Never waits."""
        try:
            line = self.format(record)
        except Exception as error:  # a bug of whoever logs: it ends nothing
            line = f"{record.name}: cannot be formatted: {record.msg!r} ({error!r})"
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._drop()

    def flush_within(self, timeout_s: float) -> bool:
        """Wait until what was logged so far is written; whether that worked within the time."""
        deadline = time.monotonic() + timeout_s
        written = threading.Event()
        try:
            self._waiting.put(written, timeout=timeout_s)
        except queue.Full:
            return False
        return written.wait(max(0.0, deadline - time.monotonic()))

    def _drop(self) -> None:
        with self._counting:
            self._num_dropped += 1
        self._on_drop(1)

    def _run(self) -> None:
        num_told = 0
        while True:
            line = self._waiting.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._write(line.encode("utf-8", "backslashreplace") + b"\n")
            except OSError:  # the reader is gone, or the disk is full: each further line tries again
                self._drop()
                continue
            if (num_dropped := self._num_dropped) > num_told:
                log.warning("log: %d lines were dropped, nobody took them", num_dropped - num_told)
                num_told = num_dropped

    def _write(self, line: bytes) -> None:
        """All of it, however long that takes."""
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # somebody else who has this file made it non-blocking
                select.select([], [self._fd], [])


def start_logging(level: str, *, on_drop: Callable[[int], None]) -> LogWriter:
    """Everything that is logged, warned of or uncaught goes to stderr, and is written before the process exits."""
    writer = LogWriter(sys.stderr.fileno(), on_drop=on_drop)
    logging.basicConfig(level=level.upper(), format=_FORMAT, handlers=[writer])
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: log.critical("uncaught", exc_info=(kind, error, trace))
    threading.excepthook = _log_thread_error
    atexit.register(writer.flush_within, FLUSH_S)
    return writer


def _log_thread_error(end: threading.ExceptHookArgs) -> None:
    log.critical("uncaught in thread %s", end.thread and end.thread.name, exc_info=end.exc_value)
