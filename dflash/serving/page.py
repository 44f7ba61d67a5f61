"""Web page at /, a single file that loads no external resources."""

import base64
import functools
import hashlib
import pathlib
import re

from starlette.responses import Response

_FILE = pathlib.Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def response() -> Response:
    """Returns the page; its Content-Security-Policy allows only the page's own script and style."""
    content, policy = _content()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(content, media_type="text/html", headers=headers)


@functools.cache
def _content() -> tuple[bytes, str]:
    text = _FILE.read_text(encoding="utf-8")
    hashes = {"script": "'none'", "style": "'none'"}
    for kind, inner in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        hashes[kind] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text.encode(), policy
