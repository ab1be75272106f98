"""The wire contract, version 1: frames, message types, validation and the error tree.

Sans-I/O: bytes in, messages out, and back. It knows no sockets, no clock and no threads, and needs only the
standard library, so a client may vendor this one file.

    ServiceError                 anything the daemon tells a client; has `code`, `retryable`
    ├── ProtocolError            the peer's bytes broke the contract
    │   ├── BadFrame             bad_frame: length out of bounds, or the body is not one JSON object
    │   └── BadRequest           bad_request: a JSON object, but not a valid message; has `path`
    ├── TooLong                  too_long: a single message cannot fit the context
    ├── Busy                     busy: the queue is full; has `retry_after_s`
    ├── NotReady                 not_ready: the model is loading
    ├── Draining                 draining: the daemon is stopping
    ├── Forbidden                forbidden: this peer may not do that
    ├── UnknownRequest           unknown_request: no live request has this id
    ├── ResumeExpired            resume_expired: nothing to continue under this token
    ├── SlowClient               slow_client: the peer stopped reading
    ├── EngineFailed             engine_failed: this request failed, the next may work
    └── EngineDead               engine_dead: the engine is gone, the daemon restarts
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, NoReturn

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 2 * 1024 * 1024
MAX_STOP_STRINGS = 8
END_OF_RESPONSE = "END_OF_RESPONSE"

# --- Errors ---------------------------------------------------------------------------------------------------


class ServiceError(Exception):
    """Something the daemon tells a client. `message` is for people, `code` for programs."""

    code: ClassVar[str] = "engine_failed"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.path = path


class ProtocolError(ServiceError):
    code = "bad_request"


class BadFrame(ProtocolError):
    """`is_fatal`: the stream has lost its framing, so nothing after it can be read."""

    code = "bad_frame"

    def __init__(self, message: str, *, is_fatal: bool = False) -> None:
        super().__init__(message)
        self.is_fatal = is_fatal


class BadRequest(ProtocolError):
    code = "bad_request"
    request_id: str | None = None  # the message's own id, where it could be read


class TooLong(ServiceError):
    code = "too_long"


class Busy(ServiceError):
    code = "busy"
    retryable = True


class NotReady(ServiceError):
    code = "not_ready"
    retryable = True


class Draining(ServiceError):
    code = "draining"
    retryable = True


class Forbidden(ServiceError):
    code = "forbidden"


class UnknownRequest(ServiceError):
    code = "unknown_request"


class ResumeExpired(ServiceError):
    code = "resume_expired"


class SlowClient(ServiceError):
    code = "slow_client"
    retryable = True


class EngineFailed(ServiceError):
    code = "engine_failed"
    retryable = True


class EngineDead(ServiceError):
    code = "engine_dead"
    retryable = True


_ERROR_CLASSES: Mapping[str, type[ServiceError]] = {
    cls.code: cls
    for cls in (
        BadFrame, BadRequest, TooLong, Busy, NotReady, Draining, Forbidden, UnknownRequest, ResumeExpired,
        SlowClient, EngineFailed, EngineDead,
    )
}  # fmt: skip

# --- Checks: (value, JSON path) -> the value, or BadRequest --------------------------------------------------

Check = Callable[[Any, str], Any]


def _refuse(path: str, expected: str, value: object) -> NoReturn:
    shown = type(value).__name__ if isinstance(value, str | list | dict) else repr(value)[:40]
    raise BadRequest(f"{path}: expected {expected}, got {shown}", path=path)


def _text(min_chars: int = 0, max_chars: int | None = None) -> Check:
    bounds = f"a string of {min_chars} to {max_chars} characters" if max_chars else "a string"

    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or len(value) < min_chars or (max_chars and len(value) > max_chars):
            _refuse(path, bounds, value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{path}: holds a lone surrogate, which is not text", path=path) from None
        return value

    return check


def _integer(low: int | None = None, high: int | None = None) -> Check:
    expected = "an integer" + (f" ≥ {low}" if low is not None else "") + (f" and ≤ {high}" if high is not None else "")

    def check(value: Any, path: str) -> int:
        if type(value) is not int or (low is not None and value < low) or (high is not None and value > high):
            _refuse(path, expected, value)
        return value

    return check


def _number(low: float, high: float, *, is_low_open: bool = False) -> Check:
    expected = f"a number {'>' if is_low_open else '≥'} {low:g}" + (f" and ≤ {high:g}" if high < math.inf else "")

    def check(value: Any, path: str) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (is_low_open and value == low):
            _refuse(path, expected, value)
        try:
            number = float(value)
        except OverflowError:
            _refuse(path, expected, value)
        return number if math.isfinite(number) else _refuse(path, "a finite number", value)

    return check


def _choice(*values: str) -> Check:
    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in values:
            raise BadRequest(f"{path}: expected one of {', '.join(values)}", path=path)
        return value

    return check


def _boolean(value: Any, path: str) -> bool:
    return value if isinstance(value, bool) else _refuse(path, "true or false", value)


def _mapping(value: Any, path: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else _refuse(path, "an object", value)


def _tuple_of(check_item: Check, *, min_items: int = 0, max_items: int | None = None) -> Check:
    expected = f"a list of at least {min_items}" + (f" and at most {max_items}" if max_items else "") + " items"

    def check(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) < min_items or (max_items and len(value) > max_items):
            _refuse(path, expected, value)
        return tuple(check_item(item, f"{path}[{index}]") for index, item in enumerate(value))

    return check


def _record(cls: type) -> Check:
    def check(value: Any, path: str) -> Any:
        return _build(cls, _mapping(value, path), path)

    return check


def _wire(check: Check, default: Any = MISSING) -> Any:
    """A dataclass field that travels: its check, and its default when it may be absent."""
    return field(default=default, metadata={"check": check})


def _build(cls: type, values: Mapping[str, Any], path: str = "$") -> Any:
    """Build a message from a JSON object: known fields checked, unknown ones ignored, missing ones named."""
    arguments = {}
    for item in fields(cls):
        if item.name in values:
            arguments[item.name] = item.metadata["check"](values[item.name], f"{path}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise BadRequest(f"{path}.{item.name}: required", path=f"{path}.{item.name}")
    return cls(**arguments)


# --- Client → daemon ------------------------------------------------------------------------------------------

_ID = _text(1, 64)
_COUNT = _integer(0)
_SECONDS = _number(0, math.inf)
_INT64 = _integer(-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"] = _wire(_choice("system", "user", "assistant"))
    content: str = _wire(_text())


@dataclass(frozen=True, slots=True)
class Params:
    """Sampling parameters, complete. A chat names only those it changes; the model's family has the rest."""

    temperature: float = _wire(_number(0, 2), 0.8)
    top_p: float = _wire(_number(0, 1), 0.8)
    top_k: int = _wire(_COUNT, 0)
    repetition_penalty: float = _wire(_number(0, math.inf, is_low_open=True), 1.0)
    max_new_tokens: int = _wire(_integer(1), 1024)
    seed: int | None = _wire(_INT64, None)
    stop: tuple[str, ...] = _wire(_tuple_of(_text(1, 256), max_items=MAX_STOP_STRINGS), ())


