"""The two contracts of the engine side.

`Engine` is the contract at *request* level: what the server talks to. It has two implementations: the local
engine (`engine/local.py`) and an OpenAI-compatible upstream. Everything in it happens on the event-loop thread.

`Runner` is the contract at *step* level: what the local engine's thread drives. It has the torch runner
(`engine/runner.py`) and, in the tests, a toy whose next token is a hash of the KV it can see. It deals in token
ids only, so that the policy around it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from service.protocol import Chat, Params, ServiceError, Timing, Usage

# Why an answer ended; the same words as on the wire.
Reason = Literal["stop", "length", "interrupted", "deadline", "drained"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded model can do. The policy asks these, never the family's name."""

    num_slots: int  # sequences that can be held, and decoded together
    context_limit: int  # tokens one slot holds: prompt and answer together
    causal_prompt: bool  # True: a prefix's KV does not depend on what follows, so it may be reused and chunked


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What `health` tells of the engine once it is loaded."""

    model: str
    family: str
    engine: str  # "local" or "upstream"
    quantization: str
    device: str
    context_limit: int
    slots: int


# --- Events of one request, in the order they can come -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request is in the queue: its first position, or a new one. `queue_position` 0 = next."""

    queue_position: int
    expected_start_s: float


@dataclass(frozen=True, slots=True)
class Running:
    """The request has a slot. `dropped_messages` are indices into the messages that were sent."""

    prompt_tokens: int
    cached_tokens: int
    context_limit: int
    dropped_messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Newly decoded text: whole characters. `t_ms` is engine time since the request was accepted."""

    text: str
    tokens: int
    t_ms: float


@dataclass(frozen=True, slots=True)
class Saved:
    """All that an engine with the same model needs to go on with an answer that was `drained`.

    `prompt` is empty for a request that never ran: it begins anew. Seconds count from when it was accepted, and
    stand still while no engine works on it.
    """

    spent_s: float
    prompt: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    cached: int = 0
    generated: tuple[int, ...] = ()
    sampler: bytes = b""  # the runner's, see `Runner.save_sampler`
    queue_s: float = 0.0
    ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """`saved` comes with the reason `drained` only."""

    reason: Reason
    usage: Usage
    timing: Timing
    saved: Saved | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    error: ServiceError


class Aborted(Exception):
    """A prefill stopped between layers because `should_abort` said so. The KV it was writing is garbage."""


class OutOfMemory(Exception):
    """A step ran out of device or host memory. The KV it was writing is garbage."""


Event = Waiting | Running | Text | Finished | Failed
Sink = Callable[[Event], None]


class Engine(Protocol):
    """Answers chats. Thread: the event loop's, for every method and every call of a sink.

    A request gets exactly one `Finished` or `Failed`, as its last event.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_queued(self) -> int: ...

    def submit(self, chat: Chat, *, owner: tuple[int, int], sink: Sink, saved: Saved | None = None) -> int:
        """Queue a chat and return its key. `owner` is (uid, connection): whose fair share it uses.

        With `saved` an answer goes on: its next text follows the text that its generated ids stand for.
        Raises `Busy` at once when the queue is full, `EngineDead` when the engine is; then the sink is never called.
        """

    def cancel(self, key: int, reason: Reason) -> None:
        """End a request with `reason`, keeping what was generated. Unknown and finished keys are ignored."""

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""

    async def close(self) -> None:
        """Stop at once; whatever still runs gets `Failed` with `EngineDead`."""


class Runner(Protocol):
    """Runs the model over KV slots. Thread: the engine thread, for every method.

    A slot's KV holds tokens [0, length). The runner remembers no tokens: the caller says where each step starts.
    The next token's id is None when that row's logits are not finite: only that request fails.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def open(self, slot: int, params: Params, prompt: Sequence[int], saved: bytes = b"") -> None:
        """Bind a slot's sampling state (parameters, own random generator, ids that a penalty counts).

        `saved` is what `save_sampler` gave: the generator goes on from there, and `prompt` holds the generated ids
        too. Raises `ValueError` when it is not.
        """

    def save_sampler(self, slot: int) -> bytes:
        """The state of an open slot's random generator."""

    def prefill(
        self, slot: int, start: int, ids: Sequence[int], *, is_last: bool, is_replay: bool = False,
        should_abort: Callable[[], bool],
    ) -> int | None:  # fmt: skip
        """Compute KV for `ids` at positions [start, start + len(ids)); with `is_last`, sample the next id.

        Returns None without `is_last`. `is_replay`: give what decoding one after another gives, bit for bit, if that
        can be had at once. Asks `should_abort` between layers; raises `Aborted` when it says yes.
        """

    def decode(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> list[int | None]:
        """One batched step: row i feeds `ids[i]` at `positions[i]` of `slots[i]`; returns each row's next id."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy KV of positions [0, length) from one slot to another."""

    def close(self, slot: int) -> None:
        """Forget the slot's sampling state. Its KV stays, for reuse."""
