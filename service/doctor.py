"""`chatglm-service doctor`: what is wrong on this machine for these settings, and what to do about each finding.

Takes the daemon's own flags and variables. It only looks: nothing is locked, bound, created or loaded, so it may run
beside a daemon that serves. Blocking; imports no torch. Exit codes: 0 nothing is wrong (notes may be), 1 otherwise.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from service.client import Client, ConnectionLost, Timeouts
from service.models import choose_model
from service.models.compiled import find_lack, find_libraries
from service.models.errors import ModelError
from service.models.survey import Survey, survey
from service.protocol import ServiceError
from service.settings import ENV_PREFIX, Settings, SettingsError, read_settings

SEND_BUFFER_BYTES = 2 * 1024 * 1024  # what each connection asks for
MIN_LOG_BYTES = 200 * 1024 * 1024  # logs and audit with their backups
TORCH_BYTES = 1024**3  # the program itself, with torch
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. "note": it works, and could be better. `advice` says what to do."""

    level: Literal["ok", "note", "wrong"]
    topic: str
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<6}{self.topic:<9}{self.what}" + (f" → {self.advice}" if self.advice else "")


def main(argv: Sequence[str], environ: Mapping[str, str], out: TextIO | None = None) -> int:
    out = out or sys.stdout
    try:
        settings = read_settings(
            Settings, argv, environ, prog="chatglm-service doctor", prefix=ENV_PREFIX, not_ours=("CHATGLM_WEBUI_",)
        )
    except SettingsError as error:
        print(Finding("wrong", "settings", str(error), "correct the flag or variable"), file=out)
        return 1
    num_wrong = 0
    for finding in examine(settings):
        print(finding, file=out, flush=True)
        num_wrong += finding.level == "wrong"
    print(f"{num_wrong} wrong" if num_wrong else "nothing is wrong", file=out)
    return 1 if num_wrong else 0


def examine(settings: Settings, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """All findings, in the order in which a start would meet them. `proc` is where /proc is."""
    path = Path(settings.socket_path)
    found_there = list(check_socket(path))
    yield from found_there
    is_live = any(finding.topic == "daemon" for finding in found_there)
    yield from check_lock(Path(f"{path}.lock"), proc, is_live=is_live)
    yield from check_folders(settings)
    found = None
    try:
        found = survey(choose_model(settings.model, Path(settings.weights_dir)))
    except (ModelError, OSError) as error:
        yield Finding("wrong", "weights", str(error), "see model_weights/README.md")
    else:
        yield Finding("ok", "weights", f"{found.path}: {found.num_files} file(s), {found.file_bytes / _GIB:.2f} GiB")
    gpus = read_gpus()
    yield from check_gpu(settings.device, gpus)
    if settings.device == "cpu" or not gpus:
        yield check_compiled(proc)
    if found is not None and not is_live:
        yield check_memory(settings, found, proc, gpus)
    yield check_send_buffer(proc)


def check_socket(path: Path) -> Iterator[Finding]:
    """The path, what is there, who may use it, and whether somebody answers."""
    if len(os.fsencode(path)) > 107:
        yield Finding("wrong", "socket", f"{path} has more than 107 bytes", "choose a shorter --socket-path")
        return
    try:
        found = path.lstat()
    except FileNotFoundError:
        if os.access(path.parent, os.W_OK | os.X_OK):
            yield Finding("ok", "socket", f"{path} is free: no daemon runs")
        else:
            yield Finding("wrong", "socket", f"{path.parent} cannot be written", "create it, or give this user access")
        return
    except OSError as error:
        yield Finding("wrong", "socket", f"{path}: {error.strerror}", "choose another --socket-path")
        return
    if not stat.S_ISSOCK(found.st_mode):
        yield Finding("wrong", "socket", f"{path} is not a socket", "remove it yourself, or choose another path")
        return
    yield from _check_listener(path, found)


def _check_listener(path: Path, found: os.stat_result) -> Iterator[Finding]:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o007:
        yield Finding("wrong", "socket", f"{path} has mode {mode:04o}: open to everybody", f"chmod 0660 {path}")
    try:
        with Client(str(path), timeouts=Timeouts(connect_s=2.0, idle_s=5.0)) as client:
            phase = client.health().phase
    except ServiceError as error:
        yield Finding("wrong", "socket", f"{path}: {error.code}: {error}", "join the socket's group, or use its owner")
    except ConnectionLost as error:
        cause = error.__cause__
        if isinstance(cause, ConnectionRefusedError) and found.st_uid == os.geteuid():
            yield Finding("note", "socket", f"{path} is stale: its daemon is gone", "the next start takes it over")
        elif isinstance(cause, ConnectionRefusedError):
            owner = f"{path} is stale and belongs to uid {found.st_uid}"
            yield Finding("wrong", "socket", owner, "have its owner remove it, or choose another --socket-path")
        elif isinstance(cause, PermissionError):
            yield Finding("wrong", "socket", f"{path} is not for this user", f"join group {found.st_gid}")
        else:
            yield Finding("wrong", "socket", f"{error}", "look at its log; restart it when it is stuck")
    else:
        yield Finding("ok", "daemon", f"answers on {path}, phase {phase}")


def check_lock(path: Path, proc: Path, *, is_live: bool) -> Iterator[Finding]:
    """Who holds the lock, by /proc/locks. It is not tried: that could make a daemon that starts just now give up."""
    try:
        found = path.lstat()
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode):
        yield Finding("wrong", "lock", f"{path} is a symbolic link", "remove it")
        return
    if not os.access(path, os.R_OK | os.W_OK):
        yield Finding("wrong", "lock", f"{path} belongs to uid {found.st_uid}", "choose another --socket-path")
        return
    holder = lock_holder(proc, found)
    if holder is not None and is_live:
        yield Finding("ok", "lock", f"{path} is held by pid {holder}")
    elif holder is not None:
        yield Finding(
            "wrong", "lock", f"pid {holder} holds {path}, yet does not serve", f"look at it, then end {holder}"
        )


