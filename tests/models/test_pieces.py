"""Pieces decode one by one exactly as sentencepiece decodes them all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from service.models.errors import ModelError
from service.models.pieces import PieceDecoder, Pieces, load_processor
from tests.models.golden import DATA, decode

PATHS = {
    "all blanks stripped": DATA / "chatglm-6b" / "checkpoint" / "ice_text.model",
    "one blank stripped": DATA / "chatglm2-6b" / "checkpoint" / "tokenizer.model",
}


@pytest.fixture(scope="module", params=PATHS)
def processor(request: pytest.FixtureRequest) -> SentencePieceProcessor:
    return load_processor(PATHS[request.param])


def interesting_ids(processor: SentencePieceProcessor) -> list[int]:
    """Bytes that split characters, pieces with and without a blank in front, and control pieces."""
    pieces = ["▁", "▁a", "a", "你好", "<s>", "</s>"]
    values = ["E4", "BD", "A0", "F0", "9F", "98", "80", "C0", "ED", "C3", "41", "0A"]
    return [processor.piece_to_id(piece) for piece in [*pieces, *(f"<0x{value}>" for value in values)]]


@given(st.data())
def test_any_ids_decode_as_the_whole(processor: SentencePieceProcessor, data: st.DataObject) -> None:
    of_all = st.integers(1, processor.get_piece_size() - 1)  # 0 has a text of its own, see below
    ids = data.draw(st.lists(st.one_of(st.sampled_from(interesting_ids(processor)), of_all), max_size=16))
    assert decode(PieceDecoder(Pieces(processor, texts={})), ids) == processor.decode(ids)


@given(st.data())
def test_ids_with_their_own_text_and_ignored_ids(processor: SentencePieceProcessor, data: st.DataObject) -> None:
    own = {0: processor.decode([0]), 2: ""}
    pieces = Pieces(processor, texts=own, ignored=frozenset({1}))
    ids = data.draw(st.lists(st.sampled_from([0, 1, 2, *interesting_ids(processor)]), max_size=12))
    assert decode(PieceDecoder(pieces), ids) == processor.decode([id for id in ids if id != 1])


@given(st.lists(st.integers(0, 255), max_size=8))
@example([0xE4, 0xBD])
@example([0xF0, 0x9F, 0x98, 0x41])
def test_a_byte_that_is_no_character_becomes_one_replacement_each(values: list[int]) -> None:
    processor = load_processor(PATHS["one blank stripped"])
    ids = [processor.piece_to_id(f"<0x{value:02X}>") for value in values]
    assert decode(PieceDecoder(Pieces(processor, texts={})), ids) == processor.decode(ids)


def test_a_whole_character_is_not_held_back(processor: SentencePieceProcessor) -> None:
    decoder = PieceDecoder(Pieces(processor, texts={}))
    ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in "你".encode()]
    assert [decoder.push(id) for id in ids] == ["", "", "你"]


def test_ids_beyond_the_vocabulary_are_silent(processor: SentencePieceProcessor) -> None:
    pieces = Pieces(processor, texts={})
    for id in (-1, processor.get_piece_size(), 10**6):
        assert pieces.token_bytes(id) == b""
        assert decode(PieceDecoder(pieces), [id]) == ""


def test_token_bytes_are_the_bytes_in_the_middle_of_an_answer(processor: SentencePieceProcessor) -> None:
    pieces = Pieces(processor, texts={5: "five"})
    names = {"▁a": b" a", "你好": "你好".encode(), "<0xE4>": b"\xe4", "</s>": b""}
    for piece, expected in names.items():
        assert pieces.token_bytes(processor.piece_to_id(piece)) == expected
    assert pieces.token_bytes(5) == b"five"


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"tokenizer\.model is not a sentencepiece model"):
        load_processor(path)
