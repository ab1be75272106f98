"""The GGUF reader against the `gguf` package's own, over every block type it reads, and against damage."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.models.errors import ModelError
from service.models.gguf_file import GgufFile, read_float, read_grouped

KINDS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0")]
METADATA = {"some.count": 7, "some.share": 0.5, "some.flag": True, "some.name": "早上好", "some.words": ["a", "", "é"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("some.count", 7)
    writer.add_float32("some.share", 0.5)
    writer.add_bool("some.flag", True)
    writer.add_string("some.name", "早上好")
    writer.add_array("some.words", ["a", "", "é"])
    writer.add_array("some.numbers", [1, 2, 3])
    weight = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    for kind in KINDS:
        writer.add_tensor(kind.name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_comes_back_as_it_was_written(written: Path) -> None:
    file = GgufFile(written)
    assert {key: file.get(key) for key in METADATA} == METADATA
    assert file.get("some.numbers") == [1, 2, 3]
    with pytest.raises(ModelError, match=r"no 'other\.key'"):
        file.get("other.key")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_reads_as_the_package_reads_it(kind: gguf.GGMLQuantizationType, written: Path) -> None:
    theirs = next(tensor for tensor in gguf.GGUFReader(written).tensors if tensor.name == kind.name)
    ours = GgufFile(written).tensors[kind.name]
    assert ours.shape == (6, 64)
    np.testing.assert_array_equal(read_float(ours), gguf.dequantize(theirs.data, kind))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_grouped_values_and_scales_are_the_weights_exactly(name: str, written: Path) -> None:
    tensor = GgufFile(written).tensors[name]
    grouped = read_grouped(tensor)
    assert grouped is not None
    values, scale, minimum = grouped
    rebuilt = values.reshape(6, 2, 32).astype(np.float32) * scale[:, :, None]
    rebuilt += 0 if minimum is None else minimum[:, :, None]
    np.testing.assert_array_equal(rebuilt.reshape(6, 64), read_float(tensor))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_an_error_or_a_file_and_nothing_else(
    data: st.DataObject, written: Path, tmp_path: Path
) -> None:
    content = bytearray(written.read_bytes())
    del content[data.draw(st.integers(0, len(content))) :]
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, min(len(content), 700) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        GgufFile(path)
    except ModelError as error:
        assert "\n" not in str(error)


def test_what_is_no_gguf_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("GGML of another age, long enough")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        GgufFile(tmp_path / "text")
    with pytest.raises(ModelError, match="cannot read"):
        GgufFile(tmp_path / "missing")
