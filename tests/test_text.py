"""Text never splits a character, never shows part of a stop string, and merging never loses or adds anything."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text import BytesDecoder, Merger, TextStream
from tests.toy import ToyTokenizer


def run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(BytesDecoder(pieces.__getitem__), stop)
    texts = [stream.push(index) for index in range(len(pieces))]
    return [*texts, stream.finish()], stream.stopped


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


TEXTS = st.text(alphabet="ab.你好😀é\n ", max_size=30)
# Whole text, plain garbage, and text with bytes knocked out: surrogates and overlong forms among them.
DATA = st.one_of(
    TEXTS.map(str.encode),
    st.binary(max_size=30),
    st.lists(st.sampled_from([b"\xed\xa0\x80", b"\xf0\x9f", b"\xc0\x80", b"\xe4\xbd", b"a", b"\x80"])).map(b"".join),
)
CUTS = st.lists(st.integers(0, 200), max_size=12)
STOPS = st.lists(st.text(alphabet="ab.你", min_size=1, max_size=4), max_size=4).map(tuple)


@given(DATA, CUTS)
def test_pieces_join_to_the_decoded_bytes_however_they_are_split(data: bytes, cuts: list[int]) -> None:
    texts, stopped = run(split(data, cuts))
    assert "".join(texts) == data.decode("utf-8", "replace")
    assert not stopped
    for text in texts:
        text.encode("utf-8")  # no lone surrogates


@given(TEXTS, CUTS)
def test_a_split_character_is_never_shown_in_part(text: str, cuts: list[int]) -> None:
    texts, _ = run(split(text.encode(), cuts))
    assert not any("\ufffd" in piece for piece in texts)


def first_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """The plain definition: read one more character until the text ends in a stop string, then cut the longest."""
    for end in range(len(text) + 1):
        ended_by = [one for one in stop if text[:end].endswith(one)]
        if ended_by:
            return text[: end - max(map(len, ended_by))]
    return None


@given(st.text(alphabet="ab.你", max_size=30), CUTS, STOPS)
def test_text_ends_at_the_first_stop_string_however_it_is_split(
    text: str, cuts: list[int], stop: tuple[str, ...]
) -> None:
    texts, stopped = run(split(text.encode(), cuts), stop)
    expected = first_stop(text, stop)
    assert stopped == (expected is not None)
    assert "".join(texts) == (text if expected is None else expected)


@given(st.text(alphabet="ab.你", max_size=30), STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    stream = TextStream(BytesDecoder(lambda index: text[index].encode()), stop)
    shown = ""
    for index in range(len(text)):
        shown += stream.push(index)
        held = text[len(shown) : index + 1]
        assert stream.stopped or held == "" or any(one.startswith(held) for one in stop)


@pytest.mark.parametrize("pieces", [[b"xabcd"], [b"x", b"a", b"b", b"c", b"d"], [b"xa", b"bcd"]])
def test_the_stop_string_that_is_complete_first_counts_not_the_one_that_begins_first(pieces: list[bytes]) -> None:
    texts, stopped = run(pieces, ("abcd", "bc"))
    assert stopped and "".join(texts) == "xa"


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(BytesDecoder({0: b"one EN", 1: b"D two", 2: b"three"}.__getitem__), ("END",))
    assert [stream.push(0), stream.push(1), stream.push(2), stream.finish()] == ["one ", "", "", ""]
    assert stream.stopped


def test_a_stop_string_that_was_only_begun_is_text_after_all() -> None:
    stream = TextStream(BytesDecoder({0: b"the EN"}.__getitem__), ("END",))
    assert [stream.push(0), stream.finish()] == ["the ", "EN"]
    assert not stream.stopped


def test_the_toy_tokenizer_gives_back_what_it_encodes() -> None:
    toy = ToyTokenizer()
    assert toy.decode(toy.encode("héllo 你好 😀")) == "héllo 你好 😀"


# After each of these merged text may be cut (PROTOCOL.md): sentence mark, comma, space, line end; zh and en.
BOUNDARIES = set(".!?, \n。！？，")
Piece = tuple[str, int]  # text, tokens

# --- Merger ---------------------------------------------------------------------------------------------------

PUSHES = st.lists(
    st.tuples(st.text(alphabet="ab ，。.你", max_size=5), st.integers(1, 3), st.floats(0, 0.2)), max_size=30
)


def merge(pushes: list[tuple[str, int, float]], delay_s: float) -> list[tuple[Piece, float]]:
    """Push as a caller with a timer would, and return each piece with when it went out."""
    merger, now, out = Merger(delay_s), 100.0, list[tuple[Piece, float]]()
    for text, tokens, pause_s in pushes:
        now += pause_s
        due_at = merger.due_at()
        if due_at is not None and due_at <= now:
            piece = merger.flush()
            assert piece is not None
            out.append((piece, due_at))
        piece = merger.push(text, tokens, now)
        if piece is not None:
            out.append((piece, now))
    piece = merger.flush()
    if piece is not None:
        out.append((piece, now))
    assert merger.flush() is None and merger.due_at() is None
    return out


@given(PUSHES, st.sampled_from([0.0, 0.05, 0.5]))
def test_merging_conserves_text_and_token_counts(pushes: list[tuple[str, int, float]], delay_s: float) -> None:
    pieces = [piece for piece, _ in merge(pushes, delay_s)]
    assert "".join(text for text, _ in pieces) == "".join(text for text, _, _ in pushes)
    assert sum(tokens for _, tokens in pieces) == sum(tokens for _, tokens, _ in pushes)


@given(PUSHES, st.sampled_from([0.0, 0.05, 0.5]))
def test_no_text_waits_longer_than_the_delay_and_the_first_not_at_all(
    pushes: list[tuple[str, int, float]], delay_s: float
) -> None:
    came = list[float]()
    now = 100.0
    for text, _, pause_s in pushes:
        now += pause_s
        came += [now] * len(text)
    sent = [at for (text, _), at in merge(pushes, delay_s) for _ in text]
    assert len(sent) == len(came)
    for position, (arrival, departure) in enumerate(zip(came, sent, strict=True)):
        assert arrival <= departure <= arrival + delay_s + 1e-9
        if position == 0:
            assert departure == arrival


@given(PUSHES)
def test_text_up_to_a_boundary_never_waits(pushes: list[tuple[str, int, float]]) -> None:
    merger = Merger(1000.0)
    pushed = sent = ""
    for text, tokens, _ in pushes:
        piece = merger.push(text, tokens, 0.0)
        pushed += text
        sent += piece[0] if piece else ""
        assert not BOUNDARIES & set(pushed[len(sent) :])


def test_a_zero_delay_passes_everything_through() -> None:
    merger = Merger(0.0)
    assert [merger.push(text, 1, 5.0) for text in ("a", "b", "c")] == [("a", 1), ("b", 1), ("c", 1)]
    assert merger.due_at() is None


def test_the_rest_behind_a_boundary_waits_from_when_it_came() -> None:
    merger = Merger(0.3)
    assert merger.push("First", 1, 0.0) == ("First", 1)
    assert merger.push("，so", 1, 1.0) == ("，", 1)
    assert merger.due_at() == pytest.approx(1.3)
    assert merger.push(" far", 1, 1.1) == ("so ", 1)
    assert merger.due_at() == pytest.approx(1.4)
    assert merger.push("ther", 1, 1.5) == ("farther", 1)


def test_a_token_without_text_is_counted_all_the_same() -> None:
    merger = Merger(0.0)
    pieces = [merger.push("", 1, 0.0), merger.push("你", 1, 0.1), merger.push("", 1, 0.2), merger.flush()]
    assert sum(piece[1] for piece in pieces if piece) == 3


def test_a_token_without_text_is_not_yet_the_first_text() -> None:
    merger = Merger(0.5)
    merger.push("", 1, 0.0)
    piece = merger.push("你", 1, 0.1)
    assert piece is not None and piece[0] == "你"