def _param_changes(value: Any, path: str) -> dict[str, Any]:
    """The parameters a chat gives: like `Params`, but an unknown name is an error, and absent stays absent."""
    checks = {item.name: item.metadata["check"] for item in fields(Params)}
    for name in _mapping(value, path):
        if name not in checks:
            raise BadRequest(f"{path}.{name}: unknown parameter; known are {', '.join(checks)}", path=f"{path}.{name}")
    return {name: checks[name](given, f"{path}.{name}") for name, given in value.items()}


@dataclass(frozen=True, slots=True)
class Merge:
    """How far deltas may be merged. 0 = every token as it comes."""

    max_delay_ms: int = _wire(_integer(0, 500), 0)


@dataclass(frozen=True, slots=True)
class Chat:
    """Start an answer. `params` holds only what the client gave, checked."""

    type: ClassVar[str] = "chat"
    id: str = _wire(_ID)
    messages: tuple[Message, ...] = _wire(_tuple_of(_record(Message), min_items=1))
    params: Mapping[str, Any] = field(default_factory=dict, metadata={"check": _param_changes})
    priority: int = _wire(_integer(-10, 10), 0)
    deadline_s: float = _wire(_number(0, 86_400, is_low_open=True), 60.0)
    on_disconnect: Literal["cancel", "detach"] = _wire(_choice("cancel", "detach"), "cancel")
    merge: Merge = _wire(_record(Merge), Merge(0))


