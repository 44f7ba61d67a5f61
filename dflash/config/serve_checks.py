"""Consistency checks of a server's config; see `checks`."""

import urllib.parse
from collections.abc import Iterator
from typing import Any

Problem = tuple[tuple[str, ...], str]


def problems(config: Any) -> Iterator[Problem]:
    """Yields (keys, message) for every inconsistency in the config of a server."""
    yield from _adapters(config)
    yield from _traces(config)


def _adapters(config: Any) -> Iterator[Problem]:
    """Checks the names of adapters, and what a server does not support beside them."""
    serve = config.serve
    if serve.update_weights and config.target.adapter is not None:
        keys = "serve.update_weights", "target.adapter"
        yield keys, "not with target.adapter, which new weights would not have"
    for name in serve.adapters:
        if not name or not name.isprintable():
            yield ("serve.adapters",), f"{name!r} is no name that a client can give as its model"
        elif name in (config.model_name, config.target.checkpoint):
            message = "is the name of the target itself; choose another one"
            yield (f"serve.adapters.{name}", "serve.model"), message
    if serve.adapters and config.drafter.overlaps:
        message = "not supported with drafter.overlap; set target.adapter to merge one"
        yield ("serve.adapters", "drafter.overlap"), message


def _traces(config: Any) -> Iterator[Problem]:
    """Checks the URL of the collector."""
    url = config.serve.traces
    if url is None:
        return
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        example = "http://localhost:4318/v1/traces"
        yield ("serve.traces",), f"expected the URL of a collector, such as {example}; got {url!r}"
