# SPDX-License-Identifier: Apache-2.0
"""A stub of W&B's server, of which W&B's own client makes and resumes runs.

It answers the requests of wandb 0.31 for a run's state, history and files, and keeps what they
hold.
"""

import gzip
import http.server
import json
import re
import threading
from typing import Any, Self


class WandbServer:
  """A server on loopback, for use in a `with` statement.

  Attributes:
    url: Its address, for WANDB_BASE_URL.
    history: Run id -> its rows.
    summary: Run id -> newest values.
    config: Run id -> its configuration.
    files: Name -> content of the uploaded files.
    resumed: Ids of the runs that a client found when it asked.
    is_down: Whether it refuses all requests.
  """

  def __init__(self):
    self.history: dict[str, list[dict[str, Any]]] = {}
    self.summary: dict[str, dict[str, Any]] = {}
    self.config: dict[str, dict[str, Any]] = {}
    self.files: dict[str, bytes] = {}
    self.resumed: list[str] = []
    self.is_down = False
    handler = type("BoundHandler", (_Handler,), {"state": self})
    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    self.url = f"http://127.0.0.1:{self._server.server_port}"

  def __enter__(self) -> Self:
    threading.Thread(target=self._server.serve_forever, daemon=True).start()
    return self

  def __exit__(self, *unused: object):
    self._server.shutdown()
    self._server.server_close()

  def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the data of a GraphQL request."""
    project = {"id": "1", "name": given.get("project"), "entity": {"id": "2", "name": "team"}}
    if operation == "RunResumeStatus":
      return {"model": project | {"bucket": self._bucket(given["name"])}}
    if operation == "UpsertBucket":
      return {"upsertBucket": self._upsert(given, project)}
    if operation == "CreateRunFiles":
      files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
      return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
    if operation == "Viewer":
      return {"viewer": {"id": "4", "entity": "team", "username": "me", "flags": "{}"}}
    return {}

  def _bucket(self, run: str) -> dict[str, Any] | None:
    """Returns the state of a run to be resumed; None: there is no such run."""
    if run not in self.history:
      return None
    self.resumed.append(run)
    tail = [json.dumps(row) for row in self.history[run][-1:]]
    return {
      "id": "3",
      "name": run,
      "displayName": run,
      "summaryMetrics": json.dumps(self.summary.get(run, {})),
      "config": json.dumps(self.config[run]),
      "historyLineCount": len(self.history[run]),
      "historyTail": json.dumps(tail),
      "eventsLineCount": 0,
      "eventsTail": "[]",
      "logLineCount": 0,
      "tags": [],
      "notes": "",
      "wandbConfig": '{"t": 1}',
    }

  def _upsert(self, given: dict[str, Any], project: dict[str, Any]) -> dict[str, Any]:
    run, is_new = given["name"], given["name"] not in self.history
    self.history.setdefault(run, [])
    self.config.setdefault(run, {}).update(json.loads(given["config"] or "{}"))
    bucket = {"id": "3", "name": run, "displayName": run, "config": "{}", "project": project}
    return {
      "bucket": bucket | {"historyLineCount": len(self.history[run])},
      "inserted": is_new,
    }

  def stream(self, run: str, files: dict[str, Any]):
    """Adds what a client sends of a run's history and summary."""
    for chunk in [files[name] for name in files if name == "wandb-history.jsonl"]:
      rows = [json.loads(line) for line in chunk["content"]]
      self.history[run][chunk["offset"] :] = rows
    for chunk in [files[name] for name in files if name == "wandb-summary.json"]:
      self.summary[run] = json.loads(chunk["content"][-1])


class _Handler(http.server.BaseHTTPRequestHandler):
  state: WandbServer

  def log_message(self, format: str, *args: Any):
    """Is silent."""

  def _handle(self):
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    if self.headers.get("Content-Encoding") == "gzip":
      body = gzip.decompress(body)
    answer: dict[str, Any] = {}
    if self.state.is_down:
      self.send_error(503)
      return
    if self.path == "/graphql":
      request = json.loads(body)
      answer = {"data": self.state.answer(request["operationName"], request.get("variables", {}))}
    elif match := re.fullmatch(r"/files/.*/(\w+)/file_stream", self.path):
      self.state.stream(match[1], json.loads(body).get("files", {}))
    elif self.path.startswith("/upload/"):
      self.state.files[self.path.removeprefix("/upload/")] = body
    content = json.dumps(answer).encode()
    self.send_response(200)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    self.wfile.write(content)

  do_GET = do_POST = do_PUT = _handle
