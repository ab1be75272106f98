"""Real processes for the tests: start, wait for what they say or answer, and never leave one behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from service.client import Client, ConnectionLost
from service.protocol import HealthReport

ROOT = Path(__file__).parent.parent
DEFAULT_MODEL = ROOT / "model_weights" / "smollm2-135m-instruct"


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without what would change the programs under test."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CHATGLM_", "SUPERVISOR_", "GRADIO_"))}
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **extra}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(
    command: list[str], *, log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, whose output goes to `log`; the group is killed at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=dict(environ or clean_environment()),
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def daemon_command(socket_path: Path, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "service", "--socket-path", str(socket_path), "--max-context", "1024"]
    return [*command, "--model", str(DEFAULT_MODEL), *flags]


@contextlib.contextmanager
def running_daemon(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A daemon with the default model, ready; its socket is tmp_path/s and its log tmp_path/daemon.log."""
    path = tmp_path / "s"
    with running(daemon_command(path, *flags), log=tmp_path / "daemon.log") as process:
        wait_ready(path, log=tmp_path / "daemon.log", process=process)
        yield process, path


def wait_until(condition: Callable[[], object], *, within_s: float, what: str, log: Path | None = None) -> None:
    """Ask again and again, for something another process brings about."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            shown = log.read_text(errors="replace")[-3000:] if log is not None and log.exists() else ""
            raise AssertionError(f"not within {within_s} s: {what}\n{shown}")
        time.sleep(0.02)


def health(path: Path) -> HealthReport | None:
    try:
        with Client(str(path)) as client:
            return client.health()
    except ConnectionLost:
        return None


def wait_ready(
    path: Path, *, log: Path, process: subprocess.Popen[bytes] | None = None, within_s: float = 60
) -> HealthReport:
    def is_ready() -> bool:
        assert process is None or process.poll() is None, log.read_text(errors="replace")
        found = health(path)
        return found is not None and found.phase == "ready"

    wait_until(is_ready, within_s=within_s, what="the daemon is ready", log=log)
    found = health(path)
    assert found is not None
    return found


TELLS_FROZEN = """
import gc, runpy, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print("frozen:", gc.get_freeze_count(), flush=True))
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def num_frozen(module: str, *flags: str, log: Path, is_up: Callable[[], object]) -> int:
    """How many objects a program of ours keeps from the garbage collector once it is up."""
    with running([sys.executable, "-c", TELLS_FROZEN, module, *flags], log=log) as process:
        wait_until(is_up, within_s=60, what="it is up", log=log)
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "frozen: " in log.read_text(), within_s=10, what="it tells", log=log)
    return int(log.read_text().split("frozen: ")[1].split()[0])
