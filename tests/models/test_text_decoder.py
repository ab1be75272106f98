"""Bytes become text as a whole decode gives it, and a transform sees all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.models.postprocess import Strip
from service.models.text_decoder import Transformed
from service.text import BytesDecoder
from tests.models.golden import decode

PIECES = st.lists(
    st.one_of(st.binary(max_size=3), st.sampled_from(["你".encode(), b"\xf0\x9f\x98", b"\x80", b"a "])), max_size=12
)


@given(PIECES)
def test_bytes_in_pieces_decode_as_the_whole(pieces: list[bytes]) -> None:
    assert decode(BytesDecoder(pieces.__getitem__), range(len(pieces))) == b"".join(pieces).decode("utf-8", "replace")


@given(PIECES)
def test_a_transform_sees_everything(pieces: list[bytes]) -> None:
    decoder = Transformed(BytesDecoder(pieces.__getitem__), Strip())
    assert decode(decoder, range(len(pieces))) == b"".join(pieces).decode("utf-8", "replace").strip()
