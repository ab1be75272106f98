"""The engine thread's work, one step at a time: commands → scheduler → runner → text → events.

Thread: the engine thread, for everything here. It reads no sockets and no clock of its own (`now` is passed in), and
has no torch: the runner deals in token ids.

One call of `run_step` is one decode of all running rows and perhaps a prefill chunk. Whatever goes wrong inside a
step ends the request it went wrong for, and that request only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.engine import base
from service.protocol import EngineFailed, Params, Timing, Usage
from service.scheduler import Chunk, Scheduler, Step
from service.scheduler import Sequence as Tokens
from service.slots import Slots
from service.text import TextDecoder, TextStream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One request on the engine thread. Times are readings of the engine's clock, in seconds."""

    key: int
    prompt: Sequence[int]
    dropped: tuple[int, ...]
    params: Params
    accepted_at: float
    saved: base.Saved | None = None  # it goes on where another engine stopped
    tokens: Tokens | None = None  # its token state once it has a slot
    text: TextStream | None = None
    cached: int = 0
    started_at: float = 0.0
    first_token_at: float = 0.0
    num_generated: int = 0
    num_unsent: int = 0  # generated tokens whose text is still held back
    has_sampler: bool = True  # False: its own sampling state is bound when it has caught up


Post = Callable[[int, base.Event], None]


