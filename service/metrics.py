"""Numbers for operators, in Prometheus form, named as vLLM names them, under `chatglm_`.

Thread: the event loop; `audit_dropped` and `log_dropped` may be counted on any. It knows no engine and no requests:
both are read through what it is given. Own registry: nothing global, so two servers in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Seconds. TTFT from 10 ms, per-token times from 1 ms: a small model on a CPU and a large one on a GPU both fit.
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)

# What an engine's `stats()` may hold → help. An upstream engine has no slots: those gauges stay 0.
_ENGINE_GAUGES = {
    "num_requests_running": "Requests in a slot",
    "num_requests_waiting": "Requests in the queue",
    "kv_slots": "KV slots",
    "kv_slots_used": "KV slots whose request runs",
    "kv_tokens": "Tokens whose KV is held, for running requests and for reuse",
    "kv_cache_usage_perc": "Held share of the KV memory, 1 = all of it",
}


class Metrics:
    """The counters and histograms of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"chatglm_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"chatglm_{name}_seconds", help, buckets=buckets, registry=registry)

        self.connections = Gauge("chatglm_connections", "Open connections", registry=registry)
        self.errors = counter("errors", "Error events sent, by code", "code")
        self.resumes = counter("resumes", "Requests taken up again")
        self.limits = counter("limits_hit", "Refusals and cuts, by the setting that was reached", "setting")
        self.slow_steps = counter("slow_steps", "Engine steps that took longer than --step-limit-s")
        self.wasted_tokens = counter("wasted_tokens", "Tokens generated and never delivered")
        self.audit_dropped = counter("audit_dropped", "Audit lines that could not be written")
        self.log_dropped = counter("log_dropped", "Log lines that nobody took from stderr")
        self.itl_s = histogram("inter_token_latency", "Between two pieces of an answer's text", _TOKEN_BUCKETS)
        self.cancel_s = histogram("cancel_latency", "Asked to end until ended", _TOKEN_BUCKETS)
        self._requests = counter("request_success", "Answers that ended", "finished_reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self._cached_tokens = counter("prefix_cache_hits", "Prompt tokens reused from a slot")
        self._generated = counter("generation_tokens", "Tokens generated")
        self._engine_stats: Callable[[], Mapping[str, float]] | None = None
        self._engine_gauges = {
            name: Gauge(f"chatglm_{name}", help, registry=registry) for name, help in _ENGINE_GAUGES.items()
        }
        self._queue_s = histogram("request_queue_time", "Accepted until it had a slot", _TTFT_BUCKETS)
        self._ttft_s = histogram("time_to_first_token", "Accepted until the first token", _TTFT_BUCKETS)
        self._tpot_s = histogram("request_time_per_output_token", "Mean time of the later tokens", _TOKEN_BUCKETS)
        self._e2e_s = histogram("e2e_request_latency", "Accepted until the end", _REQUEST_BUCKETS)

    def watch(self, engine_stats: Callable[[], Mapping[str, float]]) -> None:
        """Ask the engine for its gauges whenever somebody asks for a snapshot. Unknown names are ignored."""
        self._engine_stats = engine_stats

    def count_finished(
        self, reason: str, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int, queue_s: float,
        ttft_s: float, total_s: float,
    ) -> None:  # fmt: skip
        """One answer has ended. Times in seconds since it was accepted."""
        self._requests.labels(reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._generated.inc(completion_tokens)
        self._e2e_s.observe(total_s)
        if prompt_tokens:
            self._queue_s.observe(queue_s)
        if completion_tokens:
            self._ttft_s.observe(ttft_s)
        if completion_tokens > 1:
            self._tpot_s.observe((total_s - ttft_s) / (completion_tokens - 1))

    def snapshot(self) -> tuple[dict[str, float], str]:
        """All samples by name, with labels as in the exposition, and the exposition itself."""
        for name, value in (self._engine_stats() if self._engine_stats is not None else {}).items():
            if name in self._engine_gauges:
                self._engine_gauges[name].set(value)
        samples = {}
        for family in self._registry.collect():
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return samples, generate_latest(self._registry).decode()
