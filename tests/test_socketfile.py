"""The socket's place: one daemon a path, and nothing of anybody else's is ever removed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from service.socketfile import PathRefused, PathTaken, SocketFile


def test_the_socket_is_0660_and_leaves_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "s"
    claimed = SocketFile.claim(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660 and claimed.is_ours()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
    claimed.release()
    assert not path.exists()


def test_a_second_claim_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    claimed = SocketFile.claim(str(tmp_path / "s"))
    with pytest.raises(PathTaken):
        SocketFile.claim(str(tmp_path / "s"))
    assert claimed.is_ours()
    claimed.release()
    SocketFile.claim(str(tmp_path / "s")).release()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    claimed = SocketFile.claim(str(path))
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))  # the stale one would refuse
    claimed.release()


def test_somebody_who_listens_without_our_lock_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(PathTaken, match="listens"):
            SocketFile.claim(str(path))
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "dangling symlink"])
def test_what_is_not_a_socket_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path if kind == "symlink" else tmp_path / "nothing")
    with pytest.raises(PathRefused, match="left alone"):
        SocketFile.claim(str(path))
    assert os.path.lexists(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_another_users_socket_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    os.chown(path, 65534, -1)
    with pytest.raises(PathRefused, match="belongs to uid 65534"):
        SocketFile.claim(str(path))
    assert path.exists()


def test_a_lock_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathRefused, match="symbolic link"):
        SocketFile.claim(str(tmp_path / "s"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_name_that_was_taken_over_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    claimed = SocketFile.claim(str(path))
    path.unlink()
    path.write_text("somebody else's")
    claimed.release()
    assert path.read_text() == "somebody else's"


@pytest.mark.parametrize("path", ["/nowhere/at/all/s", "/tmp/" + "x" * 120])
def test_a_path_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(PathRefused):
        SocketFile.claim(path)


@pytest.mark.parametrize("lock_too", [False, True])
def test_a_removed_name_is_bound_again_and_the_lock_still_holds(tmp_path: Path, lock_too: bool) -> None:
    path = tmp_path / "s"
    claimed = SocketFile.claim(str(path))
    assert not claimed.is_gone()
    path.unlink()
    if lock_too:
        (tmp_path / "s.lock").unlink()
    assert claimed.is_gone()
    claimed.claim_again().close()
    assert claimed.is_ours() and stat.S_IMODE(path.stat().st_mode) == 0o660
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
    with pytest.raises(PathTaken):
        SocketFile.claim(str(path))
    claimed.release()
    assert not path.exists()


def test_a_name_that_became_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    claimed = SocketFile.claim(str(path))
    path.unlink()
    path.write_text("precious")
    assert not claimed.is_gone() and not claimed.is_ours()
    with pytest.raises(PathRefused):
        claimed.claim_again()
    claimed.release()
    assert path.read_text() == "precious"