@dataclass(slots=True)
class Steps:
    """Owns slots, sequences and text of the running requests.

    `post` takes (key, event) and is called on the engine thread; `is_cancelled(key)` says whether a cancel is on its
    way, so that a long prefill can stop between layers.
    """

    runner: base.Runner
    slots: Slots
    scheduler: Scheduler
    stop_ids: frozenset[int]
    make_decoder: Callable[[], TextDecoder]
    now: Callable[[], float]
    post: Post
    is_cancelled: Callable[[int], bool]
    _jobs: dict[int, Job] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    # --- commands ---------------------------------------------------------------------------------------------

    def begin(self, job: Job) -> None:
        """Give a request a slot. The caller admits no more than there are slots."""
        capabilities = self.runner.capabilities
        generated = job.saved.generated if job.saved is not None else ()
        tokens = [*job.prompt, *generated]
        # A causal model computes a saved answer with the prompt, but as decoding did. Another one's prompt must be the
        # prompt alone: what was generated is fed again, a step each.
        prompt = tokens if capabilities.causal_prompt else job.prompt
        lease = self.slots.acquire(prompt, causal=capabilities.causal_prompt)
        try:
            if lease.copy_from is not None:
                self.runner.copy_prefix(lease.copy_from, lease.slot, lease.cached)
            job.has_sampler = len(prompt) == len(tokens)
            if job.has_sampler:
                self._open(job, lease.slot, tokens)
            else:
                self.runner.open(lease.slot, Params(temperature=0), prompt)
        except base.OutOfMemory as error:
            self.runner.close(lease.slot)
            self.slots.discard(lease.slot)
            self.post(job.key, base.Failed(EngineFailed(f"OOM: {error}")))
            return
        job.started_at = self.now()
        job.cached = lease.cached
        job.text = TextStream(self.make_decoder(), job.params.stop)
        job.tokens = Tokens(
            key=job.key, slot=lease.slot, num_prompt=len(prompt), tokens=tokens, computed=lease.cached,
            replay_from=len(job.prompt) if len(prompt) > len(job.prompt) else None,
        )  # fmt: skip
        if job.saved is not None:
            self._take_up(job, job.saved)
        self._jobs[job.key] = job
        self.scheduler.add(job.tokens)
        self.post(job.key, base.Running(len(job.prompt), job.cached, capabilities.context_limit, job.dropped))

    def _open(self, job: Job, slot: int, tokens: Sequence[int]) -> None:
        """Bind the request's own sampling state."""
        if job.saved is not None:
            self.runner.open(slot, job.params, tokens, job.saved.sampler)
        else:
            self.runner.open(slot, job.params, tokens)

    @staticmethod
    def _take_up(job: Job, saved: base.Saved) -> None:
        """Be where the other engine was: the text that was sent is behind us, what was held back is held again."""
        assert job.text is not None
        for id in saved.generated:
            job.num_unsent = 0 if job.text.push(id) else job.num_unsent + 1
        job.num_generated = len(saved.generated)
        if saved.prompt:
            job.cached = saved.cached
            job.started_at = job.accepted_at + saved.queue_s
            job.first_token_at = job.accepted_at + saved.ttft_s if saved.generated else 0.0

    def cancel(self, key: int, reason: base.Reason) -> None:
        """End a running request; unknown keys have ended already."""
        job = self._jobs.get(key)
        if job is not None:
            self._finish(job, reason)

    # --- one step ---------------------------------------------------------------------------------------------

    def run_step(self) -> None:
        """Plan and run one step, and post what it gave."""
        step = self.scheduler.plan()
        if step is None:
            return
        started_at = self.now()
        if step.decode:
            self._decode(step.decode)
        decoded_at = self.now()
        if step.prefill is not None and not self._prefill(step.prefill):
            step = Step(step.decode, None)
        self.scheduler.commit(step, decoded_at - started_at, self.now() - decoded_at)

    def _decode(self, rows: Sequence[Tokens]) -> None:
        for row in rows:
            if not self._jobs[row.key].has_sampler and row.computed == len(row.tokens) - 1:  # it has caught up
                self.runner.close(row.slot)
                self._open(self._jobs[row.key], row.slot, row.tokens)
                self._jobs[row.key].has_sampler = True
        slots = [row.slot for row in rows]
        ids = [row.tokens[row.computed] for row in rows]
        try:
            next_ids = self.runner.decode(slots, ids, [row.computed for row in rows])
        except base.OutOfMemory as error:
            self._fail(self._jobs[rows[-1].key], f"OOM: {error}")  # the newest; the others try again without it
            return
        for row, fed, next_id in zip(rows, ids, next_ids, strict=True):
            self.slots.append(row.slot, [fed])
            row.computed += 1
            self._advance(self._jobs[row.key], next_id)

    def _prefill(self, chunk: Chunk) -> bool:
        """Whether the chunk was computed."""
        row = chunk.seq
        ids = row.tokens[chunk.start : chunk.end]
        try:
            next_id = self.runner.prefill(
                row.slot, chunk.start, ids, is_last=chunk.is_last, is_replay=chunk.is_replay,
                should_abort=lambda: self.is_cancelled(row.key),
            )  # fmt: skip
        except base.Aborted:
            return False
        except base.OutOfMemory as error:
            self._fail(self._jobs[row.key], f"OOM in prefill: {error}")
            return False
        self.slots.append(row.slot, ids)
        row.computed = chunk.end
        if chunk.is_last:
            self._advance(self._jobs[row.key], next_id)
        return True

    def _advance(self, job: Job, next_id: int | None) -> None:
        """A request has its next token: text goes out, or the answer ends."""
        assert job.tokens is not None and job.text is not None
        if next_id is None:
            self._fail(job, "the model's logits are not finite (NaN or Inf)")
            return
        if job.tokens.computed < len(job.tokens.tokens):
            return  # what comes next is known: it was generated before
        if not job.first_token_at:
            job.first_token_at = self.now()
        if next_id in self.stop_ids:
            self._finish(job, "stop")
            return
        job.num_generated += 1
        job.num_unsent += 1
        job.tokens.tokens.append(next_id)
        self._post_text(job, job.text.push(next_id))
        if job.text.stopped:
            self._finish(job, "stop")
        elif (
            job.num_generated >= job.params.max_new_tokens
            or len(job.tokens.tokens) >= self.runner.capabilities.context_limit
        ):
            self._finish(job, "length")

    def _post_text(self, job: Job, text: str) -> None:
        if text:
            tokens, job.num_unsent = job.num_unsent, 0
            self.post(job.key, base.Text(text, tokens, 1000 * (self.now() - job.accepted_at)))

    # --- ends -------------------------------------------------------------------------------------------------

    def _finish(self, job: Job, reason: base.Reason) -> None:
        assert job.text is not None
        saved = self._save(job) if reason == "drained" else None
        if saved is None:
            self._post_text(job, job.text.finish())
            job.num_unsent = 0
        self._leave(job, keeps_kv=True)
        # What is held back of a drained answer is not sent: it may be half a character, which comes whole later.
        usage = Usage(len(job.prompt), job.cached, job.num_generated - job.num_unsent)
        self.post(job.key, base.Finished(reason, usage, self._timing(job), saved))

    def _save(self, job: Job) -> base.Saved:
        """All that the next engine needs. Before the request gives up its slot."""
        assert job.tokens is not None
        generated = tuple(job.tokens.tokens[len(job.prompt) :])
        sampler = self.runner.save_sampler(job.tokens.slot) if job.has_sampler else job.saved.sampler  # type: ignore[union-attr]
        first = job.first_token_at or job.accepted_at
        return base.Saved(
            self.now() - job.accepted_at, tuple(job.prompt), job.dropped, job.cached, generated, sampler,
            job.started_at - job.accepted_at, first - job.accepted_at,
        )  # fmt: skip

    def _fail(self, job: Job, why: str) -> None:
        log.error("request %d: %s", job.key, why)
        self._leave(job, keeps_kv=False)
        self.post(job.key, base.Failed(EngineFailed(why)))

    def _leave(self, job: Job, *, keeps_kv: bool) -> None:
        assert job.tokens is not None
        del self._jobs[job.key]
        self.scheduler.remove(job.key)
        self.runner.close(job.tokens.slot)
        (self.slots.release if keeps_kv else self.slots.discard)(job.tokens.slot)

    def _timing(self, job: Job) -> Timing:
        now = self.now()
        first = job.first_token_at or now
        decode_s = now - first
        rate = (job.num_generated - 1) / decode_s if job.num_generated > 1 and decode_s > 0 else 0.0
        return Timing(
            round(1000 * (job.started_at - job.accepted_at), 3), round(1000 * (first - job.accepted_at), 3),
            round(1000 * (now - job.accepted_at), 3), round(rate, 3),
        )  # fmt: skip