@dataclass(frozen=True, slots=True)
class Interrupt:
    type: ClassVar[str] = "interrupt"
    id: str = _wire(_ID)


@dataclass(frozen=True, slots=True)
class Edit:
    type: ClassVar[str] = "edit"
    id: str = _wire(_ID)
    new_id: str = _wire(_ID)
    prompt: str = _wire(_text())


@dataclass(frozen=True, slots=True)
class Resume:
    """`id`, when given, is the name that the request's events carry on this connection from now on."""

    type: ClassVar[str] = "resume"
    resume_token: str = _wire(_text(1, 256))
    after: int = _wire(_COUNT)
    id: str | None = _wire(_ID, None)


@dataclass(frozen=True, slots=True)
class Health:
    type: ClassVar[str] = "health"


@dataclass(frozen=True, slots=True)
class Stats:
    type: ClassVar[str] = "stats"


Request = Chat | Interrupt | Edit | Resume | Health | Stats

# --- Daemon → client ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = _wire(_COUNT)
    cached_tokens: int = _wire(_COUNT)
    completion_tokens: int = _wire(_COUNT)


@dataclass(frozen=True, slots=True)
class Timing:
    """`queue_ms` until it had a slot, `ttft_ms` until its first token, both since it was accepted."""

    queue_ms: float = _wire(_SECONDS)
    ttft_ms: float = _wire(_SECONDS)
    total_ms: float = _wire(_SECONDS)
    tokens_per_s: float = _wire(_SECONDS)


@dataclass(frozen=True, slots=True)
class Accepted:
    type: ClassVar[str] = "accepted"
    id: str = _wire(_ID)
    seq: int = _wire(_COUNT)
    resume_token: str = _wire(_text())
    queue_position: int = _wire(_COUNT)
    expected_start_s: float = _wire(_SECONDS)


@dataclass(frozen=True, slots=True)
class Queued:
    type: ClassVar[str] = "queued"
    id: str = _wire(_ID)
    seq: int = _wire(_COUNT)
    queue_position: int = _wire(_COUNT)
    expected_start_s: float = _wire(_SECONDS)


@dataclass(frozen=True, slots=True)
class Started:
    type: ClassVar[str] = "started"
    id: str = _wire(_ID)
    seq: int = _wire(_COUNT)
    prompt_tokens: int = _wire(_COUNT)
    cached_tokens: int = _wire(_COUNT)
    context_limit: int = _wire(_COUNT)
    dropped_messages: tuple[int, ...] = _wire(_tuple_of(_COUNT), ())


@dataclass(frozen=True, slots=True)
class Delta:
    type: ClassVar[str] = "delta"
    id: str = _wire(_ID)
    seq: int = _wire(_COUNT)
    text: str = _wire(_text())
    tokens: int = _wire(_COUNT)
    t_ms: float = _wire(_SECONDS)


@dataclass(frozen=True, slots=True)
class Done:
    type: ClassVar[str] = "done"
    id: str = _wire(_ID)
    seq: int = _wire(_COUNT)
    reason: Literal["stop", "length", "interrupted", "deadline", "drained"] = _wire(
        _choice("stop", "length", "interrupted", "deadline", "drained")
    )
    usage: Usage = _wire(_record(Usage))
    timing: Timing = _wire(_record(Timing))


