"""The daemon as a process: start, nc, signals, exit codes. With the default model where its answer or load matters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import Client, ConnectionLost
from service.protocol import Accepted, Delta, Done, Draining, Event, Started
from tests.faults.common import running_toy, toy_command
from tests.processes import (
    DEFAULT_MODEL,
    clean_environment,
    daemon_command,
    health,
    num_frozen,
    running,
    running_daemon,
    wait_ready,
    wait_until,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One daemon for the tests that do not stop it: its socket."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as (_, path):
        yield path


def test_it_answers_sensibly_and_names_the_model(daemon: Path) -> None:
    with Client(str(daemon)) as client:
        report = client.health()
        assert report.phase == "ready" and report.progress == 1 and report.family == "llama"
        assert report.slots == 3 and report.context_limit == 1024 and "smollm2" in report.model.lower()
        assert "Paris" in client.chat("What is the capital of France?", temperature=0, max_new_tokens=40).text()


@pytest.mark.skipif(shutil.which("nc") is None, reason="nc is not installed")
@pytest.mark.parametrize("newline", ["\n", ""])
def test_nc_prints_text_and_the_end_mark(daemon: Path, newline: str) -> None:
    sent = '{"prompt":"test","history":[]}' + newline
    with subprocess.Popen(["nc", "-U", str(daemon)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as nc:
        assert nc.stdin is not None and nc.stdout is not None
        nc.stdin.write(sent.encode())
        nc.stdin.flush()  # and stays open: no half-close
        printed = nc.stdout.read().decode()
        nc.stdin.close()
    assert printed.endswith("\nEND_OF_RESPONSE\n") and len(printed) > 20


def test_a_second_turn_reuses_the_first(daemon: Path) -> None:
    with Client(str(daemon)) as client:
        first = list(client.chat("Name three colours.", temperature=0, max_new_tokens=30))
        said = "".join(event.text for event in first if isinstance(event, Delta))
        turns = [
            {"role": "user", "content": "Name three colours."}, {"role": "assistant", "content": said},
            {"role": "user", "content": "And one more?"},
        ]  # fmt: skip
        started = next(e for e in client.chat(turns, temperature=0, max_new_tokens=4) if isinstance(e, Started))
        assert started.cached_tokens > 30


def test_interrupt_takes_effect_within_a_step(daemon: Path) -> None:
    with Client(str(daemon)) as client:
        answer = client.chat("Count from 1 to 1000.", temperature=0, max_new_tokens=900)
        sent_at, last = 0.0, None
        for count, event in enumerate(answer):
            if count == 8:
                sent_at = time.monotonic()
                answer.interrupt()
            last = event
        assert isinstance(last, Done) and last.reason == "interrupted"
        assert time.monotonic() - sent_at < 1.0  # a step takes about 20 ms here; the bound is for busy machines
        assert last.usage.completion_tokens < 500


def test_the_socket_is_0660(daemon: Path) -> None:
    assert daemon.stat().st_mode & 0o777 == 0o660


def test_health_answers_while_loading_and_tells_progress(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with running(daemon_command(path), log=tmp_path / "log") as process:
        seen = set()

        def is_ready() -> bool:
            report = health(path)
            if report is not None:
                seen.add((report.phase, report.progress))
            return report is not None and report.phase == "ready"

        wait_until(is_ready, within_s=60, what="ready", log=tmp_path / "log")
        assert any(phase == "loading" for phase, _ in seen)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_term_lets_running_answers_finish_then_exits_0(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as (process, path), Client(str(path)) as client:
        answer = client.chat("Tell me a story.", temperature=0, max_new_tokens=60)
        events: list[Event] = []
        for event in answer:
            events.append(event)
            if isinstance(event, Started):
                process.send_signal(signal.SIGTERM)
        done = events[-1]
        assert isinstance(done, Done) and done.reason in ("stop", "length")
        assert client.session.drain_notice is not None
        with pytest.raises((Draining, ConnectionLost)):
            client.chat("and now?").text()
        assert process.wait(10) == 0
        assert not path.exists()


def test_a_second_term_ends_at_once_and_keeps_what_was_generated(tmp_path: Path) -> None:
    with running_toy(tmp_path, decode_s=0.02) as (process, path), Client(str(path)) as client:
        answer = client.chat("Count from 1 to 1000.", temperature=0, max_new_tokens=900)
        events: list[Event] = []
        for event in answer:
            events.append(event)
            if sum(isinstance(e, Delta) for e in events) == 3:
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: getattr(health(path), "phase", "") == "draining", within_s=10, what="draining")
                process.send_signal(signal.SIGTERM)
        done = events[-1]
        assert isinstance(done, Done) and done.reason == "drained"
        assert done.usage.completion_tokens == sum(e.tokens for e in events if isinstance(e, Delta))
        assert process.wait(10) == 0


def test_killed_mid_answer_the_client_learns_at_once_and_the_socket_is_taken_over(tmp_path: Path) -> None:
    with running_toy(tmp_path, decode_s=0.02) as (process, path), Client(str(path)) as client:
        answer = iter(client.chat("Count from 1 to 1000.", max_new_tokens=900))
        assert isinstance(next(answer), Accepted)
        process.kill()
        with pytest.raises(ConnectionLost):
            list(answer)
        process.wait(10)
        assert path.exists()  # stale
        with running(toy_command(path), log=tmp_path / "second.log") as second:
            wait_ready(path, log=tmp_path / "second.log", process=second)


def test_the_garbage_collector_leaves_what_the_load_made_alone(tmp_path: Path) -> None:
    path, log = tmp_path / "s", tmp_path / "log"

    def is_ready() -> bool:
        return getattr(health(path), "phase", "") == "ready"

    assert num_frozen("tests.faults.toy_process", "--socket-path", str(path), log=log, is_up=is_ready) > 10_000


def exit_code(tmp_path: Path, command: list[str], **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=clean_environment(**environ), check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("flags", "environ", "says"),
    [
        (["--colour", "red"], {}, "--colour"),
        (["--dtype", "int3"], {}, "int3"),
        ([], {"CHATGLM_COLOUR": "red"}, "CHATGLM_COLOUR"),
        (["--model", "/nowhere/at/all"], {}, "/nowhere/at/all"),
    ],
)
def test_bad_settings_exit_3_and_name_themselves(
    tmp_path: Path, flags: list[str], environ: dict[str, str], says: str
) -> None:
    command = [sys.executable, "-m", "service", "--socket-path", str(tmp_path / "s"), *flags]
    code, said = exit_code(tmp_path, command, **environ)
    assert code == 3 and says in said and "Traceback" not in said


def test_a_truncated_model_exits_3_with_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(DEFAULT_MODEL, broken)
    (weights,) = broken.glob("*.gguf")
    with weights.open("r+b") as file:
        file.truncate(50_000_000)
    code, said = exit_code(tmp_path, daemon_command(tmp_path / "s", "--model", str(broken)))
    assert code == 3 and weights.name in said and "Traceback" not in said


def test_a_second_daemon_exits_4_and_the_first_goes_on(daemon: Path, tmp_path: Path) -> None:
    code, said = exit_code(tmp_path, daemon_command(daemon))
    assert code == 4 and str(daemon) in said
    assert health(daemon) is not None


def test_a_path_that_is_a_file_exits_3_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    code, said = exit_code(tmp_path, daemon_command(path))
    assert code == 3 and "left alone" in said and path.read_text() == "precious"


def test_two_daemons_racing_for_one_path_leave_exactly_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        running(toy_command(path), log=tmp_path / "a.log") as first,
        running(toy_command(path), log=tmp_path / "b.log") as second,
    ):
        wait_ready(path, log=tmp_path / "a.log")
        wait_until(lambda: {first.poll(), second.poll()} != {None}, within_s=10, what="one of them leaves")
        assert {first.poll(), second.poll()} == {None, 4}
        assert health(path) is not None


def test_the_log_has_no_prompt_and_names_the_send_buffer(tmp_path: Path) -> None:
    with running_toy(tmp_path) as (process, path):
        with Client(str(path)) as client:
            client.chat("xylophone-secret", max_new_tokens=3).text()
        os.kill(process.pid, signal.SIGTERM)
        process.wait(10)
        log = (tmp_path / "daemon.log").read_text()
    assert "xylophone" not in log and "send buffer" in log and "phase ready" in log and "drain" in log


def test_the_audit_has_a_line_a_request_and_is_flushed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with running_toy(tmp_path, "--audit-file", str(path), decode_s=0.02) as (process, socket_path):
        with Client(str(socket_path)) as client:
            client.chat("xylophone-secret", id="first", max_new_tokens=3).text()
            assert isinstance(next(iter(client.chat("xylophone-secret", id="second", max_new_tokens=900))), Accepted)
        process.terminate()  # the second one is nobody's now, and within its resume window
        assert process.wait(10) == 0
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["id"], first["reason"], first["completion_tokens"]) == ("first", "length", 3)
    assert (second["id"], second["reason"]) == ("second", "interrupted")
    assert first["uid"] == os.getuid() and first["pid"] == os.getpid() and first["ttft_ms"] > 0
    assert "xylophone" not in path.read_text() and path.stat().st_mode & 0o777 == 0o600


def test_half_closed_plain_input_is_answered_whole(daemon: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon))
        sock.sendall(b'{"type":"chat","id":"a","prompt":"hi","params":{"max_new_tokens":5}}')
        sock.shutdown(socket.SHUT_WR)
        lines = [json.loads(line) for line in sock.makefile()]
    assert lines[0]["type"] == "accepted" and lines[-1]["type"] == "done"
