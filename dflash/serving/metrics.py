"""Prometheus metrics: those that vLLM's dashboards and clients expect, and dflash's own."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dflash.config.schema import DecodeConfig
from dflash.inference.engine import Engine
from dflash.inference.request import Event, RequestOutput, Tokens
from dflash.inference.scheduler import SchedulerStats
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import CancelReason, ServedRequest

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_CHOICES = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")

# name: (help text, labels besides `_LABELS`). prometheus_client appends _total to counters.
_COUNTERS = {
    "vllm:spec_decode_num_drafts": ("Verified cycles with drafts.", ()),
    "vllm:spec_decode_num_draft_tokens": ("Drafted tokens.", ()),
    "vllm:spec_decode_num_accepted_tokens": ("Accepted draft tokens.", ()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "Accepted draft tokens by position in the draft.",
        ("position",),
    ),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", ()),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", ()),
    "vllm:num_preemptions": ("Preemptions of running requests.", ()),
    "vllm:prompt_tokens": ("Prefilled prompt tokens.", ()),
    "vllm:generation_tokens": ("Generated tokens.", ()),
    "vllm:request_success": ("Finished requests by finish reason.", ("finished_reason",)),
    "dflash:dispatches": ("Dispatches of decode cycles.", ()),
    "dflash:cycles": ("Decode cycles.", ()),
    "dflash:cycle_seconds": ("Time of decode cycles in seconds.", ()),
    "dflash:events": ("What the kind of engine counts itself, by event.", ("event",)),
    "dflash:block_sizes": ("Decode cycles by number of verified rows.", ("size",)),
    # The mean acceptance length of an adapter is the ratio of these two.
    "dflash:adapter_tokens": ("Output tokens of cycles with drafts, by adapter.", ("adapter",)),
    "dflash:adapter_cycles": ("Verified cycles with drafts, by adapter.", ("adapter",)),
}
# Counters that schedulers count, with the name in `SchedulerStats`.
_SCHEDULER_COUNTS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_queries_tokens",
    "vllm:prefix_cache_hits": "prefix_hits_tokens",
    "dflash:dispatches": "dispatches",
    "dflash:cycles": "cycles",
    "dflash:cycle_seconds": "decode_seconds",
}
_GAUGES = {
    "vllm:num_requests_running": ("Requests that hold a slot.", ()),
    "vllm:num_requests_waiting": ("Requests in the queue.", ()),
    "vllm:kv_cache_usage_perc": ("Fraction of KV cache pages in use; 1 is full.", ()),
    "vllm:cache_config_info": ("Layout of the KV cache.", ("block_size", "num_gpu_blocks")),
}
# name: (help text, upper bounds of the buckets).
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Time to first token in seconds.", _FIRST_TOKEN_SECONDS),
    "vllm:inter_token_latency_seconds": (
        "Time between successive arrivals of tokens of a request in seconds.",
        _TOKEN_SECONDS,
    ),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time per output token of a request, after the first, in seconds.",
        _TOKEN_SECONDS,
    ),
    "vllm:e2e_request_latency_seconds": (
        "End-to-end request latency in seconds.",
        _REQUEST_SECONDS,
    ),
    "vllm:request_queue_time_seconds": (
        "Time that a request waited in the queue in seconds.",
        _REQUEST_SECONDS,
    ),
    "vllm:request_prefill_time_seconds": (
        "Prefill time of a request in seconds.",
        _REQUEST_SECONDS,
    ),
    "vllm:request_decode_time_seconds": (
        "Decode time of a request in seconds.",
        _REQUEST_SECONDS,
    ),
    "vllm:request_inference_time_seconds": (
        "Prefill and decode time of a request in seconds.",
        _REQUEST_SECONDS,
    ),
    "vllm:request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "vllm:request_generation_tokens": ("Generated tokens per request.", _TOKENS),
    "vllm:request_max_num_generation_tokens": ("Limit on generated tokens per request.", _TOKENS),
    "vllm:request_params_max_tokens": ("The max_tokens parameter of requests.", _TOKENS),
    "vllm:request_params_n": ("The n parameter of requests.", _CHOICES),
    "vllm:iteration_tokens_total": ("Generated tokens per engine step.", _TOKENS),
    "dflash:step_seconds": ("Duration of an engine step in seconds.", _STEP_SECONDS),
}


@dataclasses.dataclass
class Totals:
    """Counts since the start; the log prints their differences.

    Attributes:
      prompt_tokens: Prompt tokens of requests that have their first token.
      cycles: Cycles in which drafts were verified.
      committed: Output tokens of these cycles.
      accepted: Output tokens that are accepted drafts.
      accepted_at: Accepted tokens by position in the draft, from 0.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cycles: int = 0
    drafted: int = 0
    committed: int = 0
    accepted: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)