@dataclass(frozen=True, slots=True)
class Error:
    """A terminal event when it has an `id`; else something about the connection."""

    type: ClassVar[str] = "error"
    code: str = _wire(_text())
    message: str = _wire(_text())
    retryable: bool = _wire(_boolean, False)
    id: str | None = _wire(_ID, None)
    seq: int | None = _wire(_COUNT, None)
    retry_after_s: float | None = _wire(_SECONDS, None)
    path: str | None = _wire(_text(), None)

    @classmethod
    def of(cls, error: ServiceError, *, id: str | None = None, seq: int | None = None) -> Error:
        return cls(
            error.code, error.message, error.retryable, id=id, seq=seq, retry_after_s=error.retry_after_s,
            path=error.path,
        )  # fmt: skip

    def to_exception(self) -> ServiceError:
        cls = _ERROR_CLASSES.get(self.code, ServiceError)
        if cls is BadFrame:
            return BadFrame(self.message)
        return cls(self.message, retry_after_s=self.retry_after_s, path=self.path)


@dataclass(frozen=True, slots=True)
class DrainNotice:
    type: ClassVar[str] = "draining"
    deadline_s: float = _wire(_SECONDS)


@dataclass(frozen=True, slots=True)
class HealthReport:
    type: ClassVar[str] = "health"
    phase: Literal["loading", "ready", "draining"] = _wire(_choice("loading", "ready", "draining"))
    progress: float = _wire(_number(0, 1))
    model: str = _wire(_text(), "")
    family: str = _wire(_text(), "")
    engine: str = _wire(_text(), "")
    quantization: str = _wire(_text(), "")
    device: str = _wire(_text(), "")
    context_limit: int = _wire(_COUNT, 0)
    slots: int = _wire(_COUNT, 0)
    running: int = _wire(_COUNT, 0)
    queued: int = _wire(_COUNT, 0)
    uptime_s: float = _wire(_SECONDS, 0.0)
    version: str = _wire(_text(), "")
    protocol: int = _wire(_COUNT, PROTOCOL_VERSION)


@dataclass(frozen=True, slots=True)
class StatsReport:
    type: ClassVar[str] = "stats"
    metrics: Mapping[str, Any] = _wire(_mapping)
    prometheus: str = _wire(_text(), "")


Event = Accepted | Queued | Started | Delta | Done | Error | DrainNotice | HealthReport | StatsReport

_REQUESTS: Mapping[str, type] = {cls.type: cls for cls in (Chat, Interrupt, Edit, Resume, Health, Stats)}
_EVENTS: Mapping[str, type] = {
    cls.type: cls for cls in (Accepted, Queued, Started, Delta, Done, Error, DrainNotice, HealthReport, StatsReport)
}

# --- Objects ↔ messages ---------------------------------------------------------------------------------------


def _turns(history: Any) -> list[dict[str, str]]:
    """The older form of a conversation, a list of [question, answer] pairs, as messages."""
    if not isinstance(history, list):
        _refuse("$.history", "a list of [question, answer] pairs", history)
    messages = []
    text = _text()
    for index, pair in enumerate(history):
        path = f"$.history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            _refuse(path, "a [question, answer] pair", pair)
        messages.append({"role": "user", "content": text(pair[0], f"{path}[0]")})
        messages.append({"role": "assistant", "content": text(pair[1], f"{path}[1]")})
    return messages


def _parse_chat(values: Mapping[str, Any]) -> Chat:
    if "prompt" in values or "history" in values:
        if "messages" in values:
            raise BadRequest("$.messages: give messages, or prompt and history, not both", path="$.messages")
        if "prompt" not in values:
            raise BadRequest("$.prompt: required", path="$.prompt")
        question = {"role": "user", "content": _text()(values["prompt"], "$.prompt")}
        values = {**values, "messages": [*_turns(values.get("history", [])), question]}
    chat: Chat = _build(Chat, values)
    last = len(chat.messages) - 1
    if chat.messages[last].role != "user":
        raise BadRequest("$.messages: the last message must be the user's", path=f"$.messages[{last}].role")
    return chat


