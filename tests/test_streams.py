"""Numbering, merging, replay: nothing lost, doubled or out of order, whatever the cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine import base
from service.protocol import (
    Accepted,
    BadRequest,
    Busy,
    Chat,
    Delta,
    Done,
    Error,
    Merge,
    Message,
    Queued,
    Started,
    Timing,
    Usage,
    encode_frame,
)
from service.streams import MAX_DELTA_CHARS, Retained, Stream, StreamEvent, with_last_message

CHAT = Chat("a", (Message("system", "s"), Message("user", "q")))
DONE = base.Finished("stop", Usage(3, 0, 2), Timing(1.0, 2.0, 3.0, 4.0))


def make_stream(max_delay_ms: int = 0) -> Stream:
    return Stream(Chat("a", CHAT.messages, merge=Merge(max_delay_ms)), uid=0, resume_token="t")


def opened() -> Stream:
    stream = make_stream()
    stream.put(base.Waiting(0, 0.0), 0.0)
    stream.put(base.Running(3, 0, 100, ()), 0.0)
    return stream


def seqs(events: list[StreamEvent]) -> list[int | None]:
    return [event.seq for event in events]


# Each action: some text from the engine, or the connection takes, or it is cut and resumes somewhere before.
ACTIONS = st.lists(st.text(min_size=1, max_size=5) | st.just(None) | st.floats(0, 1), max_size=60)


@given(ACTIONS, st.integers(0, 500))
def test_any_cuts_resumes_and_merging_give_the_text_once_and_seq_without_a_gap(
    actions: list[str | float | None], delay_ms: int
) -> None:
    stream = make_stream(delay_ms)
    stream.put(base.Waiting(0, 0.0), 0.0)
    stream.put(base.Running(3, 0, 100, ()), 0.0)
    sent, received, now = "", [], 0.0
    for action in actions:
        now += 0.05
        if isinstance(action, str):
            sent += action
            stream.put(base.Text(action, 1, now), now)
        elif action is None:
            stream.let_go(now)
            received += stream.take()
        else:  # the connection was cut: some of what was taken never arrived
            del received[round(action * len(received)) :]
            received += stream.replay(len(received))
    stream.put(DONE, now)
    received += stream.take()
    assert seqs(received) == list(range(1, len(received) + 1))
    assert "".join(event.text for event in received if isinstance(event, Delta)) == sent
    assert sum(event.tokens for event in received if isinstance(event, Delta)) == sum(
        isinstance(action, str) for action in actions
    )
    assert [type(event) for event in received if isinstance(event, Done | Error)] == [Done]
    assert isinstance(received[-1], Done) and stream.is_exhausted and not stream.take()


def test_positions_are_accepted_then_queued_and_only_the_latest_waits() -> None:
    stream = make_stream()
    stream.put(base.Waiting(4, 9.0), 0.0)
    stream.put(base.Waiting(3, 7.0), 0.0)
    assert stream.take() == [Accepted("a", 1, "t", 3, 7.0)]
    stream.put(base.Waiting(1, 2.0), 0.0)
    stream.put(base.Running(3, 1, 100, (0,)), 0.0)
    assert stream.take() == [Queued("a", 2, 1, 2.0), Started("a", 3, 3, 1, 100, (0,))]


def test_text_that_waits_for_a_slow_reader_is_one_delta() -> None:
    stream = opened()
    for text in "abc":
        stream.put(base.Text(text, 2, 5.0), 0.0)
    assert stream.take()[-1] == Delta("a", 3, "abc", 6, 5.0)


def test_a_merged_text_beyond_a_frame_is_cut_into_several() -> None:
    stream = opened()
    text = "\x01" * (2 * MAX_DELTA_CHARS + 5)  # six bytes each as JSON
    stream.put(base.Text(text, 9, 5.0), 0.0)
    deltas = [event for event in stream.take() if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == text and sum(delta.tokens for delta in deltas) == 9
    assert seqs(list(deltas)) == [3, 4, 5] and all(encode_frame(delta) for delta in deltas)


def test_a_request_that_was_never_accepted_ends_in_an_error_without_a_number() -> None:
    stream = make_stream()
    stream.put(base.Failed(Busy("full")), 0.0)
    (event,) = stream.take()
    assert isinstance(event, Error) and event.seq is None and event.id == "a"


def test_nothing_follows_the_terminal_event() -> None:
    stream = opened()
    stream.put(DONE, 0.0)
    stream.put(base.Text("late", 1, 1.0), 0.0)
    stream.put(base.Failed(Busy("late")), 0.0)
    assert [type(event) for event in stream.take()] == [Accepted, Started, Done]


def test_merging_holds_text_until_it_is_due_but_never_the_first() -> None:
    stream = make_stream(100)
    stream.put(base.Text("a", 1, 1.0), 0.0)
    stream.put(base.Text("b", 1, 2.0), 0.01)
    assert [event.text for event in stream.take() if isinstance(event, Delta)] == ["a"]
    assert stream.due_at() == pytest.approx(0.11)
    stream.let_go(0.05)
    assert not stream.take()
    stream.let_go(0.11)
    assert [event.text for event in stream.take() if isinstance(event, Delta)] == ["b"]


def test_a_number_that_was_never_given_cannot_be_resumed_from() -> None:
    stream = opened()
    stream.take()
    assert stream.replay(2) == []
    with pytest.raises(BadRequest):
        stream.replay(3)


def test_retained_streams_are_bounded_in_number_and_text() -> None:
    retained = Retained(max_streams=2, max_chars=100)
    streams = [Stream(CHAT, uid=0, resume_token=str(number)) for number in range(4)]
    for stream in streams[:3]:
        retained.add(stream)
    assert retained.get("0") is None and len(retained) == 2
    streams[3].num_chars = 99
    retained.add(streams[3])
    assert len(retained) == 0  # it alone is over the limit
    assert retained.remove("nobody") is None


def test_an_edit_keeps_the_conversation_but_its_last_message() -> None:
    edited = with_last_message(CHAT, id="b", prompt="new")
    assert edited.id == "b" and edited.messages == (CHAT.messages[0], Message("user", "new"))
