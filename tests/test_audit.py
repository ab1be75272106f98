"""The audit file: whole lines, 0600, rotation, and a disk that is full or gone."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.audit import Audit, RotatedFile


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Drops:
    """Counts dropped lines, and lets a test wait for them."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def __call__(self, num: int) -> None:
        with self._changed:
            self.count += num
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, timeout=10), self.count


def audit(path: Path, drops: Drops, **options: Any) -> Audit:
    return Audit(path, **{"max_bytes": 10**6, "num_backups": 2, **options}, on_drop=drops)


def test_records_come_out_as_lines_of_a_private_file(tmp_path: Path) -> None:
    path, drops = tmp_path / "audit.jsonl", Drops()
    writer = audit(path, drops)
    for number in range(100):
        writer.put({"id": f"r{number}", "答": "好"})
    assert writer.close(10) and drops.count == 0
    assert [record["id"] for record in read(path)] == [f"r{number}" for number in range(100)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"id":"old"}\n')
    path.chmod(0o644)
    writer = audit(path, Drops())
    writer.put({"id": "new"})
    assert writer.close(10)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [record["id"] for record in read(path)] == ["old", "new"]


def test_a_full_disk_drops_lines_and_counts_them(tmp_path: Path) -> None:
    drops = Drops()
    mode = os.stat("/dev/full").st_mode
    writer = audit(Path("/dev/full"), drops)
    for number in range(5):
        writer.put({"id": number})
    assert writer.close(10)
    assert drops.count == 5 and os.stat("/dev/full").st_mode == mode


def test_a_removed_folder_drops_lines_until_it_is_back(tmp_path: Path) -> None:
    folder, drops = tmp_path / "logs", Drops()
    folder.mkdir()
    path = folder / "audit.jsonl"
    writer = audit(path, drops)
    folder.rename(tmp_path / "away")  # whether the writer has opened its file by now or not
    writer.put({"id": "lost"})
    drops.wait_for(1)
    folder.mkdir()
    writer.put({"id": "kept"})
    assert writer.close(10)
    assert [record["id"] for record in read(path)] == ["kept"] and drops.count == 1


def test_a_file_that_was_moved_away_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = RotatedFile(path, max_bytes=10**6, num_backups=1)
    file.append(b"1\n")
    path.rename(tmp_path / "moved")
    file.append(b"2\n")
    file.close()
    assert (tmp_path / "moved").read_bytes() == b"1\n" and path.read_bytes() == b"2\n"


def test_a_symbolic_link_and_a_pipe_without_a_reader_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            RotatedFile(tmp_path / name, max_bytes=100, num_backups=1).append(b"x\n")
    assert not (tmp_path / "target").exists()


def test_a_half_written_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    file = RotatedFile(path, max_bytes=10**6, num_backups=1)
    file.append(b"whole\n")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
        with pytest.raises(OSError, match="3 of 7 bytes"):
            file.append(b"halved\n")
    file.append(b"next\n")
    file.close()
    assert path.read_bytes() == b"whole\nnext\n"


def test_what_does_not_fit_in_the_queue_is_dropped_at_once(tmp_path: Path) -> None:
    pipe, drops = tmp_path / "pipe", Drops()
    os.mkfifo(pipe)
    gate = threading.Event()

    class Held(Drops):
        def __call__(self, num: int) -> None:
            """The writer's first drop: it stays in here while the queue fills."""
            if threading.current_thread().name == "audit":
                gate.wait(10)
            super().__call__(num)

    held = Held()
    writer = audit(pipe, held, max_waiting=2)
    for number in range(10):
        writer.put({"id": number})
    assert held.count >= 7  # ten, less one in the writer's hand and two that wait
    gate.set()
    assert writer.close(10)
    assert held.count == 10 and drops.count == 0


@given(sizes=st.lists(st.integers(1, 60), max_size=40), max_bytes=st.integers(1, 120), num_backups=st.integers(1, 4))
def test_rotation_keeps_order_whole_lines_and_its_bounds(sizes: list[int], max_bytes: int, num_backups: int) -> None:
    lines = [f"{number}:".encode() + b"x" * size + b"\n" for number, size in enumerate(sizes)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        file = RotatedFile(path, max_bytes=max_bytes, num_backups=num_backups)
        for line in lines:
            file.append(line)
        file.close()
        names = [path.with_name(f"a.{number}") for number in range(num_backups, 0, -1)] + [path]
        parts = [name.read_bytes() for name in names if name.exists()]
        assert len(list(Path(folder).iterdir())) == len(parts) <= num_backups + 1
        assert b"".join(lines).endswith(b"".join(parts))
        assert all(len(part) <= max_bytes or part.count(b"\n") == 1 for part in parts)
        assert not lines or parts[-1].endswith(lines[-1])
