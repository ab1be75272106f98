"""Where the daemon stands: its socket's name, its files, its file numbers, and who may come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import AsyncClient, Client, ConnectionLost, Timeouts
from service.guard import keep_socket
from service.metrics import Metrics
from service.protocol import Done
from service.server import Limits, Server
from service.socketfile import PathRefused, SocketFile
from tests.faults.common import running_toy, toy_command
from tests.harness import until
from tests.processes import clean_environment, health, running, wait_ready, wait_until


def test_a_removed_socket_is_noticed_and_served_again_twenty_times_and_connections_stay(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def main() -> None:
        claimed = SocketFile.claim(str(path))
        server = Server(
            claimed.socket, socket_gid=claimed.gid, limits=Limits(), metrics=Metrics(), model="toy", now=time.monotonic
        )
        await server.start()
        keeping = asyncio.create_task(keep_socket(claimed, server, look_s=0.002))
        first = await AsyncClient.connect(str(path))
        await first.health()
        for number in range(20):
            path.unlink()
            if number % 2:
                (tmp_path / "s.lock").unlink()
            await until(claimed.is_ours)
            async with await AsyncClient.connect(str(path)) as client:
                assert (await client.health()).phase == "loading"
        assert (await first.health()).phase == "loading"
        path.unlink()
        path.write_text("precious")  # somebody else's now
        await asyncio.sleep(0.02)
        assert path.read_text() == "precious"
        path.unlink()
        await until(claimed.is_ours)
        await first.aclose()
        keeping.cancel()
        await server.close(0.5)
        claimed.release()

    asyncio.run(main())


def test_a_running_daemon_is_back_within_two_seconds_after_its_socket_was_removed(tmp_path: Path) -> None:
    with running_toy(tmp_path, decode_s=0.01) as (process, path), Client(str(path)) as client:
        answer = client.chat("x", max_new_tokens=250)
        client.wait_event(answer.mailbox)
        path.unlink()
        wait_until(lambda: health(path), within_s=2, what="served again")
        assert list(answer) and process.poll() is None
        process.terminate()
        assert process.wait(5) == 0 and not path.exists()
    assert "served again" in (tmp_path / "daemon.log").read_text()


@contextlib.contextmanager
def toy_with_full_stderr(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, int]]:
    """A daemon that is ready although its stderr is a full pipe: also the pipe's other end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"." * 4096):
            pass
    os.set_blocking(writing, True)
    path = tmp_path / "s"
    with subprocess.Popen(
        toy_command(path), stdout=subprocess.DEVNULL, stderr=writing, env=clean_environment()
    ) as process:
        os.close(writing)
        try:
            wait_ready(path, log=tmp_path / "no.log", process=process)
            yield process, path, reading
        finally:
            process.kill()
            os.close(reading)


def test_a_full_stderr_that_nobody_reads_stops_no_answer_and_no_exit(tmp_path: Path) -> None:
    with (
        toy_with_full_stderr(tmp_path) as (process, path, _),
        Client(str(path), timeouts=Timeouts(idle_s=10)) as client,
    ):
        for _ in range(20):
            assert isinstance(list(client.chat("x", max_new_tokens=3))[-1], Done)
        process.terminate()
        assert process.wait(5) == 0


def test_a_stderr_that_is_read_again_has_every_line_to_the_last(tmp_path: Path) -> None:
    with toy_with_full_stderr(tmp_path) as (process, path, reading):
        with Client(str(path), timeouts=Timeouts(idle_s=10)) as client:
            assert isinstance(list(client.chat("x", max_new_tokens=3))[-1], Done)
        process.terminate()
        with open(reading, "rb", closefd=False) as pipe:
            said = pipe.read().decode().lstrip(".")
        assert process.wait(5) == 0
    assert said.splitlines()[0].split(": ")[1].startswith("listening on") and said.endswith("drain is over, exit 0\n")


