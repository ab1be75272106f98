"""A second start takes the quantised matrices from the file that the first one left, if it is the right one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from service.models import linear, nf4, quantized_cache
from service.models.nf4 import TiledNf4Linear
from service.models.quantized_cache import QuantizedCache
from service.models.tensor_files import FileTensor, TensorFiles
from tests.models.chatglm1_reference import write_random
from tests.models.conftest import Load
from tests.models.test_chatglm1 import PROMPTS
from tests.models.test_decoder import prefill

pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, while it is imported
SIZES = {"num_heads": 4, "head_dim": 32, "num_layers": 2, "inner": 256}
PARTS = {"values": torch.arange(200, dtype=torch.uint8), "scales": torch.ones(3, 4).bfloat16()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random(tmp_path, 0, **SIZES)
    return tmp_path


@pytest.fixture(autouse=True, params=["compiled", "not compiled"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "not compiled":
        monkeypatch.setattr(linear, "library", lambda: None)


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob(".chatglm-nf4-*"))


def answer(folder: Path, load: Load, *, keeps: bool = True) -> Tensor:
    return prefill(load(folder, keeps_quantized=keeps).decoder, 0, 0, PROMPTS[1])


def count_quantized(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that are quantised from now on."""
    shapes: list[torch.Size] = []
    real = nf4._quantized

    def quantized(weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        shapes.append(weight.shape)
        return real(weight)

    monkeypatch.setattr(nf4, "_quantized", quantized)
    return shapes


needs_kernel = pytest.mark.skipif(
    not TiledNf4Linear.has_kernel() and linear.library() is None, reason="neither the compiled kernel, nor AVX-512"
)


@needs_kernel
def test_the_second_start_quantises_nothing_and_answers_the_same(
    folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = count_quantized(monkeypatch)
    first = answer(folder, load)
    assert len(shapes) == 2 * 4 + 1  # two layers' matrices and the head
    (path,) = kept(folder)
    written = path.stat().st_mtime_ns
    read: list[torch.Size] = []
    real = FileTensor.read

    def note(place: FileTensor) -> Tensor:
        read.append(place.shape)
        return real(place)

    monkeypatch.setattr(FileTensor, "read", note)
    shapes.clear()
    assert torch.equal(answer(folder, load), first)
    assert not shapes and path.stat().st_mtime_ns == written
    assert not {(384, 128), (832, 128)} & {tuple(shape) for shape in read}  # neither qkv nor the head


def test_without_the_setting_nothing_is_written(folder: Path, load: Load) -> None:
    answer(folder, load, keeps=False)
    load(folder, quantization="none", keeps_quantized=True)
    assert not kept(folder)


def test_other_programs_can_read_the_file_and_the_checkpoint_stays_as_it_is(folder: Path, load: Load) -> None:
    names = TensorFiles(folder).names
    answer(folder, load)
    with safe_open(kept(folder)[0], framework="pt") as opened:
        assert {f"lm_head.weight/{part}" for part in ("blocks", "scales", "absmax")} & set(opened.keys())
    assert TensorFiles(folder).names == names


@pytest.mark.parametrize("what", ["empty", "cut", "text", "a byte of the data", "another checkpoint's"])
def test_a_damaged_file_is_ignored_and_written_again(
    what: str, folder: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    first = answer(folder, load)
    (path,) = kept(folder)
    content = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut": content[:-100],
        "text": b"hello, this is no such file",
        "a byte of the data": content[:-5] + bytes([content[-5] ^ 255]) + content[-4:],
        "another checkpoint's": content.replace(path.stem.rsplit("-", 1)[1].encode(), b"0" * 16),
    }[what]
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, logger="service.models.quantized_cache"):
        assert torch.equal(answer(folder, load), first)
    assert "quantising again" in caplog.text
    assert kept(folder) == [path] and path.read_bytes() == content


def test_a_changed_shard_makes_a_new_file_and_the_old_one_goes(folder: Path, load: Load) -> None:
    answer(folder, load)
    (before,) = kept(folder)
    os.utime(next(folder.glob("*.bin")), (1, 1))
    answer(folder, load)
    (after,) = kept(folder)
    assert after != before


def make(folder: Path) -> QuantizedCache:
    cache = QuantizedCache(folder, [], "x")
    cache.add("m", PARTS, is_new=True)
    return cache


def test_a_full_disk_is_a_warning_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(part: Tensor) -> memoryview:
        raise OSError(28, "No space left on device")

    cache = make(tmp_path)
    monkeypatch.setattr(quantized_cache, "_bytes", fail)
    cache.save()
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = QuantizedCache(tmp_path / "gone", [], "x")
    cache.add("m", PARTS, is_new=True)
    cache.save()
    assert "the next start is as slow" in caplog.text


def test_parts_come_back_as_they_were(tmp_path: Path) -> None:
    make(tmp_path).save()
    again = QuantizedCache(tmp_path, [], "x")
    found = again.find("m")
    assert found is not None and found.keys() == PARTS.keys()
    assert all(torch.equal(found[name], PARTS[name]) for name in PARTS)
    assert again.find("n") is None
    assert QuantizedCache(tmp_path, [], "y").find("m") is None
