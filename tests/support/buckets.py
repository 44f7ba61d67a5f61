"""A bucket for tests: a server of Google Cloud Storage's protocol, on a port of this machine.

gcp-storage-emulator keeps the objects and speaks most of the protocol. What it lacks and clients
rely on is added here: the generation of an object that is read, and writing on condition of one.
"""

import contextlib
import http.server
import json
import logging
import os
import threading
import urllib.parse
from collections.abc import Iterator

from gcp_storage_emulator import server, storage
from gcp_storage_emulator.handlers import buckets

BUCKET = "shelf"
_SETTINGS = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")


class _Refused(Exception):
    """The condition of a request does not hold."""


class _Storage(storage.Storage):
    """Objects in memory, written on condition."""

    wanted: str | None = None  # generation that the request at hand demands; "0": none is there

    def create_file(self, bucket_name, file_name, *rest):
        if self.wanted is not None:
            try:
                there = self.get_file_obj(bucket_name, file_name)["generation"]
            except storage.NotFound:
                there = "0"
            if there != self.wanted:
                raise _Refused
        return super().create_file(bucket_name, file_name, *rest)


class _Handler(server.RequestHandler):
    lock = threading.Lock()

    def _serve(self, method: str) -> None:
        url = urllib.parse.urlparse(self.path)
        wanted = urllib.parse.parse_qs(url.query).get("ifGenerationMatch", [None])[0]
        with self.lock, contextlib.suppress(ConnectionError):
            self.storage.wanted = wanted
            try:
                server.Router(self).handle(method)
            except _Refused:
                body = json.dumps({"error": {"code": 412, "message": "condition"}}).encode()
                self.send_response(412)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    def end_headers(self):
        """Adds the generation of the object that is read."""
        url = urllib.parse.urlparse(self.path)
        if self.command == "GET" and "alt=media" in url.query:
            bucket, _, name = url.path.rpartition("/b/")[2].partition("/o/")
            with contextlib.suppress(storage.NotFound):
                found = self.storage.get_file_obj(bucket, urllib.parse.unquote(name))
                self.send_header("x-goog-generation", found["generation"])
        super().end_headers()

    def do_GET(self):
        self._serve("GET")

    def do_POST(self):
        self._serve("POST")

    def do_PUT(self):
        self._serve("PUT")

    def do_PATCH(self):
        self._serve("PATCH")

    def do_DELETE(self):
        self._serve("DELETE")


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serves an empty bucket, to this process and those that it starts; yields gs://BUCKET."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    kept = _Storage(use_memory_fs=True)
    buckets.create_bucket(BUCKET, kept)
    listening = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *args: _Handler(kept, *args)
    )
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{listening.server_port}"
    # Without credentials, gcsfs would ask Google of what kind the bucket is.
    given = dict.fromkeys(_SETTINGS, url) | {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield f"gs://{BUCKET}"
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        listening.shutdown()
        listening.server_close()
