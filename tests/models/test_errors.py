"""What a wrong path, or a wrong choice, answers: one sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from service.models import (
    DEFAULT_CONTEXT,
    DEFAULT_KV_BYTES,
    DEFAULT_MODEL,
    MIN_CONTEXT,
    ModelError,
    choose_model,
    unasked_context,
)
from tests.models.conftest import Load, MakeFolder


def test_auto_takes_the_only_model_and_the_default_one_last(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="make model"):
        choose_model("auto", tmp_path / "nothing")
    for name in (DEFAULT_MODEL, "chatglm3-6b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        assert choose_model("auto", tmp_path).name == name
    (tmp_path / "other.gguf").write_text("")
    with pytest.raises(ModelError, match=r"choose with --model.*chatglm3-6b, .*other\.gguf"):
        choose_model("auto", tmp_path)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        choose_model(str(tmp_path / "nowhere"), tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path, load: Load) -> None:
    with pytest.raises(ModelError, match="is no model"):
        load(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_text("")
    with pytest.raises(ModelError, match="2 GGUF files"):
        load(tmp_path)


def test_impossible_choices_are_refused(make_folder: MakeFolder, load: Load) -> None:
    folder, _ = make_folder()
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="no usable CUDA device"):
            load(folder, device="cuda")
    with pytest.raises(ModelError, match="float16"):
        load(folder, dtype="float16", quantization="nf4")
    with pytest.raises(ModelError, match="multiples of 32"):
        load(folder, quantization="int4")


def test_kv_memory_shortens_the_context_and_says_when_it_is_too_little(make_folder: MakeFolder, load: Load) -> None:
    folder, _ = make_folder(max_position_embeddings=1024)
    token_bytes = 2 * 3 * 2 * 12 * 4  # K and V, layers, kv heads, head dim, float32
    options = {"dtype": "float32", "max_context": None, "num_slots": 4}
    assert load(folder, **options, kv_memory=4 * 300 * token_bytes).capabilities.context_limit == 300
    assert load(folder, **options, kv_memory=2**40).capabilities.context_limit == 1024
    with pytest.raises(
        ModelError, match=f"fewer than {MIN_CONTEXT}: raise it to {4 * MIN_CONTEXT * token_bytes} bytes"
    ):
        load(folder, **options, kv_memory=4 * 100 * token_bytes)


def test_a_model_of_long_context_does_not_take_the_machine_unasked() -> None:
    assert unasked_context(131_072, 3, 40 * 1024) == DEFAULT_KV_BYTES // (3 * 40 * 1024) < 131_072
    assert unasked_context(8192, 3, 28 * 1024) == 8192
    assert unasked_context(131_072, 1_000_000, 40 * 1024) == DEFAULT_CONTEXT
