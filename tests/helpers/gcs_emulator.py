# SPDX-License-Identifier: Apache-2.0
"""gcp-storage-emulator with the generations that TensorStore relies on: `gcs_emulator.py PORT`.

It answers one request after the other, so that a condition holds until its request is done. After
a POST of /refuse-writes it refuses to write.
See cloud.google.com/storage/docs/request-preconditions for the conditions.
"""

import functools
import http.server
import json
import re
import sys
import urllib.parse
from typing import Any

from gcp_storage_emulator import exceptions, server, storage
from gcp_storage_emulator.handlers import buckets

_OBJECT = re.compile(r"(?:/download|/upload)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?")
_NAME = re.compile(rb'"name": ("[^"]*")')


class Handler(server.RequestHandler):
  """Answers a request if its conditions hold, and tells the generation of what is downloaded."""

  _generation = 0
  _refuses_writes = False

  def _query(self) -> dict[str, list[str]]:
    return urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)

  def _found(self) -> int:
    """Returns the generation of the object that the request is about; 0: there is none."""
    match = _OBJECT.fullmatch(urllib.parse.urlsplit(self.path).path)
    if match is None:
      return 0
    name = match[2] or self._query().get("name", [""])[0]
    if not name and int(self.headers.get("Content-Length", 0)):
      # A multipart upload names it in its body.
      body: Any = self.rfile
      said = _NAME.search(body.peek())
      name = json.loads(said[1]) if said else ""
    try:
      return int(self.storage.get_file_obj(match[1], urllib.parse.unquote(name))["generation"])
    except exceptions.NotFound:
      return 0

  def _refused(self) -> int:
    """Returns the status by which the request is refused; 0: its conditions hold."""
    if Handler._refuses_writes and self.command in ("POST", "PUT"):
      return 403
    for name, wanted in (("ifGenerationMatch", True), ("ifGenerationNotMatch", False)):
      for text in self._query().get(name, []):
        if (int(text) == self._generation) is not wanted:
          return 412 if wanted or self.command != "GET" else 304
    return 0

  def _answer(self, method: str):
    self._generation = self._found()
    if self.path == "/refuse-writes":
      Handler._refuses_writes = True
    status = self._refused()
    if not status:
      server.Router(self).handle(method)
      return
    self.rfile.read(int(self.headers.get("Content-Length", 0)))
    self.send_response(status)
    self.send_header("Content-Length", "0")
    self.end_headers()

  def do_GET(self):
    self._answer("GET")

  def do_POST(self):
    self._answer("POST")

  def do_PUT(self):
    self._answer("PUT")

  def do_DELETE(self):
    self._answer("DELETE")

  def end_headers(self):
    if self.command == "GET" and self._generation:
      self.send_header("x-goog-generation", str(self._generation))
    super().end_headers()


def main(port: int):
  """Serves one empty bucket, named "bucket"."""
  objects = storage.Storage(use_memory_fs=True)
  buckets.create_bucket("bucket", objects)
  http.server.HTTPServer.request_queue_size = 128
  serve = functools.partial(Handler, objects)
  http.server.HTTPServer(("127.0.0.1", port), serve).serve_forever()


if __name__ == "__main__":
  main(int(sys.argv[1]))
