"""`chatglm-service doctor`: each finding, what it advises, and the exit code."""

from __future__ import annotations

import fcntl
import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from service import doctor
from service.doctor import Finding
from service.models.survey import Survey
from service.settings import Settings
from tests.harness import ThreadedService
from tests.processes import DEFAULT_MODEL, ROOT, clean_environment

GIB = 2**30
SURVEY = Survey(Path("model"), 3, 12 * GIB, False, 28672, 8192)


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def fake_proc(folder: Path, *, available_kb: int = 32 * 2**20, wmem_max: int = 2**21, locks: str = "") -> Path:
    (folder / "sys/net/core").mkdir(parents=True)
    (folder / "sys/net/core/wmem_max").write_text(f"{wmem_max}\n")
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kb} kB\n")
    (folder / "locks").write_text(locks)
    return folder


def listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    path.chmod(0o660)
    sock.listen()
    return sock


def test_a_step_that_was_not_compiled_is_a_note_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 fma f16c\nbugs : none\n")
    compiled = tmp_path / "models"
    compiled.mkdir()
    monkeypatch.setattr("service.models.compiled.__file__", str(compiled / "compiled.py"))
    found = doctor.check_compiled(tmp_path)
    assert found.level == "note" and "gcc" in found.advice
    (compiled / "_step_avx512.cpython-311-x86_64-linux-gnu.so").touch()
    assert doctor.check_compiled(tmp_path).level == "note"  # this processor cannot run it
    (compiled / "_step_avx2.abi3.so").touch()
    assert str(doctor.check_compiled(tmp_path)).startswith("ok    cpu")
    flags = "avx512f avx512bw avx512dq avx512vl avx512_vnni fma f16c avx2 avx512_bf16 amx_tile amx_bf16"
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    found = doctor.check_compiled(tmp_path)
    assert found.level == "note" and "avx512 only" in found.what and "gcc 11" in found.advice
    (compiled / "_step_amx.abi3.so").touch()
    assert str(doctor.check_compiled(tmp_path)).startswith("ok    cpu")
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu sse2\n")
    assert "AVX2" in doctor.check_compiled(tmp_path).what


# --- socket ------------------------------------------------------------------------------------------------------


def test_a_free_path_and_a_living_daemon_are_ok(tmp_path: Path) -> None:
    assert only(doctor.check_socket(tmp_path / "s")).level == "ok"
    with ThreadedService(tmp_path) as service:
        found = only(doctor.check_socket(Path(service.path)))
    assert found.level == "ok" and found.topic == "daemon" and "phase ready" in found.what


def test_a_stale_socket_is_a_note_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen(path).close()
    found = only(doctor.check_socket(path))
    assert found.level == "note" and "stale" in found.what and path.exists()


def test_a_file_a_long_path_and_a_missing_folder_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file", tmp_path / ("x" * 120), tmp_path / "missing" / "s"):
        found = only(doctor.check_socket(path))
        assert found.level == "wrong" and found.advice
    assert (tmp_path / "file").read_text() == "precious"


def test_a_socket_open_to_everybody_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen(path).close()
    path.chmod(0o666)
    found = next(iter(doctor.check_socket(path)))
    assert found.level == "wrong" and "0666" in found.what and "chmod 0660" in found.advice


# --- lock --------------------------------------------------------------------------------------------------------


def test_a_lock_names_its_holder_without_being_tried(tmp_path: Path) -> None:
    path = tmp_path / "s.lock"
    assert not list(doctor.check_lock(path, Path("/proc"), is_live=False))
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        locks = f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:2f:{path.stat().st_ino} 0 EOF\n2: POSIX x\n"
        proc = fake_proc(tmp_path / "proc", locks=locks)
        assert only(doctor.check_lock(path, proc, is_live=True)).level == "ok"
        found = only(doctor.check_lock(path, proc, is_live=False))
    assert found.level == "wrong" and str(os.getpid()) in found.what


def test_a_lock_that_is_a_symbolic_link_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "s.lock").symlink_to(tmp_path / "other")
    assert only(doctor.check_lock(tmp_path / "s.lock", Path("/proc"), is_live=False)).level == "wrong"


# --- folders -----------------------------------------------------------------------------------------------------


def test_a_missing_audit_folder_is_wrong_only_where_one_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert only(doctor.check_folders(Settings())).level == "note"
    missing = only(doctor.check_folders(Settings(audit_file="gone/audit.jsonl")))
    assert missing.level == "wrong" and missing.advice == "mkdir gone"
    (tmp_path / "logs").mkdir()
    assert only(doctor.check_folders(Settings())).level in ("ok", "wrong")  # wrong: this machine's disk is full


