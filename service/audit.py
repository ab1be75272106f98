"""The audit file: one JSON line a record, appended by a thread of its own.

Covers: the bounded queue, the file (0600, rotated by size), what happens when it cannot be written. Does not cover:
what a record says (`ledger.py`).

Threads: `put` is called on the event loop and never waits; the writer thread has the file. A full queue, a full disk
or a removed folder drops lines and counts them; each further line tries again, so writing resumes by itself.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Lines that may wait for a slow disk: a few seconds of the worst overload, about 2 MiB.
MAX_WAITING = 4096

# NOTE: O_NONBLOCK keeps a pipe without a reader from holding the writer for ever; regular files ignore it.
_OPEN_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Audit:
    """A file of JSON lines. `on_drop` is called with a count, on whichever thread lost the lines."""

    def __init__(
        self, path: Path, *, max_bytes: int, num_backups: int, on_drop: Callable[[int], None],
        max_waiting: int = MAX_WAITING,
    ) -> None:  # fmt: skip
        self._on_drop = on_drop
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(max_waiting)
        self._file = RotatedFile(path, max_bytes=max_bytes, num_backups=num_backups)
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Queue one record. Never waits, never raises."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._on_drop(1)

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and stop; whether that worked within the time."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        num_lost = 0  # since the last line that was written
        while (record := self._waiting.get()) is not None:
            try:
                self._file.append(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            except OSError as error:
                if not num_lost:
                    log.warning("audit: cannot write (%s); lines are dropped and counted until it works", error)
                num_lost += 1
                self._on_drop(1)
            else:
                if num_lost:
                    log.warning("audit: writing again; %d lines were dropped", num_lost)
                num_lost = 0
        self._file.close()


class RotatedFile:
    """Whole lines appended to `path`; beyond `max_bytes` it becomes `path.1`, that becomes `path.2`, and so on.

    Blocking calls of one thread. The file is opened again when its name leads elsewhere: logrotate, a removed folder.
    """

    def __init__(self, path: Path, *, max_bytes: int, num_backups: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_backups = num_backups
        self._fd = -1

    def append(self, line: bytes) -> None:
        """Raises `OSError`; the file then ends with a whole line still, wherever that can be arranged."""
        try:
            found = self._open()
            if stat.S_ISREG(found.st_mode) and found.st_size and found.st_size + len(line) > self._max_bytes:
                self._rotate()
                found = self._open()
            num_written = os.write(self._fd, line)
            if num_written < len(line):  # the disk became full in the middle: take the half line back
                os.ftruncate(self._fd, found.st_size)
                raise OSError(f"{self._path}: only {num_written} of {len(line)} bytes fitted")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> os.stat_result:
        """Have the file that the name leads to open."""
        if self._fd >= 0:
            found = os.fstat(self._fd)
            if _identity(self._path) == (found.st_dev, found.st_ino):
                return found
            self.close()
        self._fd = os.open(self._path, _OPEN_FLAGS, 0o600)
        found = os.fstat(self._fd)
        if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
            os.fchmod(self._fd, 0o600)
        return found

    def _rotate(self) -> None:
        self.close()
        for number in range(self._num_backups, 0, -1):
            older = self._path if number == 1 else self._backup(number - 1)
            if older.exists():
                os.replace(older, self._backup(number))

    def _backup(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
