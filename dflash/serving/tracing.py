"""OpenTelemetry traces: a span per output, with its phases, sent by OTLP over HTTP.

Only a server with `serve.traces` imports this module, since it imports OpenTelemetry. Spans are
created when an output ends, from times that the server keeps anyway.

Source of the attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans
"""

import collections
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Context, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dflash.inference.request import RequestOutput, Tokens
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import CancelReason, HttpHead, ServedRequest
from dflash.version import __version__

_EXPORT_S = 2.0  # Time for the collector to take a batch of spans.
# Operation, and prefix of response ids, by path.
_OPERATIONS = {
    "/v1/chat/completions": ("chat", "chatcmpl-"),
    "/v1/completions": ("text_completion", "cmpl-"),
    "/v1/responses": ("chat", "resp_"),
    "/generate": ("text_completion", ""),
}
_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


class Tracing:
    """Source of the spans of a server."""

    def __init__(self, provider: TracerProvider):
        """Creates spans by a provider, which sends them."""
        self._provider = provider
        self._tracer = provider.get_tracer("dflash", __version__)

    @classmethod
    def to(cls, endpoint: str) -> "Tracing":
        """Returns traces that are sent to the URL of an OTLP collector, in the background."""
        name = os.environ.get(OTEL_SERVICE_NAME, "dflash")
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
        provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def recorder(
        self, head: HttpHead, request: CompletionRequest, model: ServedModel
    ) -> "RequestTrace":
        """Returns the recorder of the outputs of an HTTP request, whose span is their parent."""
        return RequestTrace(self._tracer, head, request, model)

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()


class RequestTrace:
    """Recorder that creates the spans of the outputs of an HTTP request as they end."""

    def __init__(
        self,
        tracer: trace.Tracer,
        head: HttpHead,
        request: CompletionRequest,
        model: ServedModel,
    ):
        """Reads the parent span from the header traceparent, if there is one."""
        self._tracer = tracer
        self._parent: Context = TraceContextTextMapPropagator().extract(head.headers)
        operation, prefix = _OPERATIONS[head.path]
        name = model.served_names[request.adapter]
        self._name = f"{operation} {name}"
        sampling = {f"gen_ai.request.{key}": getattr(request.sampling, key) for key in _SAMPLING}
        self._attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "dflash",
            "gen_ai.request.model": name,
            "gen_ai.response.model": name,
            "gen_ai.response.id": f"{prefix}{head.id}",
            "gen_ai.request.choice.count": request.choices,
            "gen_ai.request.stream": request.options.stream,
            **sampling,
        }
        if request.stop:
            self._attributes["gen_ai.request.stop_sequences"] = request.stop
        self._cycles: collections.Counter[int] = collections.Counter()  # By index of the output.
        self._committed: collections.Counter[int] = collections.Counter()

    def tokens(self, served: ServedRequest, event: Tokens, now: float) -> None:
        """Counts the cycles of an output."""
        self._cycles[served.index] += len(event.acceptance_lengths)
        self._committed[served.index] += sum(event.acceptance_lengths)

    def finished(self, served: ServedRequest, done: RequestOutput, now: float) -> None:
        """Creates the spans of an output that the engine has finished."""
        details = {
            "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
            "dflash.preemptions": done.preemptions,
        }
        queued_s = (done.queued_ms or 0.0) / 1e3
        self._create(served, done.finish_reason, queued_s, details, done.error)

    def cancelled(self, served: ServedRequest, reason: CancelReason) -> None:
        """Creates the spans of an output that a stop string or the client has ended."""
        self._create(served, reason, 0.0, {}, None)

    def _create(
        self,
        served: ServedRequest,
        reason: str,
        queued_s: float,
        details: dict[str, Any],
        error: Exception | None,
    ) -> None:
        request, cycles = served.request, self._cycles[served.index]
        attributes = self._attributes | details
        attributes |= {
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.input_tokens": len(request.prompt),
            "gen_ai.usage.output_tokens": served.tokens,
            "dflash.choice": served.index,
            "dflash.cycles": cycles,
        }
        if served.first_at is not None:
            waited = served.first_at - served.submitted_at
            attributes["gen_ai.response.time_to_first_chunk"] = waited
        if cycles:
            lengths = self._committed[served.index]
            attributes["dflash.mean_acceptance_length"] = lengths / cycles
        if error is not None:
            attributes["error.type"] = type(error).__name__
        phases = list(_phases(served, queued_s))
        shift = time.time_ns() - time.perf_counter_ns()

        def epoch_ns(seconds: float) -> int:
            return int(seconds * 1e9) + shift

        span = self._tracer.start_span(
            self._name,
            context=self._parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=epoch_ns(served.submitted_at),
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, str(error)))
        within = trace.set_span_in_context(span, self._parent)
        for name, begin, end in phases:
            phase = self._tracer.start_span(name, context=within, start_time=epoch_ns(begin))
            phase.end(epoch_ns(end))
        span.end(epoch_ns(phases[-1][-1]))


def _phases(served: ServedRequest, queued_s: float) -> Iterator[tuple[str, float, float]]:
    """Yields name, begin and end of each phase so far; `queued_s` is the wait in the scheduler."""
    now = time.perf_counter()
    begins = [("queue", served.submitted_at)]
    if served.taken_at is not None:
        begins.append(("prefill", served.taken_at + queued_s))
    if served.first_at is not None:
        begins.append(("decode", served.first_at))
        now = served.last_at
    ends = [begin for _, begin in begins[1:]]
    for (name, begin), end in itertools.zip_longest(begins, ends, fillvalue=now):
        yield name, begin, max(begin, end)