def parse_request(values: Mapping[str, Any]) -> Request:
    """A client's message from its JSON object. Raises `BadRequest` with the JSON path of what is wrong."""
    kind = values.get("type")
    try:
        if not isinstance(kind, str) or kind not in _REQUESTS:
            raise BadRequest(f"$.type: expected one of {', '.join(_REQUESTS)}", path="$.type")
        return _parse_chat(values) if kind == Chat.type else _build(_REQUESTS[kind], values)
    except BadRequest as error:
        given = values.get("new_id" if kind == Edit.type else "id")
        if isinstance(given, str) and 1 <= len(given) <= 64 and given.isprintable():
            error.request_id = given
        raise


def parse_event(values: Mapping[str, Any]) -> Event:
    """A daemon's event from its JSON object. Raises `BadRequest`."""
    kind = values.get("type")
    if not isinstance(kind, str) or kind not in _EVENTS:
        raise BadRequest(f"$.type: expected one of {', '.join(_EVENTS)}", path="$.type")
    event: Event = _build(_EVENTS[kind], values)
    return event


def to_wire(message: Request | Event) -> dict[str, Any]:
    """The JSON object of a message: absent optional fields are left out."""
    return {"type": message.type, **_plain(message)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        pairs = ((item.name, getattr(value, item.name)) for item in fields(value))
        return {name: _plain(given) for name, given in pairs if given is not None}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# --- Bytes ↔ objects ------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object has the same key twice")
    return values


def parse_object(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """One JSON object from UTF-8 bytes. Raises `BadFrame` for anything else."""
    try:
        values = json.loads(str(body, "utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise BadFrame("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise BadFrame("the body is not UTF-8") from None
    except ValueError as error:
        raise BadFrame(f"the body is not one JSON object: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise BadFrame("the body is not one JSON object")
    return values


def _dump(message: Request | Event) -> bytes:
    return json.dumps(to_wire(message), ensure_ascii=False, separators=(",", ":")).encode()


def encode_frame(message: Request | Event) -> bytes:
    """A message as one frame: 4 bytes of length, big-endian, then the JSON. Raises `BadFrame` beyond 2 MiB."""
    body = _dump(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"the message has {len(body)} bytes; a frame holds at most {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


def encode_line(message: Request | Event) -> bytes:
    """A message as one line of JSON, for plain mode."""
    return _dump(message) + b"\n"


class FrameDecoder:
    """Cuts a byte stream into the JSON objects of its frames. Holds at most one frame and what came with it.

    `next_object` raises `BadFrame`; when that is fatal the stream is lost, and it raises the same again.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fatal: BadFrame | None = None

    def feed(self, data: bytes) -> None:
        if self._fatal is None:
            self._buffer += data

    @property
    def is_partial(self) -> bool:
        return bool(self._buffer)

    def next_object(self) -> dict[str, Any] | None:
        """The next frame's object, or None until more bytes come."""
        if self._fatal is not None:
            raise self._fatal
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if not 1 <= size <= MAX_FRAME_BYTES:
            self._buffer.clear()
            self._fatal = BadFrame(f"frame length {size} is not within 1 to {MAX_FRAME_BYTES}", is_fatal=True)
            raise self._fatal
        if len(self._buffer) < 4 + size:
            return None
        body = bytes(memoryview(self._buffer)[4 : 4 + size])
        del self._buffer[: 4 + size]
        return parse_object(body)


class PlainDecoder:
    """Finds JSON objects in a stream without frames: an object is complete when its last brace closes.

    Each byte is looked at once, however small the pieces. Raises fatal `BadFrame` for anything else.
    """

    _MARKS = re.compile(rb'["\\{}\[\]]')

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._depth = 0
        self._in_string = False

    def feed(self, data: bytes) -> None:
        self._buffer += data
        if not self._depth and not self._scanned:
            del self._buffer[: len(self._buffer) - len(self._buffer.lstrip(b" \t\r\n"))]

    def next_object(self) -> dict[str, Any] | None:
        if not self._buffer:
            return None
        if self._buffer[0] != ord("{"):
            raise BadFrame("expected one JSON object", is_fatal=True)
        end = self._scan()
        if end is None:
            if len(self._buffer) > MAX_FRAME_BYTES:
                raise BadFrame(f"the object is longer than {MAX_FRAME_BYTES} bytes", is_fatal=True)
            return None
        body = bytes(memoryview(self._buffer)[:end])
        del self._buffer[:end]
        self._scanned = 0
        self.feed(b"")
        try:
            return parse_object(body)
        except BadFrame as error:
            raise BadFrame(error.message, is_fatal=True) from None

    @property
    def is_partial(self) -> bool:
        return bool(self._buffer)

    def at_eof(self) -> None:
        """The peer sends no more. Raises `BadFrame` when an object was left unfinished."""
        if self._buffer:
            raise BadFrame("the input ended inside a JSON object", is_fatal=True)

    def _scan(self) -> int | None:
        """The end of the first object, or None. Continues where the last scan stopped."""
        position = self._scanned
        while (found := self._MARKS.search(self._buffer, position)) is not None:
            position = found.end()
            mark = self._buffer[found.start()]
            if mark == ord("\\"):
                if position == len(self._buffer):  # the escaped byte is still to come
                    self._scanned = found.start()
                    return None
                position += 1
            elif mark == ord('"'):
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in b"{[" else -1
                if self._depth == 0:
                    return position
        self._scanned = max(position, len(self._buffer))
        return None


class RequestDecoder:
    """The daemon's side of a connection: bytes in, requests out, in the mode that the first byte chose.

    `mode` is "framed" or "plain" once known; `num_requests` counts the objects that came. In plain mode a bare
    `{"prompt": …}` sets `wants_text`: its answer is text, not events, and whatever follows it is ignored.
    """

    def __init__(self) -> None:
        self.mode: Literal["framed", "plain"] | None = None
        self.wants_text = False
        self.num_requests = 0
        self._decoder: FrameDecoder | PlainDecoder = FrameDecoder()

    def feed(self, data: bytes) -> None:
        if self.mode is None and data:
            self.mode = "plain" if data[0] in b"{ \t\r\n" else "framed"
            self._decoder = PlainDecoder() if self.mode == "plain" else FrameDecoder()
        if not self.wants_text:
            self._decoder.feed(data)

    @property
    def is_partial(self) -> bool:
        """Whether bytes wait for the rest of their message."""
        return not self.wants_text and self._decoder.is_partial

    def feed_eof(self) -> None:
        """The peer sends no more. Raises `BadFrame` for an unfinished plain object."""
        if isinstance(self._decoder, PlainDecoder) and not self.wants_text:
            self._decoder.at_eof()

    def next_request(self) -> Request | None:
        """The next request, or None until more bytes come. Raises `ProtocolError`."""
        if self.wants_text:
            return None
        values = self._decoder.next_object()
        if values is None:
            return None
        self.num_requests += 1
        if self.mode == "plain" and "type" not in values:
            if "prompt" not in values:
                raise BadFrame('expected {"prompt": …, "history": […]} or an object with "type"', is_fatal=True)
            self.wants_text = True
            return parse_request({**values, "type": Chat.type, "id": "plain"})
        return parse_request(values)


class EventDecoder:
    """The client's side of a connection: bytes in, events out."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder()

    def feed(self, data: bytes) -> None:
        self._decoder.feed(data)

    def next_event(self) -> Event | None:
        """The next event, or None until more bytes come. Raises `ProtocolError`. Types it does not know are skipped."""
        while (values := self._decoder.next_object()) is not None:
            if values.get("type") in _EVENTS:
                return parse_event(values)
        return None
