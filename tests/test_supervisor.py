"""Supervisor with the real supervisord.conf: restart, exit codes, tail, and what happens when anything is killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import Client
from service.protocol import Delta, Done, Event
from tests.processes import ROOT, clean_environment, free_port, health, running, wait_ready, wait_until

BIN = Path(sys.executable).parent


class Supervised:
    """A checkout's worth of folders around the real configuration, with a socket and a port of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = home / "s"
        self.port = free_port()
        shutil.copy(ROOT / "supervisord.conf", home)
        (home / ".venv").symlink_to(BIN.parent)
        (home / "model_weights").symlink_to(ROOT / "model_weights")
        for folder in ("logs", "run"):
            (home / folder).mkdir()

    @contextlib.contextmanager
    def running(self, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = clean_environment(
            CHATGLM_SOCKET_PATH=str(self.socket), CHATGLM_WEBUI_PORT=str(self.port),
            CHATGLM_MODEL=str(ROOT / "model_weights" / "smollm2-135m-instruct"), CHATGLM_MAX_CONTEXT="1024", **environ,
        )  # fmt: skip
        command = [str(BIN / "supervisord"), "--nodaemon", "-c", str(self.home / "supervisord.conf")]
        with running(command, log=self.home / "supervisord.out", environ=environment) as process:
            try:
                wait_until(
                    lambda: "RUNNING" in self.ctl("status"),
                    within_s=20,
                    what="status",
                    log=self.home / "supervisord.out",
                )
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(40)
                for name in ("chatglm-service", "chatglm-webui"):  # children have process groups of their own
                    subprocess.run(["pkill", "-KILL", "-f", f"{self.home}/.venv/bin/{name}"], check=False)

    def ctl(self, *command: str) -> str:
        done = subprocess.run(
            [str(BIN / "supervisorctl"), "-c", "supervisord.conf", *command], cwd=self.home, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def status(self, program: str) -> str:
        found = re.search(rf"^{program} +(\S+)", self.ctl("status"), re.MULTILINE)
        return found[1] if found else "?"

    def pid(self, program: str) -> int:
        return int(self.ctl("pid", program).strip())

    def page_status(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0


@pytest.fixture
def supervised(tmp_path: Path) -> Supervised:
    return Supervised(tmp_path)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_control_socket_and_commands_work_and_kills_are_mended(supervised: Supervised) -> None:
    log = supervised.home / "logs" / "chatglm-service.log"
    with supervised.running() as supervisord:
        wait_ready(supervised.socket, log=log)
        assert (supervised.home / "run" / "supervisor.sock").stat().st_mode & 0o777 == 0o600
        assert "listening on" in supervised.ctl("tail", "-5000", "chatglm-service", "stderr")
        wait_until(lambda: supervised.page_status() == 200, within_s=40, what="the page is ready")

        # Restart during a chat: the answer is finished first, then the next daemon takes over.
        first = supervised.pid("chatglm-service")
        with Client(str(supervised.socket)) as client:
            events: list[Event] = []
            restart = None
            for event in client.chat("Tell me a story.", temperature=0, max_new_tokens=60):
                events.append(event)
                if isinstance(event, Delta) and restart is None:
                    restart = subprocess.Popen(
                        [str(BIN / "supervisorctl"), "-c", "supervisord.conf", "restart", "chatglm-service"],
                        cwd=supervised.home, stdout=subprocess.PIPE, text=True,
                    )  # fmt: skip
            assert isinstance(events[-1], Done) and events[-1].reason in ("stop", "length")
        assert restart is not None and "chatglm-service: started" in restart.communicate(timeout=60)[0]
        assert supervised.pid("chatglm-service") != first
        wait_ready(supervised.socket, log=log)

        # Killing the page leaves the daemon up, and the reverse; both come back.
        daemon, page = supervised.pid("chatglm-service"), supervised.pid("chatglm-webui")
        os.kill(page, signal.SIGKILL)
        wait_until(lambda: supervised.pid("chatglm-webui") not in (0, page), within_s=20, what="the page restarts")
        assert alive(daemon)
        page = supervised.pid("chatglm-webui")
        os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: supervised.pid("chatglm-service") not in (0, daemon), within_s=20, what="it restarts")
        wait_ready(supervised.socket, log=log)
        assert alive(page)

        # Supervisord killed: nobody watches, so both leave.
        pids = [supervised.pid("chatglm-service"), supervised.pid("chatglm-webui")]
        supervisord.kill()
        wait_until(lambda: not any(map(alive, pids)), within_s=30, what="both programs leave")
        assert health(supervised.socket) is None


def test_exit_3_is_not_restarted(supervised: Supervised) -> None:
    with supervised.running(CHATGLM_QUANTIZATION="int3"):
        wait_until(lambda: supervised.status("chatglm-service") == "EXITED", within_s=20, what="it stays down")
        assert "CHATGLM_QUANTIZATION" in (supervised.home / "logs" / "chatglm-service.log").read_text()
        log = (supervised.home / "logs" / "supervisord.log").read_text()
        assert log.count("spawned: 'chatglm-service'") == 1 and "exit status 3; expected" in log