def test_a_disk_without_room_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=10 * 2**20))
    found = only(doctor.check_folders(Settings(audit_file=str(tmp_path / "audit.jsonl"))))
    assert found.level == "wrong" and "10 MiB" in found.what


# --- memory, GPU, buffers ----------------------------------------------------------------------------------------


def test_memory_is_compared_where_the_model_would_run(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", available_kb=3 * 2**20)
    host = doctor.check_memory(Settings(), SURVEY, proc, [])
    assert host.level == "wrong" and "3.0 GiB free on the host" in host.what and "--max-context" in host.advice
    gpu = doctor.check_memory(Settings(), SURVEY, proc, [("H200", 20 * GIB)])
    assert gpu.level == "ok" and "20.0 GiB free on the GPU" in gpu.what
    assert doctor.check_memory(Settings(device="cpu"), SURVEY, proc, [("H200", 20 * GIB)]).level == "wrong"


def test_a_container_limit_counts(tmp_path: Path) -> None:
    proc, cgroup = fake_proc(tmp_path / "proc", available_kb=8 * 2**20), tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "memory.current").write_text(f"{GIB}\n")
    for limit, free in (("max", 8 * GIB), (str(3 * GIB), 2 * GIB), (str(GIB // 2), 0), (str(99 * GIB), 8 * GIB)):
        (cgroup / "memory.max").write_text(limit + "\n")
        assert doctor.free_memory(proc, cgroup) == free
    assert doctor.free_memory(proc, tmp_path / "no cgroup") == 8 * GIB


def test_cuda_without_a_gpu_is_wrong_and_auto_uses_the_cpu() -> None:
    assert only(doctor.check_gpu("cuda", [])).level == "wrong"
    assert only(doctor.check_gpu("auto", [])).level == "ok"
    assert not list(doctor.check_gpu("cpu", []))
    assert "24.0 GiB free" in only(doctor.check_gpu("auto", [("RTX", 24 * GIB)])).what


def test_nvidia_smi_is_read_and_its_absence_or_failure_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, found in (
        ("echo 'NVIDIA RTX 4090, 24000'", [("NVIDIA RTX 4090", 24000 * 2**20)]), ("exit 9", []), ("echo nonsense", []),
    ):  # fmt: skip
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        assert doctor.read_gpus() == found
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert doctor.read_gpus() == []


@pytest.mark.parametrize(("may_force", "level"), [(True, "ok"), (False, "note")])
def test_a_small_wmem_max_is_a_note_unless_it_may_be_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_force: bool, level: str
) -> None:
    monkeypatch.setattr(doctor, "_may_force_buffers", lambda: may_force)
    found = doctor.check_send_buffer(fake_proc(tmp_path / "proc", wmem_max=212_992))
    assert found.level == level and ("sysctl" in found.advice) == (level == "note")


# --- the whole ---------------------------------------------------------------------------------------------------


def test_missing_weights_are_wrong_and_the_rest_is_examined_still(tmp_path: Path) -> None:
    settings = replace(Settings(), socket_path=str(tmp_path / "s"), weights_dir=str(tmp_path))
    findings = list(doctor.examine(settings, fake_proc(tmp_path / "proc")))
    wrong = [finding for finding in findings if finding.level == "wrong"]
    assert [finding.topic for finding in wrong] == ["weights"] and findings[-1].topic == "buffers"


def test_a_bad_setting_names_itself() -> None:
    out = io.StringIO()
    assert doctor.main(["--colour", "red"], {}, out) == 1
    assert "--colour" in out.getvalue()


@pytest.mark.parametrize(("model", "code"), [(str(DEFAULT_MODEL), 0), ("/nowhere/at/all", 1)])
def test_as_a_program_its_exit_code_tells(tmp_path: Path, model: str, code: int) -> None:
    command = [sys.executable, "-m", "service", "doctor", "--socket-path", str(tmp_path / "s"), "--model", model]
    done = subprocess.run(
        [*command, "--max-context", "512", "--audit-file", str(tmp_path / "audit.jsonl")], cwd=ROOT, text=True,
        capture_output=True, timeout=60, check=False, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == ("1 wrong" if code else "nothing is wrong")
    assert not list(tmp_path.iterdir())