class Metrics:
    """Prometheus metrics of the server."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.totals = Totals()
        # Totals of the schedulers that counters include already.
        self._reported: dict[tuple[str, ...], float] = {}
        self._labels = {"model_name": "", "engine": "0"}
        self._served_names: tuple[str, ...] = ("",)
        self._metrics: dict[str, Any] = {}
        self._unlabeled: list[Any] = []  # Metrics without labels besides `_LABELS`.
        for kind, table in ((Counter, _COUNTERS), (Gauge, _GAUGES)):
            for name, (help, labels) in table.items():
                metric = kind(name, help, (*_LABELS, *labels), registry=self.registry)
                self._metrics[name] = metric
                if not labels:
                    self._unlabeled.append(metric)
        for name, (help, buckets) in _HISTOGRAMS.items():
            metric = Histogram(name, help, _LABELS, registry=self.registry, buckets=buckets)
            self._metrics[name] = metric
            self._unlabeled.append(metric)

    def text(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)

    def describe(self, model: ServedModel, engine: Engine) -> None:
        """Sets labels and constants, and initializes all series for the first scrape."""
        self._labels = {"model_name": model.name, "engine": "0"}
        self._served_names = model.served_names
        self.totals.accepted_at = [0] * (engine.drafter.longest_path - 1)
        layout = engine.layout
        self._metric(
            "vllm:cache_config_info",
            block_size=str(layout.page_size),
            num_gpu_blocks=str(layout.num_replicas * (layout.pages_per_replica - 1)),
        ).set(1)
        for metric in self._unlabeled:
            metric.labels(**self._labels)
        for place in range(len(self.totals.accepted_at)):
            self._metric("vllm:spec_decode_num_accepted_tokens_per_pos", position=str(place))
        for reason in ("stop", "length", "abort"):
            self._metric("vllm:request_success", finished_reason=reason)

    def admitted(self, request: CompletionRequest, decode: DecodeConfig) -> None:
        """Records the parameters of an admitted HTTP request."""
        self._observe("vllm:request_params_n", request.choices)
        limit = request.max_new_tokens or decode.max_new_tokens
        self._observe("vllm:request_params_max_tokens", limit)

    def stepped(
        self, events: Sequence[Event], stats: Mapping[str, SchedulerStats], seconds: float
    ) -> None:
        """Records an engine step."""
        tokens = sum(len(event.ids) for event in events if isinstance(event, Tokens))
        if tokens:
            self._observe("vllm:iteration_tokens_total", tokens)
        if seconds:
            self._observe("dflash:step_seconds", seconds)
        schedulers = list(stats.values())
        pages = sum(stats.pages_total for stats in schedulers)
        used = sum(stats.pages_used for stats in schedulers)
        running = sum(stats.running + stats.prefilling for stats in schedulers)
        self._metric("vllm:num_requests_running").set(running)
        self._metric("vllm:num_requests_waiting").set(sum(stats.waiting for stats in schedulers))
        self._metric("vllm:kv_cache_usage_perc").set(used / pages if pages else 0)
        for name, count in _SCHEDULER_COUNTS.items():
            self._count_to(sum(getattr(stats, count) for stats in schedulers), name)
        events: collections.Counter[str] = collections.Counter()
        for each in schedulers:
            events.update(each.events)
        for event, total in events.items():
            self._count_to(total, "dflash:events", event=event)

    def _count_to(self, total: float, name: str, **labels: str) -> None:
        """Raises a counter to the total of all schedulers."""
        series = name, *labels.values()
        self._metric(name, **labels).inc(total - self._reported.get(series, 0))
        self._reported[series] = total

    def tokens(self, served: ServedRequest, event: Tokens, now: float) -> None:
        """Counts new tokens of a request; call it before `served.count`."""
        num_tokens = len(event.ids)
        self._metric("vllm:generation_tokens").inc(num_tokens)
        self.totals.output_tokens += num_tokens
        if served.first_at is None:
            prompt_tokens = len(served.request.prompt)
            self._observe("vllm:time_to_first_token_seconds", now - served.submitted_at)
            self._metric("vllm:prompt_tokens").inc(prompt_tokens)
            self.totals.prompt_tokens += prompt_tokens
        elif num_tokens:
            self._observe("vllm:inter_token_latency_seconds", now - served.last_at)
        self._count_cycles(event, served.request.adapter)

    def finished(self, served: ServedRequest, done: RequestOutput, now: float) -> None:
        """Records a request that the engine has finished."""
        self._ended(served, done.finish_reason, now)
        prefill_s, decode_s = done.prefill_ms / 1e3, done.decode_ms / 1e3
        self._observe("vllm:request_queue_time_seconds", (done.queued_ms or 0.0) / 1e3)
        self._observe("vllm:request_prefill_time_seconds", prefill_s)
        self._observe("vllm:request_decode_time_seconds", decode_s)
        self._observe("vllm:request_inference_time_seconds", prefill_s + decode_s)

    def cancelled(self, served: ServedRequest, reason: CancelReason) -> None:
        """Records a request that a stop string ended, or whose client disconnected."""
        self._ended(served, reason, served.last_at)

    def _ended(self, served: ServedRequest, reason: str, now: float | None) -> None:
        self._metric("vllm:request_success", finished_reason=reason).inc()
        self._observe("vllm:request_prompt_tokens", len(served.request.prompt))
        self._observe("vllm:request_generation_tokens", served.tokens)
        self._observe("vllm:request_max_num_generation_tokens", served.request.max_new_tokens)
        if now is not None:
            self._observe("vllm:e2e_request_latency_seconds", now - served.submitted_at)
        if served.tokens > 1:
            mean_s = (served.last_at - served.first_at) / (served.tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", mean_s)

    def _count_cycles(self, event: Tokens, adapter: int) -> None:
        totals, sizes = self.totals, event.block_sizes
        for size in set(sizes):
            self._metric("dflash:block_sizes", size=str(size)).inc(sizes.count(size))
        cycles = zip(event.acceptance_lengths, event.accepted, sizes, strict=True)
        drafting = [cycle for cycle in cycles if cycle[-1] > 1]
        if not drafting:
            return
        lengths, accepted, sizes = zip(*drafting, strict=True)
        drafted = sum(sizes) - len(sizes)
        totals.cycles += len(accepted)
        totals.committed += sum(lengths)
        totals.accepted += sum(accepted)
        totals.drafted += drafted
        if len(self._served_names) > 1:
            name = self._served_names[adapter]
            self._metric("dflash:adapter_tokens", adapter=name).inc(sum(lengths))
            self._metric("dflash:adapter_cycles", adapter=name).inc(len(lengths))
        self._metric("vllm:spec_decode_num_drafts").inc(len(accepted))
        self._metric("vllm:spec_decode_num_accepted_tokens").inc(sum(accepted))
        self._metric("vllm:spec_decode_num_draft_tokens").inc(drafted)
        for place in range(max(accepted)):
            count = sum(number > place for number in accepted)
            totals.accepted_at[place] += count
            per_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
            self._metric(per_position, position=str(place)).inc(count)

    def _metric(self, name: str, **labels: str) -> Any:
        return self._metrics[name].labels(**self._labels, **labels)

    def _observe(self, histogram: str, value: float) -> None:
        self._metric(histogram).observe(value)
