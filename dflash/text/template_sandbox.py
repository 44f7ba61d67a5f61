"""Jinja environment for untrusted chat templates, and the program of the process that renders them.

Templates of checkpoints reach neither Python nor files, but a few dozen bytes of them can take all
time and memory. So a process of its own renders them, with limits on both (`template_process`).
Each line of its stdin is a rendering, and each line of its stdout the result.
"""

import datetime
import functools
import json
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

from dflash.text import limited_process
from dflash.text.template_process import MAX_BYTES, SECONDS

MAX_SOURCE = 1_000_000  # characters of a template
MAX_TEXT = 20_000_000  # characters of a rendered conversation


def main() -> None:
    """Renders until stdin ends."""
    limited_process.limit_memory(MAX_BYTES)
    for line in sys.stdin.buffer:
        limited_process.limit_time(SECONDS)
        print(json.dumps(_answer(line)), flush=True)


def make_environment(date: datetime.date) -> jinja2.Environment:
    """Builds the environment that chat templates on the Hugging Face hub expect.

    Args:
      date: Date that `strftime_now` formats, at midnight.
    Source: transformers, `utils/chat_template_utils.py`.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    moment = datetime.datetime.combine(date, datetime.time())
    # These differ between calls.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": moment.strftime}
    return environment


def _answer(line: bytes) -> dict[str, str]:
    """Renders a conversation; returns its `text`, or the `error` of the template."""
    try:
        source, date, variables = json.loads(line)
        text = _compiled(source, date).render(variables)
    except MemoryError:
        return {"error": f"takes more than {MAX_BYTES >> 20} MiB"}
    except jinja2.TemplateError as error:
        return {"error": str(error)}
    except Exception as error:  # a template may raise any exception
        return {"error": f"{type(error).__name__}: {error}"}
    if len(text) > MAX_TEXT:
        return {"error": f"renders more than {MAX_TEXT:,} characters"}
    return {"text": text}


@functools.lru_cache(maxsize=16)
def _compiled(source: str, date: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise jinja2.TemplateError(f"longer than {MAX_SOURCE:,} characters")
    return make_environment(datetime.date.fromisoformat(date)).from_string(source)


class _Generation(jinja2.ext.Extension):
    """Tag {% generation %}, which marks answers for training; only its body is rendered."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja2's own filter escapes <, > and & for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
