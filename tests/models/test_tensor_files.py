"""Both layouts give the tensors they hold, read on demand; what is missing, damaged or no weights at all is named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from service.models.errors import ModelError
from service.models.tensor_files import TensorFiles, map_tensors
from tests.models.chatglm import LAYOUTS, write_weights

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:5e97\nsize 2706249\n"


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(5, 3).half(), "b": torch.randn(7).float(), "c": torch.randn(4, 33, 2).bfloat16(),
        "d": torch.arange(12, dtype=torch.int64).view(4, 3), "e": torch.randn(1000, 8), "f": torch.tensor(2.5),
    }  # fmt: skip


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_comes_back_with_its_type(
    layout: str, num_shards: int, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    write_weights(tmp_path, tensors, layout, num_shards=num_shards)
    files = TensorFiles(tmp_path)
    assert files.names == set(tensors) and len(files.paths) == num_shards
    for name, wanted in tensors.items():
        got = files.fetch(name)
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_from_their_place_in_the_file(layout: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, layout)
    files = TensorFiles(tmp_path)
    for name in ("a", "e"):
        place = files.find(name)
        assert place is not None
        rows = [4, 0, 4, 1]
        assert torch.equal(place.rows(rows), tensors[name][rows])
    assert files.find("z") is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_without_an_index_are_found(layout: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, layout)
    next(tmp_path.glob("*.index.json")).unlink()
    (tmp_path / ".chatglm-nf4-x.safetensors").write_text("not one of them")
    assert TensorFiles(tmp_path).names == set(tensors)


def test_a_view_of_a_larger_tensor_keeps_its_own_rows(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    torch.save({"low": whole[:2], "high": whole[2:], "turned": whole.T}, tmp_path / "pytorch_model.bin")
    files = TensorFiles(tmp_path)
    assert files.find("turned") is None  # lies there in another order
    assert torch.equal(files.fetch("turned"), whole.T)
    assert torch.equal(files.fetch("low"), whole[:2]) and torch.equal(files.fetch("high"), whole[2:])


def test_files_of_before_torch_1_6_are_read(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(TensorFiles(tmp_path).fetch("a"), tensors["a"])


def test_what_is_read_is_the_callers_own(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, "safetensors")
    files = TensorFiles(tmp_path)
    files.fetch("a").zero_()
    assert torch.equal(files.fetch("a"), tensors["a"])


def test_code_in_a_bin_file_does_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    torch.save({"a": Attack()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="damaged"):
        TensorFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(), protocol=2))
    with pytest.raises(ModelError, match="damaged"):
        TensorFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[torch.ones(2)], {"a": "text"}], ids=["list", "text"])
def test_a_bin_file_of_something_else_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.95, 0.9999])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_truncated_shard_is_named(layout: str, share: float, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, layout)
    path = next(tmp_path.glob("*00002-of*"))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=rf"{path.name} is truncated or damaged.*copy it again"):
        TensorFiles(tmp_path)


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, "safetensors", num_shards=1)
    files = TensorFiles(tmp_path)
    path = files.paths[0]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelError, match="truncated"):
        for name in tensors:
            files.fetch(name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_shard_is_named(layout: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, layout)
    path = next(tmp_path.glob("*00002-of*"))
    path.unlink()
    with pytest.raises(ModelError, match=rf"lacks the shard {path.name}: copy it into the folder"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_git_lfs_pointer_is_no_shard(layout: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, layout)
    next(tmp_path.glob("*00001-of*")).write_text(POINTER)
    with pytest.raises(ModelError, match=r"is a Git LFS pointer.*git lfs pull"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        TensorFiles(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        TensorFiles(tmp_path)


def test_missing_and_unknown_tensors_are_named(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, "safetensors")
    files = TensorFiles(tmp_path)
    files.check(["a", "b", "c", "d", "e"], lambda name: name == "f")
    with pytest.raises(ModelError, match=r"no tensor 'y' \(2 missing\)"):
        files.check([*tensors, "z", "y"], lambda name: False)
    with pytest.raises(ModelError, match=r"unknown tensor 'e' \(2 such\)"):
        files.check(["a", "b", "c", "d"], lambda name: False)
    with pytest.raises(ModelError, match="no tensor 'z'"):
        files.fetch("z")


def test_metadata_of_safetensors_is_given(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_weights(tmp_path, tensors, "safetensors", num_shards=1)
    found, metadata = map_tensors(tmp_path / "model-00001-of-00001.safetensors")
    assert set(found) == set(tensors) and metadata == {"format": "pt"}
    assert json.dumps(metadata)
