"""A tokenizer's file that is missing or is not the file itself is named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.models.errors import ModelError
from service.models.tokenizer_files import find_file, naming_missing_keys, read_config, read_json

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:5e97\nsize 2706249\n"


def test_a_file_that_is_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0b")
    assert find_file(tmp_path, "tokenizer.model") == tmp_path / "tokenizer.model"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.model"):
        find_file(tmp_path, "tokenizer.model")


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer_config.json"])
def test_an_lfs_pointer_is_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ModelError, match="git lfs pull"):
        find_file(tmp_path, name)
    if name.endswith(".json"):
        with pytest.raises(ModelError, match="git lfs pull"):
            read_config(tmp_path)


def test_the_config_may_be_absent_but_not_broken(tmp_path: Path) -> None:
    assert read_config(tmp_path) == {}
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"num_image_tokens": 0}')
    assert read_config(tmp_path) == {"num_image_tokens": 0}
    for broken in ("{", "[]"):
        path.write_text(broken)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
            read_config(tmp_path)


def test_a_json_file_that_cannot_be_read_ends_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json .*: copy the checkpoint again$"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object: fetch it$"):
        read_json(tmp_path / "config.json", "fetch it")


def test_a_missing_key_is_named_with_its_file(tmp_path: Path) -> None:
    values = {"a": 1}
    with (
        pytest.raises(ModelError, match=r"config\.json lacks 'b': copy the checkpoint again"),
        naming_missing_keys(tmp_path),
    ):
        values["b"]
