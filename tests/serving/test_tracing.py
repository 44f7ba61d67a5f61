"""Traces of requests: what spans say, and that a collector gets them."""

import asyncio
import contextlib
import http.server
import threading
import time

import pytest
from support import served
from support.served_model import make_model

from dflash import errors
from dflash.inference.request import Request, RequestOutput, RequestSampling, Tokens
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.served_requests import HttpHead, RequestGroup

sdk = pytest.importorskip("opentelemetry.sdk.trace")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEAD = HttpHead("/v1/chat/completions", "r1", {"traceparent": PARENT})


@pytest.fixture
def spans():
    """A source of traces, and a function that returns the spans that have ended."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from dflash.serving.tracing import Tracing

    provider, exporter = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider), lambda: {span.name: span for span in exporter.get_finished_spans()}


def output(reason: str, error=None) -> RequestOutput:
    times = {"prefill_ms": 1.0, "decode_ms": 2.0, "decode_clock_s": 0.0, "queued_ms": 3.0}
    end = time.perf_counter()
    return RequestOutput(
        7, (1, 2, 3), reason, (2,), (4,), **times, finished_at=end, cached_tokens=16, error=error
    )


def run(tracing, act, model, head=HEAD, **changes) -> None:
    """Lets `act` do to a group of one request what the server does."""
    sampling = RequestSampling(temperature=0.5, seed=9)
    request = CompletionRequest(((1, 2, 3, 4),), sampling, stop=("x",), **changes)
    recorder = tracing.recorder(head, request, model)

    async def one():
        with RequestGroup(
            [Request(7, (1, 2, 3, 4), 20)],
            timeout_s=9,
            cancel=lambda id: None,
            recorders=[recorder],
        ) as group:
            group.served[0].taken_at = time.perf_counter()
            act(group)

    asyncio.run(one())


def finish(group, reason="length", error=None) -> None:
    time.sleep(0.005)
    group.count(0, Tokens(7, (1,)), time.perf_counter())
    group.count(0, Tokens(7, (2, 3), (2,), (1,), block_sizes=(4,)), time.perf_counter())
    group.finish(0, output(reason, error), time.perf_counter())


def test_a_finished_request_has_a_span_with_phases(spans):
    tracing, ended = spans
    run(tracing, finish, make_model(adapters={"sql": "dir"}), adapter=1)
    found = ended()
    assert set(found) == {"chat sql", "queue", "prefill", "decode"}
    whole = found.pop("chat sql")
    assert whole.parent.trace_id == int(PARENT.split("-")[1], 16)
    assert whole.parent.span_id == int(PARENT.split("-")[2], 16)
    said = dict(whole.attributes)
    assert said.pop("gen_ai.response.time_to_first_chunk") > 0
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dflash",
        "gen_ai.request.model": "sql",
        "gen_ai.response.model": "sql",
        "gen_ai.response.id": "chatcmpl-r1",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 9,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.request.max_tokens": 20,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "dflash.preemptions": 0,
        "dflash.choice": 0,
        "dflash.cycles": 1,
        "dflash.mean_acceptance_length": 2.0,
    }
    assert all(span.parent.span_id == whole.context.span_id for span in found.values())
    queue, prefill, decode = (found[name] for name in ("queue", "prefill", "decode"))
    assert whole.start_time == queue.start_time < queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time < decode.end_time == whole.end_time
    assert abs(whole.end_time - time.time_ns()) < 60e9


def test_a_cancelled_request_ends_in_the_phase_that_it_had_reached(spans):
    tracing, ended = spans
    run(tracing, lambda group: None, make_model(), head=HEAD._replace(headers={}))
    found = ended()
    assert set(found) == {"chat tiny_target", "queue", "prefill"}
    assert found["chat tiny_target"].parent is None
    assert found["chat tiny_target"].attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_an_error_is_named(spans):
    tracing, ended = spans
    error = errors.NumericsError("logits are not finite")
    run(tracing, lambda group: finish(group, "error", error), make_model())
    whole = ended()["chat tiny_target"]
    assert whole.attributes["error.type"] == "NumericsError"
    assert (whole.status.is_ok, whole.status.description) == (False, "logits are not finite")


def test_a_collector_gets_the_spans(tmp_path):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []
    with collector(got) as url, served.serving(tmp_path, f"serve.traces={url}") as server:
        body = {"prompt": "abcabcab", "max_tokens": 8}
        status, _ = server.post("/v1/completions", body, traceparent=PARENT)
        assert status == 200
        served.ended(server.process, served.signal.SIGTERM)
        assert "Traceback" not in server.log.read_text()
    (message,) = map(ExportTraceServiceRequest.FromString, got)
    (resource,) = message.resource_spans
    assert any(
        (one.key, one.value.string_value) == ("service.name", "dflash")
        for one in resource.resource.attributes
    )
    found = resource.scope_spans[0].spans
    assert sorted(one.name for one in found) == [
        "decode", "prefill", "queue", "text_completion tiny"
    ]  # fmt: skip
    assert {one.trace_id.hex() for one in found} == {PARENT.split("-")[1]}


@contextlib.contextmanager
def collector(got: list[bytes]):
    """The URL of a collector, which appends the bodies that it gets."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *unused):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}/v1/traces"
        listener.shutdown()