def lock_holder(proc: Path, found: os.stat_result) -> int | None:
    """The process with a flock on this file: proc_locks(5), by inode (device numbers differ on some file systems)."""
    try:
        lines = (proc / "locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(found.st_ino):
            return int(words[4])
    return None


def check_folders(settings: Settings) -> Iterator[Finding]:
    """Where logs and the audit go: is there a folder, may we write, is there room?"""
    path = Path("logs/audit.jsonl" if settings.audit_file == "auto" else settings.audit_file)
    folder = Path("logs") if settings.audit_file == "off" else path.parent
    if not folder.is_dir():
        if settings.audit_file in ("auto", "off"):
            yield Finding("note", "logs", f"there is no folder {folder}", "Supervisor needs one: mkdir logs")
        else:
            yield Finding("wrong", "logs", f"{folder} is not there: audit lines are lost", f"mkdir {folder}")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("wrong", "logs", f"{folder} cannot be written", "give this user access")
        return
    if stat.S_IMODE(folder.stat().st_mode) & 0o002:
        yield Finding("note", "logs", f"everybody may write in {folder}", f"chmod o-w {folder}")
    free = shutil.disk_usage(folder).free
    if free < MIN_LOG_BYTES:
        yield Finding("wrong", "logs", f"{folder} has {free / 2**20:.0f} MiB left", "make room: 200 MiB are wanted")
    else:
        yield Finding("ok", "logs", f"{folder} can be written, {free / _GIB:.1f} GiB left")


def read_gpus() -> list[tuple[str, int]]:
    """(name, free bytes) of each GPU that nvidia-smi tells of; none where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        rows = [line.rpartition(",") for line in said.splitlines() if line.strip()]
        return [(name.strip(), int(free) * 2**20) for name, _, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def check_compiled(proc: Path) -> Finding:
    """The part that makes a CPU decode fast is optional: it needs a C compiler at the install."""
    if lack := find_lack(proc):
        return Finding("note", "cpu", *lack)
    if found := find_libraries(proc):
        return Finding("ok", "cpu", f"the compiled step is there: {next(iter(found))}")
    return Finding("note", "cpu", "this processor has no AVX2: decoding is slow", "use a newer machine, or a GPU")


def check_gpu(device: str, gpus: Sequence[tuple[str, int]]) -> Iterator[Finding]:
    if device == "cpu":
        return
    if gpus:
        yield Finding("ok", "gpu", ", ".join(f"{name}, {free / _GIB:.1f} GiB free" for name, free in gpus))
    elif device == "cuda":
        yield Finding("wrong", "gpu", "nvidia-smi shows no GPU", "install the driver, or use --device cpu")
    else:
        yield Finding("ok", "gpu", "none: the CPU is used")


def check_memory(settings: Settings, found: Survey, proc: Path, gpus: Sequence[tuple[str, int]]) -> Finding:
    """The model's need, about, against what is free where it would run."""
    need = found.memory_bytes(
        quantization=settings.quantization, num_slots=settings.max_batch_size, max_context=settings.max_context,
        kv_memory=settings.kv_memory,
    )  # fmt: skip
    is_gpu = bool(gpus) and settings.device != "cpu"
    free = gpus[0][1] if is_gpu else free_memory(proc)
    need += 0 if is_gpu else TORCH_BYTES
    what = f"about {need / _GIB:.1f} GiB wanted, {free / _GIB:.1f} GiB free on the {'GPU' if is_gpu else 'host'}"
    if need > free:
        return Finding("wrong", "memory", what, "lower --max-context, --kv-memory or --max-batch-size, or free some")
    return Finding("ok", "memory", what)


def free_memory(proc: Path, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had: MemAvailable, or what the container's limit leaves, where that is less."""
    free = 0
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):
        return free


def check_send_buffer(proc: Path) -> Finding:
    """Slow readers need a send buffer; root gets it whatever wmem_max says, others only up to it: socket(7)."""
    try:
        allowed = int((proc / "sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):
        return Finding("note", "buffers", "net.core.wmem_max cannot be read", "nothing, where answers stream evenly")
    what = f"net.core.wmem_max is {allowed:,} bytes"
    if allowed >= SEND_BUFFER_BYTES or _may_force_buffers():
        return Finding("ok", "buffers", what)
    advice = f"for many slow readers: sysctl -w net.core.wmem_max={SEND_BUFFER_BYTES}"
    return Finding("note", "buffers", f"{what}, of {SEND_BUFFER_BYTES:,} wanted", advice)


def _may_force_buffers() -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, 32, SEND_BUFFER_BYTES)  # SO_SNDBUFFORCE, <asm-generic/socket.h>
        except PermissionError:
            return False
    return True