def test_the_folder_going_and_coming_back_is_survived(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with running_toy(home) as (process, path), Client(str(path)) as client:
        shutil.move(home, tmp_path / "away")
        assert client.health().phase == "ready"
        home.mkdir()
        wait_until(lambda: health(path), within_s=4, what="served again")
        assert process.poll() is None


@pytest.mark.parametrize("kind", ["folder", "link", "file", "socket of another user"])
def test_a_path_that_is_something_else_is_refused_and_never_unlinked(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "file":
        path.write_text("precious")
    elif os.geteuid() != 0:
        pytest.skip("only root can give files away")
    else:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
        os.chown(path, 65534, 65534)
    before = path.lstat()
    for _ in range(20):
        with pytest.raises(PathRefused):
            SocketFile.claim(str(path))
    assert path.lstat() == before
    done = subprocess.run(toy_command(path), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 3 and "left alone" in done.stderr and path.lstat() == before


def test_no_file_number_left_does_not_stop_the_accept_loop(tmp_path: Path) -> None:
    with running_toy(tmp_path, "--max-connections", "1000", num_files=60) as (process, path):
        crowd = []
        for _ in range(100):  # more than it has numbers for; the rest wait in the listen queue
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(path))
            crowd.append(sock)
        log = tmp_path / "daemon.log"
        wait_until(lambda: "no file number" in log.read_text(), within_s=5, what="it is logged")
        assert process.poll() is None
        for sock in crowd:
            sock.close()
        wait_until(lambda: health(path), within_s=5, what="it accepts again")
        with Client(str(path)) as client:
            assert isinstance(list(client.chat("x", max_new_tokens=5))[-1], Done)
            metrics = client.stats().metrics
        assert metrics['chatglm_limits_hit_total{setting="open files"}'] >= 1
        assert "Traceback" not in log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop privileges")
def test_another_user_is_forbidden_and_a_member_of_the_sockets_group_is_not() -> None:
    # pytest's own folders are closed to others, and so may be the interpreter's.
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        home.chmod(0o711)
        with running_toy(home) as (_, path):
            path.chmod(0o666)
            ask = (
                "import os, socket, sys\nos.setgroups([])\nos.setgid(int(sys.argv[2]))\nos.setuid(65534)\n"
                "s = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n"
                'try: s.sendall(b\'{"type":"health"}\')\nexcept BrokenPipeError: pass\nprint(s.recv(9999))'
            )
            said = {}
            for gid in (65534, path.stat().st_gid):
                command = [sys.executable, "-c", ask, str(path), str(gid)]
                said[gid] = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
            assert '"forbidden"' in said[65534] and '"ready"' in said[path.stat().st_gid]
            with Client(str(path)) as client:
                assert client.stats().metrics['chatglm_errors_total{code="forbidden"}'] == 1
    finally:
        shutil.rmtree(home)


@pytest.fixture
def full_disk(tmp_path: Path) -> Path:
    """A file system of a few pages, where one may be mounted; else a device that is always full."""
    folder = tmp_path / "full"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    return folder


def test_a_full_disk_stops_no_answer_and_no_drain(tmp_path: Path, full_disk: Path) -> None:
    try:
        with contextlib.suppress(OSError), (full_disk / "filler").open("wb") as filler:
            filler.write(b"x" * 60_000)
            filler.flush()
        flags = ["--drain-s", "0.2", "--spool-dir", str(full_disk / "spool"), "--audit-file", str(full_disk / "audit")]
        environ = clean_environment(TOY='{"decode_s": 0.005}')
        command = toy_command(tmp_path / "s", *flags)
        # The log goes to the full disk too.
        with running(command, log=full_disk / "log", environ=environ) as process:
            wait_until(lambda: health(tmp_path / "s"), within_s=20, what="up")
            with contextlib.suppress(OSError), (full_disk / "more").open("wb", buffering=0) as filler:
                while True:
                    filler.write(b"x" * 512)
            with Client(str(tmp_path / "s")) as client:
                for _ in range(20):
                    assert isinstance(list(client.chat("x" * 500, max_new_tokens=20))[-1], Done)
                answer = client.chat("x", max_new_tokens=2000)
                client.wait_event(answer.mailbox)
                process.terminate()
                done = list(answer)[-1]
                assert isinstance(done, Done) and done.reason == "drained"
            assert process.wait(10) == 0
    finally:
        subprocess.run(["umount", "-l", full_disk], check=False)


def test_a_log_folder_that_is_removed_stops_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    command = toy_command(tmp_path / "s", "--audit-file", str(folder / "audit.jsonl"))
    with running(command, log=folder / "log", environ=clean_environment(TOY="{}")) as process:
        wait_until(lambda: health(tmp_path / "s"), within_s=20, what="up")
        with Client(str(tmp_path / "s")) as client:
            client.chat("x", max_new_tokens=5).text()
            folder.rename(tmp_path / "gone")  # at once: rmtree alone races with what is written there
            shutil.rmtree(tmp_path / "gone")
            for _ in range(20):
                assert isinstance(list(client.chat("x", max_new_tokens=5))[-1], Done)
        process.terminate()
        assert process.wait(10) == 0


def test_the_reader_that_stays_after_a_kill_is_told_in_less_than_a_second_twenty_times(tmp_path: Path) -> None:
    for number in range(20):
        with running_toy(tmp_path, decode_s=0.01) as (process, path), Client(str(path)) as client:
            answer = iter(client.chat("x", max_new_tokens=2000))
            for _ in range(1 + number % 7):
                next(answer)
            killed_at = time.monotonic()
            process.kill()
            with pytest.raises(ConnectionLost):
                list(answer)
            assert time.monotonic() - killed_at < 1
            process.wait(5)
            assert path.exists()  # stale: the next round takes it over
