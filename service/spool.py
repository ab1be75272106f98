"""Answers that outlive the daemon: what it could not finish is left in files for the next one on the same path.

Thread: the event loop; the daemon calls `open` before the loop runs and the last `save` in a worker. It knows no
connections and no engine. The socket's lock guards the folder: one daemon uses it.

A file is one answer: a line with a checksum, then JSON. It is written whole under another name, then renamed. What
is not a regular file of ours with mode 0600, or is damaged, is refused and logged; nobody else's file is removed.
Bounded by `max_entries`, `max_bytes` and the resume window, whose clock does not tick while the next daemon loads.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from service.engine.base import Saved
from service.protocol import Chat, ProtocolError, parse_event, parse_object, parse_request, to_wire
from service.streams import StreamEvent

log = logging.getLogger(__name__)

_MAGIC = b"chatglm-spool 1 "
_SUFFIX = ".answer"
_TEMPORARY = ".new"


class Refused(Exception):
    """A file or folder of the spool cannot be trusted, or cannot be read. The message says why."""


@dataclass(frozen=True, slots=True)
class Record:
    """One answer. `saved` is None when it is complete; `drained_at` is a reading of the machine's monotonic clock."""

    resume_token: str
    uid: int
    model: str
    drained_at: float
    chat: Chat
    events: tuple[StreamEvent, ...]
    saved: Saved | None


class Spool:
    """`now` is the monotonic clock, which all processes of a machine share and no time setting moves."""

    def __init__(
        self, folder: Path, *, window_s: float, now: Callable[[], float], max_entries: int = 256,
        max_bytes: int = 16 * 1024 * 1024,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._window_s = window_s
        self._now = now
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._records: dict[str, Record] = {}
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._records)

    def open(self) -> None:
        """Make the folder, or read what the last daemon left in it. Raises `Refused` when it is not private."""
        try:
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            found = self._folder.lstat()
            names = sorted(os.listdir(self._folder))
        except OSError as error:
            raise Refused(f"{self._folder}: {error.strerror}") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise Refused(f"{self._folder} is not a folder of ours with mode 0700; it is left alone")
        for name in names:
            if name.endswith(_TEMPORARY):  # the last daemon was killed while it wrote
                self._unlink(self._folder / name)
            elif name.endswith(_SUFFIX):
                self._read(self._folder / name)
        if self._records:
            log.info("spool: %d answers of the daemon before can be resumed", len(self._records))

    def get(self, resume_token: str) -> Record | None:
        return self._records.get(resume_token)

    def remove(self, resume_token: str) -> None:
        """The answer goes on here, or its time is over."""
        if self._records.pop(resume_token, None) is not None:
            del self._sizes[resume_token]
            self._unlink(self._path(resume_token))

    def expire(self) -> None:
        """The window of all that was found is over."""
        for resume_token in list(self._records):
            self.remove(resume_token)

    def save(self, records: Sequence[Record]) -> int:
        """Write what the next daemon may go on with; returns how many could be. What cannot be written is logged."""
        num_saved = 0
        for record in records:
            data = encode_record(record)
            while self._records and not self._has_room(len(data)):
                self.remove(min(self._records, key=lambda token: self._records[token].drained_at))
            if not self._has_room(len(data)):
                log.warning("spool: no room for an answer of %d bytes", len(data))
                continue
            try:
                self._write(self._path(record.resume_token), data)
            except OSError as error:
                log.error("spool: an answer cannot be kept for the next daemon: %s", error)
                continue
            self._records[record.resume_token], self._sizes[record.resume_token] = record, len(data)
            num_saved += 1
        return num_saved

    def _has_room(self, num_bytes: int) -> bool:
        return len(self._records) < self._max_entries and sum(self._sizes.values()) + num_bytes <= self._max_bytes

    def _path(self, resume_token: str) -> Path:
        return self._folder / (hashlib.sha256(resume_token.encode()).hexdigest()[:32] + _SUFFIX)

    def _write(self, path: Path, data: bytes) -> None:
        temporary = path.with_suffix(_TEMPORARY)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(temporary, path)
        except OSError:
            self._unlink(temporary)
            raise

    def _read(self, path: Path) -> None:
        try:
            data = read_private(path, self._max_bytes)
        except (Refused, OSError) as error:
            log.warning("spool: %s is refused and left alone: %s", path, error)
            return
        try:
            record = decode_record(data)
            if path != self._path(record.resume_token):
                raise Refused("it has another answer's name")
        except Refused as error:
            log.warning("spool: %s is refused and removed: %s", path, error)
            self._unlink(path)
            return
        age_s = self._now() - record.drained_at
        if not 0 <= age_s <= self._window_s or not self._has_room(len(data)):
            self._unlink(path)
            return
        self._records[record.resume_token], self._sizes[record.resume_token] = record, len(data)

    @staticmethod
    def _unlink(path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("spool: %s cannot be removed: %s", path, error.strerror)


def read_private(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file of ours with mode 0600 and one name. Raises `Refused` or `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise Refused("it is not a regular file with one name")
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
            raise Refused(f"it belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, not to us, 600")
        if found.st_size > max_bytes:
            raise Refused(f"it has {found.st_size} bytes")
        return file.read(max_bytes)


def encode_record(record: Record) -> bytes:
    saved: dict[str, Any] | None = None
    if record.saved is not None:
        saved = asdict(record.saved) | {"sampler": base64.b64encode(record.saved.sampler).decode()}
    body = json.dumps(
        {
            "resume_token": record.resume_token, "uid": record.uid, "model": record.model,
            "drained_at": record.drained_at, "chat": to_wire(record.chat),
            "events": [to_wire(event) for event in record.events], "saved": saved,
        },
        ensure_ascii=False,
    ).encode()  # fmt: skip
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode_record(data: bytes) -> Record:
    """Raises `Refused`."""
    head, _, body = data.partition(b"\n")
    if head != _MAGIC + hashlib.sha256(body).hexdigest().encode():
        raise Refused("it is damaged, or of another version")
    try:
        values = parse_object(body)
        saved = values["saved"]
        if saved is not None:
            lists = {name: tuple(saved[name]) for name in ("prompt", "dropped", "generated")}
            saved = Saved(**(saved | lists | {"sampler": base64.b64decode(saved["sampler"])}))
        chat = parse_request(values["chat"])
        if not isinstance(chat, Chat):
            raise Refused("it holds no chat")
        events: Any = tuple(parse_event(event) for event in values["events"])
        return Record(
            values["resume_token"], values["uid"], values["model"], values["drained_at"], chat, events, saved
        )  # fmt: skip
    except (ProtocolError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"it cannot be understood: {error}") from None
