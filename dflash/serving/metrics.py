"""Prometheus metrics: under vLLM's names, which clients parse, and some of our own."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dflash.config.schema import DecodeConfig
from dflash.inference.engine import Engine
from dflash.inference.request import Completion, Event, Tokens
from dflash.inference.scheduler import SchedulerStats
from dflash.serving.ask import Ask, Model

if TYPE_CHECKING:
    from dflash.serving.service import Flight

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SECONDS_OF_REQUESTS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_SECONDS_OF_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_SECONDS_TO_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_SECONDS_OF_STEPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_CHOICES = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")


@dataclasses.dataclass
class Totals:
    """Plain counts since the start, of which the log takes differences.

    Attributes:
      prompt_tokens: of requests that came to their first token.
      output_tokens: of all requests.
      cycles: in which drafts were verified.
      drafted: tokens that were proposed in them.
      accepted: those of them that the target accepted.
      accepted_at: likewise, by draft position from 0.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)


class Metrics:
    """Counts what happens; no number of it is read back by the server, but by its log.

    Attributes:
      totals: the counts that the log is made of.
    """

    def __init__(self):
        """All zero."""
        self.registry = CollectorRegistry()
        self.totals = Totals()
        self._reached: dict[Counter, int] = {}  # totals that the schedulers count
        self._labels = {"model_name": "", "engine": "0"}
        self._make()

    def text(self) -> bytes:
        """What /metrics says."""
        return prometheus_client.generate_latest(self.registry)

    def describe(self, model: Model, engine: Engine) -> None:
        """Takes what is served: labels, and the numbers that do not change."""
        self._labels = {"model_name": model.name, "engine": "0"}
        self.totals.accepted_at = [0] * (engine.drafter.longest_path - 1)
        self._cache_info.labels(
            **self._labels,
            block_size=str(engine.layout.page_size),
            num_gpu_blocks=str(engine.layout.num_replicas * (engine.layout.pages_per_replica - 1)),
        ).set(1)
        for metric in self._alone:  # there from the first scrape on
            metric.labels(**self._labels)
        for place in range(len(self.totals.accepted_at)):
            self._accepted_at.labels(**self._labels, position=str(place))
        for reason in ("stop", "length", "abort"):
            self._successes.labels(**self._labels, finished_reason=reason)

    def admitted(self, ask: Ask, decode: DecodeConfig) -> None:
        """A request was taken on."""
        self._of(self._choices).observe(ask.choices)
        self._of(self._limits).observe(ask.max_new_tokens or decode.max_new_tokens)

    def stepped(
        self, events: Sequence[Event], stats: Mapping[str, SchedulerStats], seconds: float
    ) -> None:
        """The engine has made a step of so many seconds."""
        tokens = sum(len(event.ids) for event in events if isinstance(event, Tokens))
        if tokens:
            self._of(self._step_tokens).observe(tokens)
        if seconds:
            self._of(self._step_seconds).observe(seconds)
        every = list(stats.values())
        self._of(self._running).set(sum(one.running + one.prefilling for one in every))
        self._of(self._waiting).set(sum(one.waiting for one in every))
        pages = sum(one.pages_total for one in every)
        self._of(self._usage).set(sum(one.pages_used for one in every) / pages if pages else 0)
        for counter, total in (
            (self._preemptions, sum(one.preemptions for one in every)),
            (self._cache_queries, sum(one.prefix_queries_tokens for one in every)),
            (self._cache_hits, sum(one.prefix_hits_tokens for one in every)),
            (self._dispatches, sum(one.dispatches for one in every)),
            (self._cycles, sum(one.cycles for one in every)),
        ):
            self._of(counter).inc(total - self._reached.get(counter, 0))
            self._reached[counter] = total

    def tokens(self, flight: "Flight", event: Tokens, now: float) -> None:
        """A request has gained tokens; called before the flight notes it."""
        count = len(event.ids)
        self._of(self._output_tokens).inc(count)
        self.totals.output_tokens += count
        if flight.first_at is None:
            self._of(self._first).observe(now - flight.submitted_at)
            self._of(self._prompt_tokens).inc(len(flight.request.prompt))
            self.totals.prompt_tokens += len(flight.request.prompt)
        elif count:
            self._of(self._between).observe(now - flight.last_at)
        self._speculated(event.acceptance_lengths, event.block_sizes)

    def finished(self, flight: "Flight", done: Completion, now: float) -> None:
        """A request has come to its end."""
        self._ended(flight, done.finish_reason, now)
        self._of(self._queued).observe(done.queued_ms / 1e3)
        self._of(self._prefill).observe(done.prefill_ms / 1e3)
        self._of(self._decode).observe(done.decode_ms / 1e3)
        self._of(self._inference).observe((done.prefill_ms + done.decode_ms) / 1e3)

    def dropped(self, flight: "Flight", reason: Literal["stop", "abort"]) -> None:
        """A request was cancelled: its client went away, or a stop string was found."""
        self._ended(flight, reason, flight.last_at)

    def _ended(self, flight: "Flight", reason: str, now: float | None) -> None:
        self._successes.labels(**self._labels, finished_reason=reason).inc()
        self._of(self._request_prompt).observe(len(flight.request.prompt))
        self._of(self._request_output).observe(flight.tokens)
        self._of(self._request_most).observe(flight.request.max_new_tokens)
        if now is not None:
            self._of(self._end_to_end).observe(now - flight.submitted_at)
        if flight.tokens > 1:
            each = (flight.last_at - flight.first_at) / (flight.tokens - 1)
            self._of(self._each).observe(each)

    def _speculated(self, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        """Counts cycles by their size and by how many drafts they accepted."""
        totals = self.totals
        for size in set(sizes):
            chosen = self._block_sizes.labels(**self._labels, size=str(size))
            chosen.inc(sizes.count(size))
        lengths = [one for one, size in zip(lengths, sizes, strict=True) if size > 1]
        sizes = [size for size in sizes if size > 1]
        if not lengths:
            return
        accepted, drafted = sum(lengths) - len(lengths), sum(sizes) - len(sizes)
        totals.cycles += len(lengths)
        totals.accepted += accepted
        totals.drafted += drafted
        self._of(self._drafts).inc(len(lengths))
        self._of(self._accepted).inc(accepted)
        self._of(self._draft_tokens).inc(drafted)
        for place in range(max(lengths) - 1):
            count = sum(length - 1 > place for length in lengths)
            totals.accepted_at[place] += count
            self._accepted_at.labels(**self._labels, position=str(place)).inc(count)

    def _of(self, metric):
        return metric.labels(**self._labels)

    # --- the metrics themselves -----------------------------------------------------------------

    def _make(self) -> None:
        self._alone: list = []  # those without labels of their own
        count, gauge, spread = self._counter, self._gauge, self._histogram
        # prometheus_client adds _total to counters.
        self._drafts = count("vllm:spec_decode_num_drafts", "Cycles with drafts.")
        self._draft_tokens = count("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = count("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by draft position.",
            (*_LABELS, "position"),
            registry=self.registry,
        )
        self._running = gauge("vllm:num_requests_running", "Requests with a slot.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Used share of the pages; 1 is all.")
        self._cache_info = Gauge(
            "vllm:cache_config_info",
            "Layout of the cache.",
            (*_LABELS, "block_size", "num_gpu_blocks"),
            registry=self.registry,
        )
        self._cache_queries = count("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._cache_hits = count("vllm:prefix_cache_hits", "Those that were found.")
        self._preemptions = count("vllm:num_preemptions", "Requests that lost their slot.")
        self._prompt_tokens = count("vllm:prompt_tokens", "Tokens of prompts.")
        self._output_tokens = count("vllm:generation_tokens", "Tokens of outputs.")
        self._successes = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        requests, tokens = _SECONDS_OF_REQUESTS, _SECONDS_OF_TOKENS
        first = "vllm:time_to_first_token_seconds"
        self._first = spread(first, "Seconds to the first token.", _SECONDS_TO_FIRST)
        self._between = spread(
            "vllm:inter_token_latency_seconds", "Seconds between arrivals of tokens.", tokens
        )
        self._each = spread(
            "vllm:request_time_per_output_token_seconds", "Seconds of an output token.", tokens
        )
        self._end_to_end = spread("vllm:e2e_request_latency_seconds", "Of requests.", requests)
        self._queued = spread("vllm:request_queue_time_seconds", "In the queue.", requests)
        self._prefill = spread("vllm:request_prefill_time_seconds", "Of prompts.", requests)
        self._decode = spread("vllm:request_decode_time_seconds", "Of outputs.", requests)
        self._inference = spread("vllm:request_inference_time_seconds", "Of both.", requests)
        self._request_prompt = spread("vllm:request_prompt_tokens", "Of a prompt.", _TOKENS)
        self._request_output = spread("vllm:request_generation_tokens", "Of an output.", _TOKENS)
        self._request_most = spread(
            "vllm:request_max_num_generation_tokens", "Limit of an output.", _TOKENS
        )
        self._limits = spread("vllm:request_params_max_tokens", "Limits asked for.", _TOKENS)
        self._choices = spread("vllm:request_params_n", "Outputs asked for.", _CHOICES)
        self._step_tokens = spread("vllm:iteration_tokens_total", "Tokens of a step.", _TOKENS)
        self._step_seconds = spread("dflash:step_seconds", "Of a step.", _SECONDS_OF_STEPS)
        self._dispatches = count("dflash:dispatches", "Dispatches of cycles.")
        self._cycles = count("dflash:cycles", "Cycles, of all slots together.")
        self._block_sizes = Counter(
            "dflash:block_sizes",
            "Cycles of a request by the rows that were verified.",
            (*_LABELS, "size"),
            registry=self.registry,
        )

    def _counter(self, name: str, help: str) -> Counter:
        return self._kept(Counter(name, help, _LABELS, registry=self.registry))

    def _gauge(self, name: str, help: str) -> Gauge:
        return self._kept(Gauge(name, help, _LABELS, registry=self.registry))

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, help, _LABELS, registry=self.registry, buckets=buckets)
        return self._kept(made)

    def _kept(self, metric):
        self._alone.append(metric)
        return metric
