"""The page's settings: what is refused, and that the refusal names its reason."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from service.settings import SettingsError
from tests.processes import free_port, num_frozen, running, wait_until
from webui.settings import read_config


def test_the_defaults_serve_this_machine_only() -> None:
    settings = read_config([], {}).settings
    assert (settings.host, settings.port, settings.socket_path) == ("127.0.0.1", 7860, "/tmp/chatglm.sock")
    assert read_config([], {}).credentials == ()


def test_a_flag_beats_the_environment() -> None:
    assert read_config(["--port", "8000"], {"CHATGLM_WEBUI_PORT": "9000"}).settings.port == 8000
    assert read_config([], {"CHATGLM_WEBUI_PORT": "9000"}).settings.port == 9000


def test_the_socket_is_the_daemons_unless_the_page_has_its_own() -> None:
    both = {"CHATGLM_SOCKET_PATH": "/a", "CHATGLM_WEBUI_SOCKET_PATH": "/b"}
    assert read_config([], {"CHATGLM_SOCKET_PATH": "/a"}).settings.socket_path == "/a"
    assert read_config([], both).settings.socket_path == "/b"
    assert read_config(["--socket-path", "/c"], both).settings.socket_path == "/c"


def test_settings_of_the_daemon_are_not_the_pages_business() -> None:
    assert read_config([], {"CHATGLM_MAX_BATCH_SIZE": "3", "CHATGLM_MODEL": "x"}).settings.port == 7860


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--what", "1"], {}, "--what"),
        (["--port", "http"], {}, "--port"),
        (["--port", "70000"], {}, "--port"),
        (["--log-level", "loud"], {}, "--log-level"),
        (["--root-path", "glm/"], {}, "--root-path"),
        (["--allow-anonymous=maybe"], {}, "--allow-anonymous"),
        ([], {"CHATGLM_WEBUI_PROT": "1"}, "CHATGLM_WEBUI_PROT"),
        ([], {"CHATGLM_WEBUI_PORT": "x"}, "CHATGLM_WEBUI_PORT"),
        (["--auth"], {}, "--auth"),
        (["--auth-file", "/nowhere/at/all"], {}, "--auth-file"),
    ],
)
def test_what_is_unknown_or_impossible_names_itself(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        read_config(argv, environ)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "glm.example.org"])
def test_other_machines_need_a_password_or_a_word_that_they_do_not(host: str) -> None:
    with pytest.raises(SettingsError, match="--allow-anonymous"):
        read_config(["--host", host], {})
    assert read_config(["--host", host, "--allow-anonymous"], {}).settings.allow_anonymous
    assert read_config(["--host", host, "--auth", "ann:secret"], {}).credentials == (("ann", "secret"),)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_this_machine_needs_no_password(host: str) -> None:
    assert read_config(["--host", host], {}).settings.host == host


def test_credentials_come_from_flags_and_from_a_file(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("# who\n\ncarl:with:colon\n", "utf-8")
    config = read_config(["--auth", "ann:1", "--auth=bob:2", "--auth-file", str(names)], {})
    assert config.credentials == (("ann", "1"), ("bob", "2"), ("carl", "with:colon"))
    assert read_config([], {"CHATGLM_WEBUI_AUTH": "ann:1"}).credentials == (("ann", "1"),)


@pytest.mark.parametrize("text", ["hunter2", ":hunter2", "hunter2:"])
def test_a_broken_password_is_not_repeated_in_the_message(text: str) -> None:
    with pytest.raises(SettingsError, match="--auth") as caught:
        read_config(["--auth", text], {})
    assert "hunter2" not in str(caught.value)


def test_an_auth_file_that_names_nobody_protects_nothing(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("# nobody\n", "utf-8")
    with pytest.raises(SettingsError, match="nobody"):
        read_config(["--host", "0.0.0.0", "--auth-file", str(tmp_path / "names")], {})


def run_page(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "webui", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_bad_settings_exit_3_and_a_taken_port_exits_1_with_one_sentence() -> None:
    refused = run_page("--host", "0.0.0.0")
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (3, "", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_page("--port", str(port))
    assert refused.returncode == 1
    assert f"127.0.0.1:{port}" in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_the_process_holds_no_torch_and_leaves_at_once_with_an_open_stream(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "webui", "--port", str(port), "--socket-path", str(tmp_path / "no.sock")]
    environ = {name: value for name, value in os.environ.items() if name != "SUPERVISOR_ENABLED"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "startup complete" in line:
                break
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/gradio_api/heartbeat/x", timeout=10) as stream:
            assert b"ALIVE" in stream.readline()
            assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=2)
        assert process.returncode == 0
        assert "Traceback" not in log


def test_a_signal_that_comes_while_garbage_is_collected_ends_the_page_too(tmp_path: Path) -> None:
    """What a signal's handler raises there is ignored."""
    log, flags = tmp_path / "log", ["--port", str(free_port()), "--socket-path", str(tmp_path / "no.sock")]
    with running([sys.executable, "-m", "webui", *flags], log=log) as process:
        wait_until(lambda: "the page is at" in log.read_text(), within_s=60, what="it is built", log=log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_the_garbage_collector_leaves_gradio_alone(tmp_path: Path) -> None:
    log, flags = tmp_path / "log", ["--port", str(free_port()), "--socket-path", str(tmp_path / "no.sock")]
    assert num_frozen("webui", *flags, log=log, is_up=lambda: "startup complete" in log.read_text()) > 100_000
