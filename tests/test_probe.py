"""`chatglm-service probe`: what it prints, and its exit code."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from service.client import Client
from service.probe import Asked, ask, describe, describe_asked, duration, main
from service.protocol import HealthReport
from tests.harness import ThreadedService
from tests.processes import ROOT, clean_environment
from tests.toy import ToyRunner


def probe(path: str, *flags: str) -> tuple[int, str]:
    out = io.StringIO()
    return main(["--socket-path", path, "--timeout-s", "5", *flags], {}, out), out.getvalue()


def test_a_ready_daemon_is_0_and_one_block(tmp_path: Path) -> None:
    with ThreadedService(tmp_path) as service:
        code, said = probe(service.path)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert lines["phase"] == "ready" and lines["model"].startswith("toy (") and lines["socket"] == service.path
    assert lines["slots"] == "3 of 2048 tokens" and lines["requests"] == "0 running, 0 queued"


def test_ask_times_a_small_answer(tmp_path: Path) -> None:
    with ThreadedService(tmp_path, ToyRunner(end_one_in=0)) as service:
        code, said = probe(service.path, "--ask")
    assert code == 0 and "first text after" in said and "all 8 tokens" in said and "ended by length" in said


def test_a_loading_daemon_is_1(tmp_path: Path) -> None:
    with ThreadedService(tmp_path, is_ready=False) as service:
        code, said = probe(service.path, "--ask")
    assert code == 1 and "loading, 0%" in said and "first text" not in said


def test_no_daemon_is_1_with_one_line(tmp_path: Path) -> None:
    code, said = probe(str(tmp_path / "nothing"))
    assert code == 1 and said.startswith("problem") and said.count("\n") == 1


def test_the_socket_may_come_from_the_environment(tmp_path: Path) -> None:
    out = io.StringIO()
    assert main([], {"CHATGLM_SOCKET_PATH": str(tmp_path / "elsewhere")}, out) == 1
    assert "elsewhere" in out.getvalue()


def test_ask_measures_with_the_clock_it_is_given(tmp_path: Path) -> None:
    readings = iter([10.0, 10.5, 12.0])
    with ThreadedService(tmp_path) as service, Client(service.path) as client:
        asked = ask(client, 5.0, now=lambda: next(readings))
    assert asked.ttft_s == 0.5 and asked.total_s == 2.0 and asked.num_tokens > 0


def test_an_empty_answer_has_no_first_text() -> None:
    assert "no text, all 0 tokens after 40 ms" in describe_asked(Asked(None, 0.04, 0, "stop"))


def test_what_a_loading_daemon_does_not_know_is_left_out() -> None:
    said = describe("/s", HealthReport("loading", 0.25, model="auto", uptime_s=3.0, version="1"))
    assert "loading, 25%" in said and "slots" not in said and "(" not in said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (90000, "1 d 1 h")]
)
def test_durations_are_for_people(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_as_a_program_it_needs_no_torch_and_starts_no_service(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom service.daemon import main\n"
        f"try:\n    main(['probe', '--socket-path', {str(tmp_path / 's')!r}])\n"
        "except SystemExit as end:\n    print('code', end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
        env=clean_environment(),
    )  # fmt: skip
    assert "code 1 False" in done.stdout and "cannot reach" in done.stdout and not (tmp_path / "s").exists()
