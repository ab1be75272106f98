"""Framing, validation and the error tree: properties first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import protocol
from service.protocol import (
    MAX_FRAME_BYTES,
    Accepted,
    BadFrame,
    BadRequest,
    Busy,
    Chat,
    Delta,
    Done,
    DrainNotice,
    Edit,
    Error,
    EventDecoder,
    Health,
    HealthReport,
    Interrupt,
    Merge,
    Message,
    ProtocolError,
    Queued,
    Request,
    RequestDecoder,
    Resume,
    ServiceError,
    Started,
    Stats,
    StatsReport,
    Timing,
    Usage,
    encode_frame,
    encode_line,
    parse_event,
    parse_request,
    to_wire,
)

USER = Message("user", "你好 🙂")
REQUESTS: list[Request] = [
    Chat("a", (USER,)),
    Chat(
        "b", (Message("system", "s"), USER, Message("assistant", "x"), USER), {"top_k": 3, "stop": ("x",)},
        -3, 1.5, "detach", Merge(40),
    ),
    Interrupt("a"),
    Edit("a", "b", "new"),
    Resume("token", 7),
    Resume("token", 0, "c"),
    Health(),
    Stats(),
]  # fmt: skip
EVENTS: list[protocol.Event] = [
    Accepted("a", 1, "token", 0, 0.5),
    Queued("a", 2, 1, 2.5),
    Started("a", 3, 10, 5, 2048, (0, 1)),
    Delta("a", 4, "文字\n\0", 2, 12.5),
    Done("a", 5, "stop", Usage(10, 5, 2), Timing(1.0, 2.0, 3.0, 4.0)),
    Error("busy", "full", True, id="a", retry_after_s=2.0),
    DrainNotice(25.0),
    HealthReport("loading", 0.25, model="m"),
    StatsReport({"x": 1}, "x 1\n"),
]


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def splits(data: bytes) -> Iterator[list[bytes]]:
    """The same bytes whole, byte by byte, and in two unequal parts."""
    yield [data]
    yield [data[i : i + 1] for i in range(len(data))]
    yield [data[:5], data[5:]]


def read_all(pieces: list[bytes]) -> list[Request]:
    decoder = RequestDecoder()
    requests = []
    for piece in pieces:
        decoder.feed(piece)
        while (request := decoder.next_request()) is not None:
            requests.append(request)
    return requests


def test_every_request_survives_framing_whole_byte_by_byte_and_coalesced() -> None:
    data = b"".join(encode_frame(request) for request in REQUESTS)
    for pieces in splits(data):
        assert read_all(pieces) == REQUESTS


def test_every_event_survives_framing() -> None:
    decoder = EventDecoder()
    for piece in splits(b"".join(encode_frame(event) for event in EVENTS)):
        for part in piece:
            decoder.feed(part)
        assert [decoder.next_event() for _ in EVENTS] == EVENTS
        assert decoder.next_event() is None


def test_an_event_of_an_unknown_type_is_skipped() -> None:
    decoder = EventDecoder()
    decoder.feed(frame(b'{"type":"later"}') + encode_frame(DrainNotice(1.0)))
    assert decoder.next_event() == DrainNotice(1.0)


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_give_requests_or_protocol_errors(pieces: list[bytes]) -> None:
    decoder = RequestDecoder()
    for piece in pieces:
        decoder.feed(piece)
        drain(decoder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    ["id", "messages", "prompt", "history", "params", "priority", "deadline_s", "on_disconnect", "merge", "after",
     "new_id", "resume_token"]
)  # fmt: skip


@given(
    st.sampled_from([request.type for request in REQUESTS]) | st.text(), st.dictionaries(FIELDS, JSON), st.booleans()
)
def test_any_json_gives_requests_or_protocol_errors(kind: str, values: dict[str, Any], is_plain: bool) -> None:
    body = json.dumps({"type": kind, **values}).encode()
    decoder = RequestDecoder()
    decoder.feed(body if is_plain else frame(body))
    drain(decoder)


def drain(decoder: RequestDecoder) -> None:
    """Everything it has; a fatal error ends the stream as it would the connection."""
    for _ in range(1000):
        try:
            if decoder.next_request() is None:
                return
        except ProtocolError as error:
            assert error.code in ("bad_frame", "bad_request")
            if getattr(error, "is_fatal", False):
                return
    raise AssertionError("the decoder neither ends nor advances")


@given(st.text(), st.lists(st.tuples(st.text(), st.text()), max_size=3))
def test_any_text_travels_unchanged(prompt: str, history: list[tuple[str, str]]) -> None:
    turns = [Message(role, text) for q, a in history for role, text in (("user", q), ("assistant", a))]  # type: ignore[arg-type]
    chat = Chat("a", (*turns, Message("user", prompt)))
    assert read_all([encode_frame(chat)]) == [chat]
    values = {"type": "chat", "id": "a", "prompt": prompt, "history": [list(pair) for pair in history]}
    assert read_all([frame(json.dumps(values).encode())]) == [chat]


@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_out_of_bounds_is_fatal_and_buffers_nothing(size: int) -> None:
    decoder = RequestDecoder()
    decoder.feed(size.to_bytes(4, "big"))
    for _ in range(2):
        with pytest.raises(BadFrame, match=str(size)) as caught:
            decoder.next_request()
        assert caught.value.is_fatal
        decoder.feed(b"x" * 1000)
    assert not decoder._decoder._buffer


def test_the_largest_frame_is_taken() -> None:
    body = json.dumps({"type": "chat", "id": "a", "prompt": ""}).encode()
    prompt = "x" * (MAX_FRAME_BYTES - len(body))
    values = {"type": "chat", "id": "a", "prompt": prompt}
    assert read_all([frame(json.dumps(values).encode())]) == [Chat("a", (Message("user", prompt),))]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[]", "not one JSON object"),
        (b"{} {}", "not one JSON object"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not one JSON object"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested"),
        (b'{"a": 1, "a": 2}', "twice"),
    ],
)
def test_a_body_that_is_not_one_object_is_refused_and_the_next_frame_read(body: bytes, says: str) -> None:
    decoder = RequestDecoder()
    decoder.feed(frame(body) + encode_frame(Health()))
    with pytest.raises(BadFrame, match=says) as caught:
        decoder.next_request()
    assert not caught.value.is_fatal
    assert decoder.next_request() == Health()


GOOD = {"type": "chat", "id": "a", "prompt": "x"}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"type": "sing"}, "$.type"),
        ({"type": None}, "$.type"),
        ({"id": ""}, "$.id"),
        ({"id": "x" * 65}, "$.id"),
        ({"id": 1}, "$.id"),
        ({"prompt": 5}, "$.prompt"),
        ({"prompt": "\ud800"}, "$.prompt"),
        ({"history": [["a"]]}, "$.history[0]"),
        ({"history": [["a", 1]]}, "$.history[0][1]"),
        ({"messages": [{"role": "user", "content": "x"}]}, "$.messages"),
        ({"params": {"temperature": 2.5}}, "$.params.temperature"),
        ({"params": {"temperature": True}}, "$.params.temperature"),
        ({"params": {"top_p": -0.1}}, "$.params.top_p"),
        ({"params": {"top_k": -1}}, "$.params.top_k"),
        ({"params": {"top_k": 1.0}}, "$.params.top_k"),
        ({"params": {"repetition_penalty": 0}}, "$.params.repetition_penalty"),
        ({"params": {"max_new_tokens": 0}}, "$.params.max_new_tokens"),
        ({"params": {"seed": 2**63}}, "$.params.seed"),
        ({"params": {"stop": [""]}}, "$.params.stop[0]"),
        ({"params": {"stop": ["x"] * 9}}, "$.params.stop"),
        ({"params": {"temprature": 1}}, "$.params.temprature"),
        ({"params": []}, "$.params"),
        ({"priority": 11}, "$.priority"),
        ({"deadline_s": 0}, "$.deadline_s"),
        ({"deadline_s": 10**400}, "$.deadline_s"),
        ({"on_disconnect": "stay"}, "$.on_disconnect"),
        ({"merge": {"max_delay_ms": 501}}, "$.merge.max_delay_ms"),
    ],
)
def test_a_bad_value_is_named_by_its_path(change: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request({**GOOD, **change})
    assert caught.value.path == path
    assert path in caught.value.message


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"type": "chat", "id": "a"}, "$.messages"),
        ({"type": "chat", "id": "a", "history": []}, "$.prompt"),
        ({"type": "chat", "id": "a", "messages": []}, "$.messages"),
        ({"type": "chat", "id": "a", "messages": [{"role": "robot", "content": ""}]}, "$.messages[0].role"),
        ({"type": "chat", "id": "a", "messages": [{"role": "assistant", "content": ""}]}, "$.messages[0].role"),
        ({"type": "edit", "id": "a", "prompt": ""}, "$.new_id"),
        ({"type": "resume", "resume_token": "t"}, "$.after"),
    ],
)
def test_what_is_missing_is_named_by_its_path(values: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(values)
    assert caught.value.path == path


def test_unknown_fields_are_ignored_and_edges_are_allowed() -> None:
    params = {"temperature": 0, "top_p": 1, "top_k": 0, "max_new_tokens": 1, "seed": -1, "stop": ["x"] * 8}
    chat = parse_request({**GOOD, "colour": "red", "params": params, "priority": -10, "deadline_s": 0.001})
    assert isinstance(chat, Chat) and chat.params["stop"] == ("x",) * 8


@pytest.mark.parametrize("text", ['{"prompt":"test","history":[]}', ' \n{"prompt":"te}{\\"st","history":[["a","}"]]}'])
def test_plain_mode_needs_no_newline_and_no_half_close(text: str) -> None:
    for pieces in splits(text.encode()):
        decoder = RequestDecoder()
        found = None
        for piece in pieces:
            assert found is None, "found before its last byte"
            decoder.feed(piece)
            found = decoder.next_request()
        assert isinstance(found, Chat) and decoder.wants_text and decoder.mode == "plain"
        decoder.feed(b"and what follows is ignored")
        assert decoder.next_request() is None


def test_plain_mode_takes_typed_messages_one_after_another() -> None:
    decoder = RequestDecoder()
    decoder.feed(b'{"type":"health"} {"type":"stats"}')
    assert [decoder.next_request(), decoder.next_request(), decoder.next_request()] == [Health(), Stats(), None]
    assert not decoder.wants_text


@pytest.mark.parametrize("text", [b" x", b'{"a":1}', b"{]", b'{"prompt": nope}', b"\n[1]"])
def test_plain_mode_refuses_anything_else_for_good(text: bytes) -> None:
    decoder = RequestDecoder()
    decoder.feed(text)
    with pytest.raises(BadFrame) as caught:
        decoder.next_request()
    assert caught.value.is_fatal


def test_plain_input_that_ends_inside_an_object_is_an_error() -> None:
    decoder = RequestDecoder()
    decoder.feed(b'{"prompt":')
    assert decoder.next_request() is None
    with pytest.raises(BadFrame, match="ended inside"):
        decoder.feed_eof()


def test_a_line_holds_one_object() -> None:
    line = encode_line(Delta("a", 1, "x\ny", 1, 0.0))
    assert line.count(b"\n") == 1 and parse_event(json.loads(line)) == Delta("a", 1, "x\ny", 1, 0.0)


def test_absent_fields_do_not_travel() -> None:
    assert to_wire(Error.of(Busy("full"))) == {"type": "error", "code": "busy", "message": "full", "retryable": True}


def test_every_error_code_comes_back_as_its_class() -> None:
    codes = {cls.code for cls in protocol._ERROR_CLASSES.values()}
    assert codes == {
        "bad_frame", "bad_request", "too_long", "busy", "not_ready", "draining", "forbidden", "unknown_request",
        "resume_expired", "slow_client", "engine_failed", "engine_dead",
    }  # fmt: skip
    for code, cls in protocol._ERROR_CLASSES.items():
        back = Error(code, "m").to_exception()
        assert type(back) is cls and isinstance(back, ServiceError) and back.message == "m"


def test_a_message_beyond_the_frame_limit_is_not_sent() -> None:
    with pytest.raises(BadFrame, match="at most"):
        encode_frame(Chat("a", (Message("user", "x" * MAX_FRAME_BYTES),)))
