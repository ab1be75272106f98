"""Numbers for operators, in Prometheus form, named as vLLM names them, under `chatglm_`.

Thread: the event loop. Own registry: nothing global, so two servers in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Seconds. TTFT from 10 ms, per-token times from 1 ms: a small model on a CPU and a large one on a GPU both fit.
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """The counters and histograms of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.connections = Gauge("chatglm_connections", "Open connections", registry=registry)
        self.errors = Counter("chatglm_errors", "Error events sent, by code", ["code"], registry=registry)
        self.resumes = Counter("chatglm_resumes", "Requests taken up again", registry=registry)
        self._requests = Counter(
            "chatglm_request_success", "Answers that ended", ["finished_reason"], registry=registry
        )
        self._prompt_tokens = Counter("chatglm_prompt_tokens", "Prompt tokens", registry=registry)
        self._cached_tokens = Counter(
            "chatglm_prefix_cache_hits", "Prompt tokens reused from a slot", registry=registry
        )
        self._generated = Counter("chatglm_generation_tokens", "Tokens generated", registry=registry)
        self._running = Gauge("chatglm_num_requests_running", "Requests in a slot", registry=registry)
        self._waiting = Gauge("chatglm_num_requests_waiting", "Requests in the queue", registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"chatglm_{name}_seconds", help, buckets=buckets, registry=registry)

        self._queue_s = histogram("request_queue_time", "Accepted until it had a slot", _TTFT_BUCKETS)
        self._ttft_s = histogram("time_to_first_token", "Accepted until the first token", _TTFT_BUCKETS)
        self._tpot_s = histogram("request_time_per_output_token", "Mean time of the later tokens", _TOKEN_BUCKETS)
        self._e2e_s = histogram("e2e_request_latency", "Accepted until the end", _REQUEST_BUCKETS)

    def watch(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        """Read these gauges from the engine whenever somebody asks."""
        self._running.set_function(num_running)
        self._waiting.set_function(num_waiting)

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
        samples = {}
        for family in self._registry.collect():
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                samples[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return samples, generate_latest(self._registry).decode()
